"""Processes that a start of this run has left on this machine: ended before the next ranks start.

A rank ends with its launcher once it runs, but not while it is being started, and its loader workers look for it every
few seconds, or never if they are stopped. They hold memory of the GPU and write into files of the run. Each process
of a start has two variables that say which launcher of which run began it; those of another run, machine, container or
user, and those of a launcher that still runs, are left alone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from llmrecipes.hardware.process import STARTED_BY, STARTED_FOR, start_ticks

logger = logging.getLogger(__name__)

LONGEST_DEATH = 10.0
"""Seconds to wait for killed processes, such as one that hangs in the kernel on a dead file system."""


def marks(logs: Path) -> dict[str, str]:
    """Variables of all processes of a start.

    Args:
        logs: folder of the run's logs, which is different for each run.
    """
    return {STARTED_FOR: str(logs.resolve()), STARTED_BY: f"{os.getpid()}:{start_ticks(os.getpid())}"}


def end_leftover(logs: Path, spared: Collection[int] = ()) -> list[int]:
    """Kill what earlier starts of a run have left, and wait for it.

    Args:
        logs: folder of the run's logs.
        spared: ids of processes of this launcher that the next start uses.

    Returns:
        Ids of the killed processes.
    """
    ours, handles = marks(logs), {}
    for pid in _processes():
        if pid == os.getpid() or pid in spared:
            continue
        with suppress(OSError), ExitStack() as opened:
            handle = os.pidfd_open(pid)  # before its variables are read: from here the id means this process
            opened.callback(os.close, handle)
            if _is_leftover(pid, ours):
                handles[pid] = handle
                opened.pop_all()
    for handle in handles.values():
        with suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    alive = _wait(handles)
    if handles:
        ended = ", ".join(str(pid) for pid in handles if pid not in alive) or "none"
        logger.warning("ended processes that an earlier start of this run had left: %s", ended)
    if alive:
        logger.warning("they hang in the kernel and may hold a GPU: %s", ", ".join(map(str, alive)))
    return list(handles)


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _is_leftover(pid: int, ours: dict[str, str]) -> bool:
    """Whether a process was started for our run by a launcher that has ended, or by this one for an earlier start."""
    folder = Path("/proc", str(pid))
    if (
        folder.stat().st_uid != os.geteuid()
        or folder.joinpath("ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
    ):
        return False
    variables = dict(item.partition(b"=")[::2] for item in folder.joinpath("environ").read_bytes().split(b"\0"))
    if os.fsdecode(variables.get(os.fsencode(STARTED_FOR), b"")) != ours[STARTED_FOR]:
        return False
    by = os.fsdecode(variables.get(os.fsencode(STARTED_BY), b""))
    launcher, _, ticks = by.partition(":")
    return by == ours[STARTED_BY] or not launcher.isdecimal() or str(start_ticks(int(launcher))) != ticks


def _wait(handles: dict[int, int]) -> list[int]:
    """Close the handles as their processes end; the ids of those that do not in time."""
    poll = select.poll()
    names = {handle: pid for pid, handle in handles.items()}
    for handle in names:
        poll.register(handle, select.POLLIN)
    until = time.monotonic() + LONGEST_DEATH
    while names and (left := until - time.monotonic()) > 0:
        for handle, _ in poll.poll(1000 * left):
            poll.unregister(handle)
            names.pop(handle)
    for handle in handles.values():
        os.close(handle)
    return list(names.values())
