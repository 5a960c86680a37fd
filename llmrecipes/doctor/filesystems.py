"""Directories that are missing, read-only, slow, full, or lack the operations that checkpoints need."""

from __future__ import annotations

import os
import re
import shutil
import stat
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from llmrecipes.commandline import command_line
from llmrecipes.doctor.finding import Finding, fail, ok, warn
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import GIB, MIB

TRIED_BYTES = 64 * MIB
FILES, FILES_SECONDS = 100, 2.0
"""Small files that are written and removed, and the time above which metadata slow down checkpoints of many ranks."""
FULL = 0.95
"""Used share above which shared file systems become slow."""
SLOW = 100e6
"""Bytes per second below which checkpoints and logs slow training down."""
CHECKPOINTS = 3
"""Checkpoints that have to fit: those kept by default, and the one being written."""
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs")
_OCTAL = re.compile(r"\\([0-7]{3})")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")


def check(directory: Path, name: str, checkpoint_bytes: int = 0, *, measured: bool = False) -> Iterator[Finding]:
    """Check a directory that a run writes to. Test files are removed again.

    Args:
        directory: `runs` or `data`; it may not exist yet.
        name: its name in findings.
        checkpoint_bytes: size of one checkpoint; 0 if none are written.
        measured: whether to time a write of 64 MiB.
    """
    try:
        existing = _existing(directory)
    except OSError as error:
        yield fail(name, f"{error.filename}: {error.strerror}", "mount it again, or fix its permissions")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as folder:
            yield from _operations(Path(folder), name)
            if measured:
                yield _speed(Path(folder), name)
                yield from _metadata(Path(folder), name)
    except OSError as error:
        yield fail(
            name, f"{existing} is not writable: {error.strerror}", "use another directory, or fix its permissions"
        )
        return
    disk = shutil.disk_usage(existing)
    free, needed = disk.free, CHECKPOINTS * checkpoint_bytes
    if free < max(needed, GIB):
        what = f"{free / GIB:.1f} GiB free in {existing}"
        what += f", but {CHECKPOINTS} checkpoints need {needed / GIB:.1f}" if needed else ""
        yield fail(name, what, "free some space, or use another directory")
    elif disk.used > FULL * disk.total and _file_system(existing) in SHARED:
        what = f"{existing} is {disk.used / disk.total:.0%} full, {free / GIB:,.0f} GiB free, {_file_system(existing)}"
        yield warn(name, what, "free some space: Lustre and GPFS are slow when nearly full, and others fill the rest")
    else:
        yield ok(name, f"{existing}: {free / GIB:,.0f} GiB free, {_file_system(existing)}")
    if os.statvfs(existing).f_files and os.statvfs(existing).f_favail < 1000:
        yield fail(
            name, f"{os.statvfs(existing).f_favail} free inodes in {existing}", "delete files, or use another directory"
        )


def temporary(directory: Path) -> str | None:
    """Type of a file system that is local and lost at a restart; None for others."""
    kind = _file_system(directory)
    return kind if kind in MEMORY_FILE_SYSTEMS else None


def _operations(folder: Path, name: str) -> Iterator[Finding]:
    """Check directory rename, which publishes checkpoints, and file replacement."""
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
            name, f"rename fails: {error.strerror}", "use a file system with atomic rename (NFS, Lustre, GPFS, local)"
        )
        return
    if not complete:
        yield fail(name, "rename is not atomic", "use a file system with atomic rename (NFS, Lustre, GPFS, local)")


