"""Sources of a recipe as streams of documents: a column of text of each row, or a conversation.

Files on disk are read row by row, not through `datasets`: its JSON reader infers the columns' types from the first
chunk, so it fails on a row with an additional key, and it silently converts a number in the text column to text.
Reading rows gives file and line of an error. Datasets of the Hub are in `hub`.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmrecipes.data.sources import hub
from llmrecipes.data.sources.discovery import LeftOut, described, in_folder, of_pattern, other_endings
from llmrecipes.data.sources.docstrings import brief_and_long, docstring_conversations
from llmrecipes.data.sources.file_parts import (
    MOST_BYTES,
    DamagedFile,
    FilePart,
    SourceFile,
    damages,
    decompressor,
    is_array,
    parts_of,
    size_of,
    too_large,
)
from llmrecipes.data.sources.json_rows import SHAPES, RowError, json_rows, wrapped
from llmrecipes.data.sources.machine_corpus import machine_documents, machine_files
from llmrecipes.data.sources.rows import Rows, conversation, pair, rows_of, section
from llmrecipes.data.steps.steps import Unreadable
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.recipe.sections.source import HubSource, ParquetSource, PathSource, RowSource
from llmrecipes.stores import find, is_url

BYTES_PER_TOKEN = 4.5
"""Of English text in vocabularies of 50,000 to 130,000 tokens; the embedded code has 3.4 in one of 4,096."""
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_ROWS = 1000
_ASKED = 32
"""Parquet files whose metadata is read for the size of a source; the others are taken to be alike."""
BY_FILE = ("stdlib", "text", "jsonl", "parquet")
"""Types whose documents are those of their files, one after the other."""
_SUFFIXES = {
    "jsonl": tuple(f".{kind}{packed}" for kind in ("jsonl", "json") for packed in ("", *_COMPRESSED)),
    "parquet": (".parquet",),
}


@dataclass(frozen=True)
class Listing:
    """State of a source's files when they were read, to detect later changes."""

    files: int
    bytes: int
    sha256: str


def label(source: Source) -> str:
    """Name of a source in messages."""
    name = f"{source.type} {source.location}".rstrip()
    if isinstance(source, RowSource) and source.label_key:
        return f"{name} [{source.label_key}={source.label_value}]"
    return name


def files(source: Source) -> list[SourceFile]:
    """The files of a source on disk or in a store, sorted by name; none for a dataset of the Hub that is not read by
    files.

    Raises:
        UserError: there are no files.
    """
    if isinstance(source, HubSource):
        return hub.data_files(source)
    paths: list[SourceFile] = []
    if not isinstance(source, PathSource):
        paths += machine_files() if source.type == "machine" else _stdlib()
    elif source.tokenized:
        both = [Path(f"{source.path}{suffix}").expanduser() for suffix in (".bin", ".idx")]
        paths += both if all(file.exists() for file in both) else []
    elif in_store(source):
        paths += find(source.path, _SUFFIXES.get(source.type, ("",)), section(source))
    else:
        paths += _match(source)[0]
    if not paths:
        raise UserError(
            f"no files in source {label(source)!r}",
            where=section(source),
            rule="a source needs at least one file",
            fix=_looked_for(source),
        )
    return paths


def by_file(source: Source) -> bool:
    """Whether its documents are those of its files, one after the other; for a dataset of the Hub, that is asked."""
    return source.type in BY_FILE or (isinstance(source, HubSource) and bool(hub.data_files(source)))


def in_store(source: Source) -> bool:
    """Whether its files are in a store or on the Hub, which may be slow or away."""
    return source.type == "hub" or (source.type in BY_FILE and is_url(source.location))


def listing(source: Source) -> Listing | None:
    """Names and sizes of a source's files; None where there are none."""
    paths = files(source)
    if not paths:
        return None
    digest, total = hashlib.sha256(), 0
    for file in paths:
        size = size_of(file)
        total += size
        digest.update(f"{file.name}\0{size}\n".encode())
    return Listing(len(paths), total, digest.hexdigest())


