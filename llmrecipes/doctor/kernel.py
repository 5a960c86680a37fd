"""Errors of NVIDIA GPUs in the kernel's log: Xid messages."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, ok, skip, warn

LOG = Path("/dev/kmsg")
LONGEST_RECORD = 8192
DAY = 86400.0
_RECORD = re.compile(r"\d+,\d+,(\d+),")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
APPLICATION = frozenset({8, 13, 31, 32, 43, 45, 68, 69, 109})
"""Errors of the program that ran, not of the GPU (NVIDIA's Xid catalogue)."""
NEEDS = {
    48: "reset the GPU: an uncorrectable memory error",
    62: "reset the GPU: its internal controller has halted",
    64: "reset the GPU, replace it if this returns: a row could not be remapped",
    74: "check the NVLinks (nvidia-smi nvlink -e), reset the GPUs; replace them if this returns",
    79: "reboot the node; if it returns, check power and seating, replace the GPU",
    95: "reset the GPU: a memory error that other programs may have seen",
    119: "reset the GPU or reboot the node: its GSP firmware does not respond",
    120: "reset the GPU or reboot the node: its GSP firmware failed",
    140: "reset the GPU: an unrecovered memory error",
    143: "reboot the node; replace the GPU if this returns: it could not be initialised",
}
"""What a GPU needs before it can be used again."""


def records(log: Path = LOG) -> list[str] | None:
    """Records of the kernel's log, as Documentation/ABI/testing/dev-kmsg describes them; None if it cannot be read."""
    try:
        source = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: list[str] = []
    try:
        while True:
            try:
                record = os.read(source, LONGEST_RECORD)
            except BlockingIOError:
                return found
            except BrokenPipeError:  # records were overwritten meanwhile; the next read returns the oldest one left
                continue
            except OSError:
                return found
            if not record:
                return found
            found += record.decode("utf-8", "replace").splitlines()
    finally:
        os.close(source)


def check(log: Sequence[str] | None, now: float, fine: Collection[str] = ()) -> Iterator[Finding]:
    """Find Xid messages; those of programs are left out, and old ones do not fail a node that may have been reset.

    Args:
        log: see `records`.
        now: seconds since the machine started.
        fine: addresses of GPUs whose errors are no reason to fail the node: the driver says that they need nothing, or
            they belong to another job.
    """
    if log is None:
        yield skip("kernel log", "cannot be read: root only (kernel.dmesg_restrict), or a container")
        return
    seen: dict[tuple[str, int], tuple[float, str, int]] = {}
    for line in log:
        message, stamp = _XID.search(line), _RECORD.match(line)
        if message and int(message[2]) not in APPLICATION:
            at = int(stamp[1]) / 1e6 if stamp else now
            key = (message[1], int(message[2]))
            seen[key] = (at, message[3] or "", seen[key][2] + 1 if key in seen else 1)
    for (gpu, xid), (at, text, times) in seen.items():
        age = max(0.0, now - at)
        what = f"Xid {xid} on {gpu}, {times} times, last {_ago(age)} ago" + (f": {text}" if text else "")
        verdict = fail if xid in NEEDS and age < DAY and gpu.lower() not in fine else warn
        yield verdict("kernel log", what, NEEDS.get(xid, "look the number up in NVIDIA's Xid catalogue"))
    if not seen:
        yield ok("kernel log", "no Xid errors of GPUs")


def _ago(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * DAY else f"{seconds / DAY:.0f} days"
