"""Atomic writes of small files."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Replace `path` by rename, so that a partial file is never visible, even after a kill.

    Args:
        durable: also survive a power failure (fsync); disable it for files that are written often.

    Raises:
        OSError: nothing was replaced.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Sync a file or folder to disk; for a folder, the names of its entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk; for folders that are published atomically (else `write_atomic`)."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
