"""Parts of large files: ranges of bytes that workers read independently of each other.

A file of more than `part_bytes` is cut into equal ranges, without reading it. A line of JSON belongs to the range of
its first byte, a row group of Parquet to the one in which it would begin if all rows had the same size. So every
document is in one part, and the parts in their order have the documents of the file in their order.
"""

from __future__ import annotations

import codecs
import io
import lzma
import zlib
from collections.abc import Buffer, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmrecipes.errors import UserError
from llmrecipes.stores import StoreFile
from llmrecipes.units import MIB

PART_BYTES = 256 * MIB
"""Largest part of a file that can be cut, in a source that is not very large. A minute and a half of a core."""
MOST_PARTS = 10_000
"""Of a source, about: the folder of shards is listed often. From 2.4 TiB on the parts are larger instead."""

MOST_BYTES = 128 * MIB
"""Of a document, or of a line that has one: a reader holds several times as much."""

SourceFile = Path | StoreFile


class DamagedFile(UserError):
    """A file that cannot be read, at least not to its end."""

    def __init__(self, what: str, where: str, *, rule: str = "", fix: str = "", again: bool = False) -> None:
        copied = "copy the file again, or set data.max_unreadable to the share of files that may be skipped"
        super().__init__(what, where=where, rule=rule, fix=fix or copied, again=again)


def too_large(where: str) -> DamagedFile:
    """For a document of more than `MOST_BYTES`."""
    return DamagedFile(
        f"has more than {MOST_BYTES // MIB} MiB",
        where,
        rule=f"a line or document has at most {MOST_BYTES:,} bytes",
        fix="split it into shorter documents",
    )


def bounded_lines(stream: BinaryIO, file: object) -> Iterator[tuple[str, bytes]]:
    """The lines of a stream, each with its place for messages; a compressed one is unpacked only so far.

    Raises:
        Damaged: a line has more than `MOST_BYTES`.
    """
    number = 0
    while line := stream.readline(MOST_BYTES + 1):
        number += 1
        if len(line) > MOST_BYTES:
            raise too_large(f"{file}:{number}")
        yield f"{file}:{number}", line


def size_of(file: SourceFile) -> int:
    """Bytes of a file.

    Raises:
        UserError: it is not there any more.
    """
    if isinstance(file, StoreFile):
        return file.size
    try:
        return file.stat().st_size
    except OSError as error:
        what = f"cannot read: {error.strerror}"
        raise UserError(what, where=str(file), fix="restore the file", again=True) from error


@dataclass(frozen=True)
class FilePart:
    """A file, or the documents of one that begin in `begin <= byte < end`; `end` is None for a whole file."""

    file: SourceFile
    begin: int = 0
    end: int | None = None

    def __str__(self) -> str:
        return str(self.file) if self.end is None else f"{self.file}, bytes {self.begin:,} to {self.end:,}"

    def open(self) -> BinaryIO:
        """The file, at its beginning."""
        return self.file.open("rb") if isinstance(self.file, Path) else self.file.open()

    def lines(self, stream: BinaryIO) -> Iterator[tuple[str, bytes]]:
        """The lines that begin in the part, each with its place for messages: the number, in a range the first byte.

        Raises:
            Damaged: a line has more than `MOST_BYTES`.
        """
        if self.end is None:
            yield from bounded_lines(stream, self.file)
            return
        if self.begin:  # the line of the byte in front of the range belongs to the part before
            stream.seek(self.begin - 1)
            while (rest := stream.readline(MIB)) and not rest.endswith(b"\n"):
                pass
        at = stream.tell()
        while at < self.end and (line := stream.readline(MOST_BYTES + 1)):
            if len(line) > MOST_BYTES:
                raise too_large(f"{self.file}: byte {at}")
            yield f"{self.file}: byte {at}", line
            at += len(line)

    def row_groups(self, metadata: Any) -> tuple[list[int], int]:
        """The row groups of a Parquet file that belong to the part, and the rows in front of them."""
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if self.end is None:
            return list(range(len(rows))), 0
        chosen: list[int] = []
        before = 0
        first = 0
        size = size_of(self.file)
        for group, count in enumerate(rows):
            if self.begin <= size * before // max(1, metadata.num_rows) < self.end:
                first = first if chosen else before
                chosen.append(group)
            before += count
        return chosen, first


def is_array(stream: BinaryIO) -> bool:
    """Whether a file is one JSON array.

    Args:
        stream: the unpacked file at its beginning, where it is afterwards too.
    """
    head = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    stream.seek(0)
    return head.startswith(b"[")


def can_cut(kind: str, file: SourceFile) -> bool:
    """Whether the documents of a file can be read from its middle: Parquet, and JSON lines that are not compressed."""
    from fsspec.utils import infer_compression  # type: ignore[import-untyped]

    if kind == "parquet" or kind not in ("jsonl", "hub"):
        return kind == "parquet"
    if _is_zstd(file.name) or infer_compression(file.name) is not None:
        return False
    try:
        with FilePart(file).open() as stream:
            return not is_array(stream)
    except OSError:  # reported when the file is read
        return True


def _is_zstd(name: str) -> bool:
    return name.lower().endswith(".zst")


class Zstandard(io.RawIOBase):
    """A Zstandard stream of any number of frames, unpacked by Arrow. It can only be rewound, not sought.

    fsspec would take the package zstandard, which has no lines and ends silently after the first frame.
    """

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._streams: list[Any] = []  # all of them, because one that is dropped closes the file
        self._unpack()

    def _unpack(self) -> None:
        from pyarrow import CompressedInputStream  # type: ignore[import-untyped]

        self._streams.append(CompressedInputStream(self._packed, "zstd"))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only seek(0)")
        self._packed.seek(0)
        self._unpack()
        return 0

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        try:
            read: bytes = self._streams[-1].read(len(view))
        except OSError as error:
            if error.errno is not None:  # the file's own
                raise
            raise EOFError(str(error)) from error  # as gzip, bz2 and lzma
        view[: len(read)] = read
        return len(read)


def decompressor(name: str) -> Callable[..., BinaryIO] | None:
    """What unpacks a file of this name; None: it is not compressed."""
    from fsspec.compression import compr  # type: ignore[import-untyped]
    from fsspec.utils import infer_compression

    if _is_zstd(name):
        return lambda stream, **_: io.BufferedReader(Zstandard(stream))
    kind = infer_compression(name)
    return None if kind is None else compr[kind]


def damages() -> tuple[type[Exception], ...]:
    """Errors of rows that are not JSON or are nested too deeply, and of compressed files that are damaged."""
    return ValueError, RecursionError, EOFError, zlib.error, lzma.LZMAError


def part_bytes(files: Sequence[SourceFile]) -> int:
    """Largest part of a file of a source that has these files."""
    return max(PART_BYTES, -(-sum(map(size_of, files)) // MOST_PARTS))


def parts_of(kind: str, files: Sequence[SourceFile], most: int | None = None) -> Iterator[FilePart]:
    """All parts of files, in order.

    Args:
        kind: type of their source.
        files: files of a source.
        most: bytes of a part; None: `part_bytes` of these files.
    """
    most = part_bytes(files) if most is None else most
    for file in files:
        size = size_of(file)
        if size <= most or not can_cut(kind, file):
            yield FilePart(file)
            continue
        count = -(-size // most)
        for number in range(count):
            yield FilePart(file, size * number // count, size * (number + 1) // count)
