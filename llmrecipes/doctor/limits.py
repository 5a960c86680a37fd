"""Limits of this process that are too low: locked memory, shared memory, open files."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, ok, warn
from llmrecipes.hardware.nics import RDMA
from llmrecipes.hardware.profile import Profile
from llmrecipes.units import GIB

SHARED_PER_RANK = GIB
"""Shared memory a rank may need: NCCL's transport between processes of a node, and batches of DataLoader workers.
Docker's default is 64 MiB."""
FILES = 4096
PROCESS = Path("/proc/self/status")
CAP_IPC_LOCK = 14
"""Bit of a capability set (linux/capability.h)."""


@dataclass(frozen=True)
class Limits:
    """Limits of this process; None: no limit."""

    memlock_bytes: int | None
    shared_bytes: int
    open_files: int | None


def read() -> Limits:
    """The limits of this process."""
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - not written to
    return Limits(
        memlock_bytes=None if _may_lock(PROCESS) else _limit(resource.RLIMIT_MEMLOCK),
        shared_bytes=shared.f_frsize * shared.f_bavail if shared else 0,
        open_files=_limit(resource.RLIMIT_NOFILE),
    )


def check(limits: Limits, profile: Profile | None, ranks: int) -> Iterator[Finding]:
    """Find limits that are too low.

    Args:
        limits: see `read`.
        profile: RDMA adapters need locked memory.
        ranks: on this node.
    """
    if profile is not None and profile.inter_node.kind in RDMA and limits.memlock_bytes is not None:
        fix = (
            "ulimit -l unlimited: LimitMEMLOCK=infinity for slurmd, in pods for containerd (CRI-O: default_ulimits); "
            "--ulimit memlock=-1 for docker. IPC_LOCK has no effect without root"
        )
        yield fail("locked memory", f"{limits.memlock_bytes >> 10} KiB; RDMA pins its buffers", fix)
    else:
        amount = "no limit" if limits.memlock_bytes is None else f"{limits.memlock_bytes >> 10} KiB"
        yield ok("locked memory", amount)
    needed = SHARED_PER_RANK * max(ranks, 1)
    if limits.shared_bytes < needed:
        what = f"{limits.shared_bytes / GIB:.1f} GiB in /dev/shm for {ranks} ranks"
        yield warn("shared memory", what, "--ipc=host, --shm-size, or an emptyDir of medium Memory at /dev/shm")
    else:
        yield ok("shared memory", f"{limits.shared_bytes / GIB:.1f} GiB free in /dev/shm")
    if limits.open_files is not None and limits.open_files < FILES:
        yield warn("open files", f"at most {limits.open_files}", f"ulimit -n {FILES} or more")


def _may_lock(status: Path) -> bool:
    """Whether the process has CAP_IPC_LOCK in effect, which lifts the limit of locked memory."""
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text("ascii"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return False
    return found is not None and bool(int(found[1], 16) >> CAP_IPC_LOCK & 1)


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
