"""The file of a bundle: a plain tar of regular files with fixed times and owners, the last of which is `SHA256SUMS`.

The same contents give the same bytes on every machine, and `tar` and `sha256sum` read them. Here nothing is ever
extracted: members are read in place, after every header and every hash was checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from llmrecipes.errors import UserError
from llmrecipes.io import sync
from llmrecipes.units import MIB
from llmrecipes.untrusted import LINE, MANIFEST, Refused, open_file

SUMS = "SHA256SUMS"
MOST_MEMBERS = 100_000
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_LONGEST_NAME = tarfile.LENGTH_NAME
_PART = r"(?!\.{1,2}(?:/|\Z))[\w.-]+"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,7}}", re.ASCII)


def _header(name: str, size: int) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT)


class BundleWriter:
    """Appends members to a file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.sums: dict[str, str] = {}
        """SHA-256 by name."""

    def add(self, name: str, content: Iterable[bytes]) -> str:
        """Write a member; returns its SHA-256 (hex)."""
        if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise ValueError(f"invalid member name: {name!r}")
        place = self._stream.tell()
        self._stream.write(bytes(_BLOCK))
        digest = hashlib.sha256()
        for piece in content:
            digest.update(piece)
            self._stream.write(piece)
        size = self._stream.tell() - place - _BLOCK
        self._stream.write(bytes(-size % _BLOCK))
        self._stream.seek(place)
        self._stream.write(_header(name, size))
        self._stream.seek(0, os.SEEK_END)
        self.sums[name] = digest.hexdigest()
        return self.sums[name]

    def close(self) -> None:
        """Write the sums and the end."""
        self.add(SUMS, ["".join(f"{digest}  {name}\n" for name, digest in self.sums.items()).encode()])
        self._stream.write(_END)


@contextmanager
def written(path: Path, *, force: bool) -> Iterator[BundleWriter]:
    """A bundle that appears under its name when the block ends, complete and on the disk; else nothing remains.

    Args:
        force: replace a file of this name.

    Raises:
        UserError: there is one, or the disk is full or fails.
    """
    if os.path.lexists(path) and not (force and path.is_file()):
        raise UserError(
            "already exists",
            where=str(path),
            rule="nothing is overwritten",
            fix="--force, if it is a file, or --out FILE",
        )
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        try:
            with temporary.open("wb") as stream:
                writer = BundleWriter(stream)
                yield writer
                writer.close()
            sync(temporary)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(error.filename or path),
            rule="a partial bundle is removed",
            fix="free some disk space if it is full, or write to another disk with --out FILE",
        ) from error


@dataclass(frozen=True)
class _Member:
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Bundle:
    """An open bundle, all of whose bytes are as they were written."""

    path: Path
    _stream: BufferedReader
    _members: dict[str, _Member]

    @property
    def names(self) -> list[str]:
        """Members in their order."""
        return list(self._members)

    def read(self, name: str, most: int = MANIFEST) -> bytes:
        """A member's content.

        Raises:
            Refused: there is none, or it is larger than `most` bytes.
        """
        member = self._members.get(name)
        if member is None or member.size > most:
            what = "has no" if member is None else f"has {member.size:,} bytes of"
            raise refused(self.path, f"{what} {name}")
        self._stream.seek(member.offset)
        return self._stream.read(member.size)

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a member; none without such a member. Read nothing else until they are exhausted.

        Raises:
            Refused: one is too long.
        """
        member = self._members.get(name, _Member(0, 0, ""))
        self._stream.seek(member.offset)
        left = member.size
        while left:
            line = self._stream.readline(min(left, LINE))
            if len(line) == LINE:
                raise refused(self.path, f"{name} has a line of more than {LINE:,} bytes")
            left -= len(line)
            yield line


@contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """A bundle, after every header and hash was checked; takes the time to read it once.

    Raises:
        Refused: it is damaged, something else, or has what no bundle has: links, folders, names outside of it.
        UserError: it cannot be opened.
    """
    try:
        stream = open_file(path)
    except OSError as error:
        raise UserError(f"cannot be opened: {error.strerror}", where=str(path), fix="the path of a bundle") from error
    with stream:
        members = _checked(path, stream)
        yield Bundle(path, stream, members)


def _checked(path: Path, stream: BufferedReader) -> dict[str, _Member]:
    members: dict[str, _Member] = {}
    size = os.fstat(stream.fileno()).st_size
    while (block := stream.read(_BLOCK)) != bytes(_BLOCK):
        try:
            header = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            what = "is cut off, or changed" if members else "is not a bundle"
            raise refused(path, what) from error
        offset = stream.tell()
        name = header.name
        if name in members or not _NAME.fullmatch(name) or block != _header(name, header.size):
            raise refused(path, f"has {name[:80]!r}, which is there twice, or no plain file inside it")
        if len(members) == MOST_MEMBERS:
            raise refused(path, f"has more than {MOST_MEMBERS:,} members")
        if not 0 <= header.size <= size - offset:
            raise refused(path, f"is cut off in {name}")
        members[name] = _Member(offset, header.size, _digest(stream, header.size))
        if stream.read(-header.size % _BLOCK).strip(b"\0"):
            raise refused(path, f"has something behind {name}")
    if stream.read(2 * _BLOCK) != bytes(_BLOCK) or not members:
        raise refused(path, "does not end where its members do")
    return _as_listed(path, stream, members)


def _digest(stream: BufferedReader, size: int) -> str:
    digest = hashlib.sha256()
    while size:
        piece = stream.read(min(size, MIB))
        digest.update(piece)
        size -= len(piece) or size  # shorter now than it was: the hash differs
    return digest.hexdigest()


def _as_listed(path: Path, stream: BufferedReader, members: dict[str, _Member]) -> dict[str, _Member]:
    last, member = members.popitem()
    if last != SUMS or member.size > MANIFEST:
        raise refused(path, f"does not end with {SUMS}")
    stream.seek(member.offset)
    listed = stream.read(member.size)
    if listed != "".join(f"{each.sha256}  {name}\n" for name, each in members.items()).encode():
        known = dict(line.split(b"  ")[::-1] for line in listed.splitlines() if line.count(b"  ") == 1)
        wrong = [name for name, each in members.items() if known.get(name.encode()) != each.sha256.encode()]
        raise refused(path, f"is damaged: {wrong[0] if wrong else SUMS} is not as it was written")
    return members


def refused(path: Path, what: str) -> Refused:
    """The error for a file that is not a valid bundle."""
    return Refused(
        what, where=str(path), rule="a bundle is as llmrecipes bundle wrote it", fix="get it again from where it came"
    )
