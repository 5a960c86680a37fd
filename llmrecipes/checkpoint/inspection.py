"""Whether a directory is a complete, unmodified checkpoint."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from llmrecipes.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, digest, parse
from llmrecipes.untrusted import Refused, read

NAME = re.compile(r"step-(\d{8,})")
"""Name of a checkpoint's directory."""
OPEN_THREADS = 16
"""A network file system takes about a millisecond to open a file, and a checkpoint has one of each rank."""
_HASH_THREADS = 4

Compare = Callable[[Path, Manifest], None]
"""Compares the files of a directory with its manifest, or raises `InvalidCheckpoint`."""


class InvalidCheckpoint(Exception):
    """A directory that is not a complete, unmodified checkpoint; the message names the file and the reason."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def inspect(path: Path, *, full: bool) -> Entry:
    """Read a checkpoint directory's manifest and check its files.

    Args:
        path: the directory.
        full: compare the SHA-256 of every file, not only names and sizes.

    Raises:
        InvalidCheckpoint: with the first bad file and the reason.
    """
    manifest = read_manifest(path)
    if full:
        compare(path, manifest)
    elif problem := _first(path, manifest.files, _wrong_size, OPEN_THREADS):
        raise InvalidCheckpoint(problem)
    return Entry(path, manifest)


def mismatch(path: Path, files: Mapping[str, FileRecord]) -> str:
    """Compare size and SHA-256 of files; returns the first that differs and why, or nothing.

    Args:
        path: their directory.
        files: their records by name.
    """
    return _first(path, files, _wrong_content, _HASH_THREADS)


def compare(path: Path, manifest: Manifest) -> None:
    """Compare the SHA-256 of every file.

    Raises:
        InvalidCheckpoint: with the first bad file and the reason.
    """
    if problem := mismatch(path, manifest.files):
        raise InvalidCheckpoint(problem)


def _first(
    path: Path, files: Mapping[str, FileRecord], wrong: Callable[[Path, str, FileRecord], str], threads: int
) -> str:
    def check(item: tuple[str, FileRecord]) -> str:
        name, record = item
        try:
            problem = wrong(path, name, record)
        except OSError as error:
            problem = str(error.strerror)
        except Refused as error:
            problem = error.what
        return f"{name}: {problem}" if problem else ""

    with ThreadPoolExecutor(threads) as pool:
        for problem in pool.map(check, files.items()):
            if problem:
                pool.shutdown(cancel_futures=True)
                return problem
    return ""


def _wrong_size(path: Path, name: str, record: FileRecord) -> str:
    # Not opened, which would take a message to the server for each of thousands of files; loading does.
    found = (path / name).stat()
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    return "" if found.st_size == record.size else f"{found.st_size} bytes, {record.size} were written"


def _wrong_content(path: Path, name: str, record: FileRecord) -> str:
    if problem := _wrong_size(path, name, record):
        return problem
    return "" if digest(path / name, path) == record else "SHA-256 differs from the manifest's"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a directory.

    Raises:
        InvalidCheckpoint: it is missing, damaged, or of another step.
    """
    try:
        manifest = parse(read(path / MANIFEST_NAME, root=path))
    except Refused as problem:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {problem.what}") from problem
    except OSError as problem:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {problem.strerror}") from problem
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {where + ': ' if where else ''}{first['msg']}") from problem
    except ValueError as problem:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {problem}") from problem
    match = NAME.search(path.name)
    if match is None or int(match[1]) != manifest.step:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: is of step {manifest.step}")
    return manifest