def text_bytes(source: Source, bytes_per_token: float | None = None) -> float | None:
    """About how many bytes of text a source has, from the sizes of its files and its `max_tokens`.

    Args:
        source: the source; its files may be elsewhere.
        bytes_per_token: as measured; None: `BYTES_PER_TOKEN`.

    Returns:
        None where that is unknown: tokens, a dataset on the Hub, files in a store, compressed files, and rows by label,
        without `max_tokens`; Parquet without its column of text, or unreadable.
    """
    limit = None if source.max_tokens is None else source.max_tokens * (bytes_per_token or BYTES_PER_TOKEN)
    if in_store(source) or source.tokenized or (isinstance(source, RowSource) and source.label_key):
        return limit
    try:
        paths = files(source)
    except UserError:
        return limit
    if not paths or any(path.suffix in _COMPRESSED for path in paths):
        return limit
    size = float(sum(map(size_of, paths)))
    if isinstance(source, ParquetSource):
        share = _text_share(paths[:_ASKED], source.text_key)
        if share is None:
            return limit
        size *= share
    return size if limit is None else min(size, limit)


def _text_share(paths: Sequence[SourceFile], column: str) -> float | None:
    """Bytes of a column without compression, relative to the files; None if a file cannot be read or has no such."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    text = 0
    try:
        for path in paths:
            data = pq.read_metadata(path)
            groups = [data.row_group(number) for number in range(data.num_row_groups)]
            columns = (group.column(number) for group in groups for number in range(group.num_columns))
            text += sum(each.total_uncompressed_size for each in columns if each.path_in_schema == column)
    except (pa.ArrowException, OSError):
        return None
    return text / sum(map(size_of, paths)) if text else None


def form(source: Source) -> str:
    """What the first file of a source on this machine is, for messages; empty if that is not known."""
    if source.type != "jsonl" or in_store(source):
        return {"text": "text", "parquet": "Parquet"}.get(source.type, "")
    unreadable: tuple[type[Exception], ...] = (OSError, UserError, *damages())
    try:
        part = FilePart(files(source)[0])
        with _unpacked(part) as stream:
            return "a JSON array" if is_array(stream) else "JSON lines"
    except unreadable:
        return ""


class _Enough(Exception):
    pass


class _Watched:
    """Rows of which only the names of the columns are looked at."""

    def __init__(self, of: Rows) -> None:
        self._of = of
        self.unread: list[str] = []

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        used = self._of.columns(present, where)
        self.unread = [column for column in present if column not in used]
        raise _Enough

    def wanted(self, row: Mapping[str, Any]) -> bool:
        return False

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        return None


def unread(source: Source, chat: Chat | None) -> list[str]:
    """Columns of the first row of conversations that are not read; one of them may be part of what is said."""
    if chat is None or not isinstance(source, RowSource):
        return []
    of = _Watched(rows_of(source, chat))
    try:
        if isinstance(source, HubSource) and not by_file(source):
            next(hub.rows(source, of), None)
        else:
            part = FilePart(files(source)[0])
            next(_of_part(part, _reader(source.type, part), of), None)
    except (_Enough, UserError):  # the error is raised again by who reads the row
        pass
    return of.unread


def require_columns(source: Source, chat: Chat | None) -> bool:
    """Look at the first row of a source whose files are on this machine; those of another machine are not known here.

    Returns:
        Whether it has files here; those of a store or of the Hub are not looked for, and count as here.

    Raises:
        UserError: it lacks a column, or holds something else than text there.
    """
    if in_store(source):
        return True
    try:
        files(source)
    except UserError:
        return False
    if source.type in _SUFFIXES:
        with suppress(DamagedFile, StopIteration):
            next(documents(source.model_copy(update={"label_key": None}), chat))
    return True


def documents(
    source: Source, chat: Chat | None = None, parts: Sequence[FilePart] | None = None, *, skip: bool = False
) -> Iterator[str | None]:
    """The documents of a source in a fixed order; None for one that is not valid Unicode.

    Args:
        source: to read.
        chat: its rows are conversations; each is the JSON of a list of messages.
        parts: those of its files to read, of a type in `BY_FILE`; None: all.
        skip: continue with the next part where one is damaged; an `Unreadable` is in place of what follows.

    Raises:
        UserError: a missing source, an unreadable row (file and line), a missing column (with the existing
            columns), a dataset that cannot be downloaded.
    """
    if source.tokenized:
        raise UserError(
            f"{label(source)!r} has token ids, not text",
            where=section(source),
            rule="this command reads text, and a source of type megatron has none",
            fix="use a source of text, or a split of prepared data",
        )
    of = rows_of(source, chat) if isinstance(source, RowSource) else None
    if of is not None and isinstance(source, HubSource) and not by_file(source):
        yield from hub.rows(source, of)
        return
    if source.type == "docstrings":
        talks = docstring_conversations(_stdlib(), _stdlib_root())
        if chat is not None and chat.preference is not None:
            yield from (pair(*talk) for talk in brief_and_long(talks))
            return
        yield from map(conversation, talks)
        return
    if source.type == "machine":
        yield from machine_documents(machine_files())
        return
    for part in parts_of(source.type, files(source)) if parts is None else parts:
        try:
            yield from _of_part(part, _reader(source.type, part), of)
        except DamagedFile as error:
            if not skip:
                raise
            yield Unreadable(f"{error.where}: {error.what}")


_Reader = Callable[[FilePart, Rows], Iterator[str | None]]


def _reader(kind: str, part: FilePart) -> _Reader | None:
    if kind == "hub":
        kind = "parquet" if part.file.suffix == ".parquet" else "jsonl"
    return {"jsonl": _jsonl, "parquet": _parquet}.get(kind)


def _of_part(part: FilePart, read: _Reader | None, of: Rows | None) -> Iterator[str | None]:
    try:
        if read is None or of is None:
            with part.open() as stream:
                data = stream.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise too_large(str(part))
            yield _decode(data)
        else:
            yield from read(part, of)
    except OSError as error:
        raise DamagedFile(f"cannot read: {error.strerror or error}", where=str(part), again=True) from error


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib() -> list[Path]:
    root = _stdlib_root()
    outside = {"site-packages", "dist-packages"}
    return sorted(f for f in root.rglob("*.py") if outside.isdisjoint(f.relative_to(root).parts) and f.is_file())


def _match(source: PathSource) -> tuple[list[Path], LeftOut]:
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path], {}
    return in_folder(path, _SUFFIXES.get(source.type, ("",))) if path.is_dir() else of_pattern(path)


def left_out(source: Source) -> str:
    """What of a source's folder or pattern is not read, by number and an example; empty if nothing is."""
    if source.type not in BY_FILE or not isinstance(source, PathSource):
        return ""
    if not in_store(source):
        return described(_match(source)[1])
    if source.type not in _SUFFIXES:
        return ""
    taken = frozenset(map(str, files(source)))
    every = find(source.path, ("",), section(source))
    return described(other_endings([file.name for file in every if str(file) not in taken]))


