"""Directories that are not there, not writable, slow, full, or without the operations checkpoints rest on."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, ok, warn
from llmrecipes.units import GIB, MIB

TRIED_BYTES = 64 * MIB
SLOW = 100e6
"""Bytes a second below which checkpoints and logs hold training up."""
CHECKPOINTS = 3
"""Checkpoints there has to be room for: those kept by default, and the one being written."""
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")


def check(directory: Path, name: str, checkpoint_bytes: int = 0, *, measured: bool = False) -> Iterator[Finding]:
    """What is wrong with a directory that a run writes to. What is tried there is removed again.

    Args:
        directory: `runs` or `data`; it may not exist yet.
        name: how findings call it.
        checkpoint_bytes: size of one checkpoint; 0 where nothing that large is written.
        measured: whether to write 64 MiB and see how long that takes.
    """
    there = next(folder for folder in (directory, *directory.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=there) as folder:
            yield from _operations(Path(folder), name)
            if measured:
                yield _speed(Path(folder), name)
    except OSError as error:
        yield fail(name, f"{there} cannot be written to: {error.strerror}", "another directory, or its permissions")
        return
    free, needed = shutil.disk_usage(there).free, CHECKPOINTS * checkpoint_bytes
    if free < max(needed, GIB):
        what = f"{free / GIB:.1f} GiB free in {there}"
        what += f", and {CHECKPOINTS} checkpoints take {needed / GIB:.1f}" if needed else ""
        yield fail(name, what, "more space, or another directory")
    else:
        yield ok(name, f"{there}: {free / GIB:,.0f} GiB free, {_file_system(there)}")
    if os.statvfs(there).f_files and os.statvfs(there).f_favail < 1000:
        yield fail(
            name, f"{os.statvfs(there).f_favail} files can still be made in {there}", "delete files; inodes are used up"
        )


def temporary(directory: Path) -> str | None:
    """Kind of a file system that other nodes cannot see and a restart empties; None for others."""
    kind = _file_system(directory)
    return kind if kind in MEMORY_FILE_SYSTEMS else None


def _operations(folder: Path, name: str) -> Iterator[Finding]:
    """A checkpoint is published by renaming its directory, a file by replacing the old one."""
    old, new = folder / "old", folder / "new"
    new.mkdir()
    (new / "part").write_text("x", "ascii")
    try:
        new.rename(old)
        (old / "next").write_text("y", "ascii")
        (old / "next").replace(old / "part")
        complete = (old / "part").read_text("ascii") == "y" and not new.exists()
    except OSError as error:
        yield fail(
            name, f"renaming fails: {error.strerror}", "a file system with atomic rename (NFS, Lustre, GPFS, local)"
        )
        return
    if not complete:
        yield fail(name, "renaming is not atomic", "a file system with atomic rename (NFS, Lustre, GPFS, local)")


def _speed(folder: Path, name: str) -> Finding:
    data = os.urandom(MIB)  # what cannot be compressed on the way
    started = time.monotonic()
    with (folder / "tried").open("wb") as file:
        for _ in range(TRIED_BYTES // MIB):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    speed = TRIED_BYTES / (time.monotonic() - started)
    if speed < SLOW:
        return warn(
            f"{name} speed", f"writes {speed / 1e6:.0f} MB/s", "a faster file system for runs, or saves less often"
        )
    return ok(f"{name} speed", f"writes {speed / 1e6:,.0f} MB/s")


def _file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    try:
        lines = [line.split() for line in mounts.read_text("utf-8").splitlines()]
    except OSError:
        return "unknown"
    here = path.resolve()
    points = [(Path(line[1].encode().decode("unicode_escape")), line[2]) for line in lines if len(line) > 2]
    under = [(len(point.parts), kind) for point, kind in points if here.is_relative_to(point)]
    return max(under, default=(0, "unknown"))[1]
