"""perftest's programs: their command lines, their output, and processes that always end."""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from llmrecipes.hardware.binding import parse_ranges, ranges
from llmrecipes.hardware.cluster import allowed_cpus
from llmrecipes.hardware.nics import SYSTEM, Port

What = Literal["latency", "bandwidth"]
PROGRAMS: dict[What, str] = {"latency": "ib_send_lat", "bandwidth": "ib_write_bw"}
WRITE_BYTES = 64 << 10
SEND_BYTES = 8
SENDS = 500
SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"
LISTEN_SECONDS = 10.0
"""A server listens within this time."""
END_SECONDS = 5.0
NO_CLOCK = "perftest cannot measure time: the node is too busy"
_NO_CLOCK = "Correlation coefficient"
"""What it says on stderr then; its results are 0 or infinite."""


@dataclass(frozen=True)
class Local:
    """A port of this node, as perftest takes it."""

    port: Port
    gid: int | None
    """Index of RoCE's address; None for InfiniBand."""
    traffic_class: str = ""
    """Of RoCE, which decides whether the network may drop packets; empty: the adapter's."""
    service_level: str = ""
    """Empty: 0."""


@dataclass(frozen=True)
class PerftestResult:
    """One transfer: `latency_us` and `latency_99_us` (half a round trip: median, 99 %) or `gb_per_s` (1e9 bytes)."""

    latency_us: float | None = None
    latency_99_us: float | None = None
    gb_per_s: float | None = None


def missing() -> list[str]:
    """Programs that are not installed."""
    return [program for program in PROGRAMS.values() if shutil.which(program) is None]


def command(what: What, local: Local, seconds: float, tcp: int, peer: str | None) -> list[str]:
    """The command line of one end.

    Args:
        local: port of this node.
        seconds: of the bandwidth.
        tcp: on which the receiver listens.
        peer: host of the receiver; None: this is the receiver.
    """
    ways = [] if local.gid is None else ["-x", str(local.gid)]
    ways += [f"--tclass={local.traffic_class}"] if local.traffic_class and local.gid is not None else []
    ways += ["-S", local.service_level] if local.service_level else []
    amount = ["-s", str(SEND_BYTES), "-n", str(SENDS)]
    if what == "bandwidth":  # a second at each end does not count
        amount = ["-s", str(WRITE_BYTES), "-D", f"{seconds:.0f}", "-f", "1"]
    port = ["-d", local.port.device, "-i", local.port.number, *ways, "-p", str(tcp)]
    return [*_near(local.port), PROGRAMS[what], "-F", *port, *amount, *([] if peer is None else [peer])]


def parse(what: What, output: str) -> PerftestResult | None:
    """The result in a program's output; None if there is none, or none that can be true."""
    lines = iter(output.splitlines())
    if not any(line.lstrip().startswith("#bytes") for line in lines):
        return None
    try:
        values = [float(word) for word in next(lines, "").split()]
        if what == "bandwidth":  # from messages a second, which has more digits than perftest's MB/s
            speed = values[0] * values[4] / 1e3
            return PerftestResult(gb_per_s=speed) if 0 < speed < math.inf else None
        median, slow = values[4], values[7]
        return PerftestResult(latency_us=median, latency_99_us=slow) if 0 < median <= slow < math.inf else None
    except (IndexError, ValueError):
        return None


class Process:
    """A running program; `timeout` ends it even if this process is gone, because over a cut link it may wait forever.

    Args:
        limit: seconds.
    """

    def __init__(self, words: Sequence[str], limit: float) -> None:
        self._output: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            ["timeout", "--kill-after=5", f"{limit:.0f}", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by a time of `time.monotonic`."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> str:
        """End it if it still runs; what it has printed."""
        if self.running():
            self._process.terminate()  # `timeout` passes it on
            if not self.wait(time.monotonic() + END_SECONDS):
                self._process.kill()
        self._output.seek(0)
        printed = self._output.read()
        self._output.close()
        return printed


def failure(output: str) -> str:
    """Why a program has failed: in most cases the last words that it printed."""
    if _NO_CLOCK in output:
        return NO_CLOCK
    if "#bytes" in output:
        return "perftest produced no result"
    lines = [line.strip() for line in output.splitlines() if re.search(r"[A-Za-z]", line)]
    return lines[-1][:200] if lines else "perftest exited without output"


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on, all different."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


def listens(tcp: int) -> bool:
    """Whether a process listens on a port."""
    for file in SOCKETS:
        try:
            rows = [line.split() for line in file.read_text("ascii").splitlines()[1:]]
        except OSError:
            continue
        if any(row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == tcp for row in rows):
            return True
    return False


def _near(port: Port, system: Path = SYSTEM) -> list[str]:
    """Runs a program on the cores next to the adapter: memory behind the other socket is slower than fast ports."""
    try:
        near = set(parse_ranges((system / port.device / "device/local_cpulist").read_text("ascii")))
    except (OSError, ValueError):
        return []
    allowed = allowed_cpus()
    if not near & allowed or allowed <= near:
        return []
    return ["taskset", "--cpu-list", ranges(sorted(near & allowed))]