def _looked_for(source: Source) -> str:
    if not isinstance(source, PathSource):
        return "this Python has no standard library source on disk; use a source of type text, jsonl or parquet"
    if source.tokenized:
        return f"{section(source)}[].path is the path of a .bin and its .idx, without suffix; looked in {Path.cwd()}"
    suffix = _SUFFIXES.get(source.type, ("",))[0]
    wanted = f"*{suffix} files" if suffix else "files"
    where = f"looked in {Path.cwd()}"
    return f"{section(source)}[].path is a file, a folder with {wanted}, a glob, or their URL; {where}"


def _decode(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


@contextmanager
def _unpacked(part: FilePart) -> Iterator[BinaryIO]:
    unpack = decompressor(part.file.name)
    with part.open() as raw, raw if unpack is None else unpack(raw, mode="rb") as stream:
        yield stream


def _jsonl(part: FilePart, of: Rows) -> Iterator[str | None]:
    where = str(part)
    try:
        with _unpacked(part) as stream, closing(json_rows(part, stream)) as rows:
            for where, row in rows:
                if not isinstance(row, dict):
                    raise UserError(f"a row is {type(row).__name__}, not an object", where=where, rule=SHAPES)
                try:
                    of.columns(list(row), where)
                except UserError as error:
                    if (around := wrapped(row, part, where)) is None:
                        raise
                    raise around from error
                if of.wanted(row):
                    yield of.document(row, where)
    except RowError as error:
        raise DamagedFile(f"unreadable row: {error}", where=error.where, rule=SHAPES, fix=error.fix) from error
    except damages() as error:  # behind the last row that could be read
        after = "" if where == str(part) else " after this row"
        raise DamagedFile(f"unreadable{after}: {error}", where=where) from error


def _parquet(part: FilePart, of: Rows) -> Iterator[str | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row, file = 0, part.file
    try:
        with pq.ParquetFile(file if isinstance(file, Path) else file.open()) as table:
            columns = of.columns(table.schema_arrow.names, str(file))
            groups, row = part.row_groups(table.metadata)
            for batch in table.iter_batches(batch_size=_ROWS, row_groups=groups, columns=columns):
                for value in batch.to_pylist():
                    row += 1
                    if of.wanted(value):
                        document = of.document(value, f"{file}: row {row}")
                        if document is not None and len(document) > MOST_BYTES:
                            raise too_large(f"{file}: row {row}")
                        yield document
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DamagedFile(f"unreadable Parquet after row {row}: {reason}", where=str(part)) from error