def _speed(folder: Path, name: str) -> Finding:
    data = os.urandom(MIB)  # incompressible
    started = time.monotonic()
    with (folder / "tried").open("wb") as file:
        for _ in range(TRIED_BYTES // MIB):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    speed = TRIED_BYTES / (time.monotonic() - started)
    if speed < SLOW:
        return warn(f"{name} speed", f"writes {speed / 1e6:.0f} MB/s", "use a faster file system, or save less often")
    return ok(f"{name} speed", f"writes {speed / 1e6:,.0f} MB/s")


def _metadata(folder: Path, name: str) -> Iterator[Finding]:
    started = time.monotonic()
    for number in range(FILES):
        (folder / f"{number}").write_text("x", "ascii")
    for number in range(FILES):
        (folder / f"{number}").unlink()
    seconds = time.monotonic() - started
    if seconds > FILES_SECONDS:
        what = f"{FILES} small files take {seconds:.1f} s"
        yield warn(
            f"{name} files", what, "look for a busy metadata server: other jobs, or a folder with millions of files"
        )


def _existing(directory: Path) -> Path:
    """The directory, or the nearest above it that there is.

    Raises:
        OSError: it exists, but is a stale handle of a server, or this user may not look.
    """
    for folder in (directory, *directory.absolute().parents):
        try:
            if stat.S_ISDIR(folder.stat().st_mode):
                return folder
        except (FileNotFoundError, NotADirectoryError):
            continue
    return Path("/")


def _file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    try:
        lines = [line.split() for line in mounts.read_text("utf-8", "surrogateescape").splitlines()]
    except OSError:
        return "unknown"
    folder = path.resolve()
    # The kernel writes spaces and backslashes as \040 and \134.
    points = [(Path(_OCTAL.sub(lambda each: chr(int(each[1], 8)), line[1])), line[2]) for line in lines if line[2:]]
    under = [(len(point.parts), kind) for point, kind in points if folder.is_relative_to(point)]
    return max(under, default=(0, "unknown"))[1]


UNEQUAL = 10
"""A file this many times larger than the median keeps one process busy after the others have finished."""


def check_data(recipe: Recipe, data_dir: Path) -> Iterator[Finding]:
    """Check the prepared data, or its sources if it is not prepared."""
    from llmrecipes.data.prepared import TOKENIZER, fingerprint, open_prepared

    if (data_dir / fingerprint(recipe)).is_dir():
        try:
            prepared = open_prepared(recipe, data_dir)
            prepared.tokenizer()
        except UserError as error:
            yield fail(
                "data",
                str(error).splitlines()[0].removeprefix("error: "),
                "delete that folder, then llmrecipes prepare",
            )
            return
        counts = prepared.manifest.counts("train")
        yield ok("data", f"{prepared.path}: {counts.tokens:,} training tokens, {TOKENIZER}")
        return
    yield warn(
        "data",
        f"recipe {recipe.name} is not prepared in {data_dir}",
        command_line("prepare", recipe.name, data_dir=data_dir),
    )
    yield from _sources(recipe)


def _sources(recipe: Recipe) -> Iterator[Finding]:
    from llmrecipes.data.sources import files, label

    for source in recipe.data.sources:
        check_name = f"source {label(source)}"
        if source.type == "hub":
            yield warn(check_name, "is on the Hugging Face Hub", "llmrecipes prepare on a node with internet access")
            continue
        try:
            sizes = [file.stat().st_size for file in files(source)]
        except (UserError, OSError) as error:
            yield fail(check_name, str(error).splitlines()[0].removeprefix("error: "), "data.sources in the recipe")
            continue
        middle = statistics.median(sizes)
        if source.type in ("jsonl", "parquet") and len(sizes) > 1 and max(sizes) > UNEQUAL * max(middle, 1):
            what = f"the largest of {len(sizes)} files has {max(sizes) / max(middle, 1):.0f} times the median size"
            yield warn(check_name, what, "split it into files of equal size")
        else:
            yield ok(check_name, f"{len(sizes)} files, {sum(sizes) / MIB:,.1f} MiB")
    tokenizer = recipe.data.tokenizer
    if (
        tokenizer.type == "huggingface"
        and tokenizer.path
        and "/" in tokenizer.path
        and not Path(tokenizer.path).exists()
    ):
        yield warn(
            "tokenizer", f"{tokenizer.path} is not a directory on this node", "a directory, or a node with Hub access"
        )
