"""What kind of file system and disk a folder is on."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_IN_MEMORY = frozenset(("tmpfs", "ramfs"))
_SHARED = frozenset(("nfs", "nfs4", "lustre", "cifs", "smb3", "9p", "gpfs", "beegfs", "beegfs_nodev", "ceph", "afs"))


def unfit_for_offload(folder: Path) -> str | None:
    """Why a folder is not on a fast local disk; None if it is, or if unknown.

    Args:
        folder: need not exist yet.
    """
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is a file"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable"
    kind = file_system(nearest)
    if kind in _IN_MEMORY:
        return f"{nearest} is in main memory ({kind})"
    if kind in _SHARED or kind.startswith("fuse."):
        return f"{nearest} is on a shared file system ({kind})"
    return f"{nearest} is on a spinning disk" if _rotates(nearest) else None


def file_system(folder: Path) -> str:
    """Type of the file system of an existing folder, such as `ext4`; empty if it is not known."""
    real = folder.resolve()
    mounts = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (real, *real.parents) if parent in mounts), "")


def _rotates(folder: Path) -> bool:
    device = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if "virtio" in str(block):
        return False  # a virtual disk reports that it rotates, whatever is below it
    # A partition's folder is inside its disk's.
    for path in (block, block.parent):
        if (path / "queue" / "rotational").is_file():
            return (path / "queue" / "rotational").read_text().strip() == "1"
    return False
