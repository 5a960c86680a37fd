"""Processes: where an id means something, when one started, and for how long what another one writes is unchanged.

A process id means something only on the machine, since the boot, and in the PID namespace (a container has its own)
where it was given. No clock is compared with another one: who watches a heartbeat or a lease counts by its own
monotonic clock how long it has not changed.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

MISSING = object()
STARTED_FOR, STARTED_BY = "LLMRECIPES_STARTED_FOR", "LLMRECIPES_STARTED_BY"
"""Variables of all processes of a start: the folder of the run's logs, and the launcher as PID:START in clock ticks."""


@dataclass(frozen=True)
class MachineIdentity:
    """Where process ids mean the same: one boot of one machine, and one PID namespace."""

    host: str
    boot_id: str
    pid_namespace: str

    @property
    def is_this(self) -> bool:
        """Whether this machine can look up its processes by id."""
        machine = this_machine()
        same_boot = self.boot_id == machine.boot_id and (bool(self.boot_id) or self.host == machine.host)
        return same_boot and self.pid_namespace == machine.pid_namespace

    @staticmethod
    def of(values: Mapping[str, Any]) -> MachineIdentity:
        """From plain data; another machine if it is incomplete."""
        return MachineIdentity(*(str(values.get(name, "?")) for name in ("host", "boot_id", "pid_namespace")))

    def as_dict(self) -> dict[str, str]:
        """Plain data for JSON."""
        return asdict(self)


@cache
def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def this_machine() -> MachineIdentity:
    """This machine, boot and PID namespace."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return MachineIdentity(socket.gethostname(), _boot_id(), namespace)


def start_ticks(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since the boot; None if it has ended.

    psutil has it as a wall-clock time, which moves with each correction of the clock.
    """
    try:
        text = Path(f"/proc/{int(pid)}/stat").read_text("utf-8", "replace")
    except (OSError, ValueError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # proc(5): the name is in brackets, and may have any character
    return None if state in "ZX" else int(rest[18])


def process_seconds() -> float:
    """Seconds since this process started, with those in which the machine was suspended."""
    ticks = start_ticks(os.getpid()) or 0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def peak_memory() -> int:
    """Bytes that this process had at once, at most.

    Linux hands `ru_maxrss` down to a started program: it would be at least that of the parent.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Watch:
    """For how long values have not changed, by the monotonic clock of this machine."""

    _seen: dict[Hashable, tuple[Any, float]] = field(default_factory=dict)

    def unchanged(self, key: Hashable, value: Any = True) -> float:
        """Seconds since the value was seen for the first time; 0 if it is another one than last time."""
        known, since = self._seen.get(key, (MISSING, 0.0))
        now = time.monotonic()
        if known != value:
            self._seen[key] = value, now
            return 0.0
        return now - since

    def keep(self, keys: Collection[Hashable]) -> None:
        """Forget all other keys."""
        for key in self._seen.keys() - set(keys):
            del self._seen[key]
