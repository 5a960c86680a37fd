"""Sources of a recipe as streams of documents.

Files on disk are read row by row, not through `datasets`: its JSON reader infers the columns' types from the first
chunk, so it fails on a row with an additional key, and it silently converts a number in the text column to text.
Reading rows gives file and line of an error. Hub datasets are read through `datasets`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.data import docstrings
from llmrecipes.data.rows import Rows, rows
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Source

BYTES_PER_TOKEN = 4.5
"""Of English text in vocabularies of 50,000 to 130,000 tokens; the embedded code has 3.4 in one of 4,096."""
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_ROWS = 1000
_EMBEDDED = ("stdlib", "docstrings")
_SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".jsonl.xz", ".jsonl.bz2"),
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
    return source.type if source.path is None else f"{source.type} {source.path}"


def files(source: Source) -> list[Path]:
    """The files of a source on disk, sorted by name; none for `hub`.

    Raises:
        UserError: there are none.
    """
    if source.type == "hub":
        return []
    found = _stdlib() if source.type in _EMBEDDED else _match(source)
    if not found:
        raise UserError(
            f"no files in source {label(source)!r}",
            where="data.sources",
            rule="a source has at least one file",
            fix=_looked_for(source),
        )
    return found


def listing(source: Source) -> Listing | None:
    """Names and sizes of a source's files; None for `hub`."""
    found = files(source)
    if not found:
        return None
    digest, total = hashlib.sha256(), 0
    for file in found:
        size = file.stat().st_size
        total += size
        digest.update(f"{file.name}\0{size}\n".encode())
    return Listing(len(found), total, digest.hexdigest())


def text_bytes(source: Source, bytes_per_token: float | None = None) -> float | None:
    """About how many bytes of text a source has, from the sizes of its files and its `max_tokens`.

    Args:
        source: the source; its files may be elsewhere.
        bytes_per_token: as measured; None: `BYTES_PER_TOKEN`.

    Returns:
        None where that is unknown: a dataset on the Hub, and compressed files, without `max_tokens`.
    """
    limit = None if source.max_tokens is None else source.max_tokens * (bytes_per_token or BYTES_PER_TOKEN)
    try:
        every = files(source)
    except UserError:
        return limit
    if not every or source.type == "parquet" or any(each.suffix in _COMPRESSED for each in every):
        return limit
    size = float(sum(each.stat().st_size for each in every))
    return size if limit is None else min(size, limit)


def documents(source: Source, chat: Chat | None = None) -> Iterator[str | None]:
    """The documents of a source in a fixed order; None for one that is not valid Unicode.

    Args:
        source: to read.
        chat: its rows are conversations; each is the JSON of a list of messages.

    Raises:
        UserError: a missing source, an unreadable row (file and line), a missing column (with the existing
            columns), a dataset that cannot be downloaded.
    """
    of = rows(source, chat)
    if source.type == "hub":
        yield from _hub(source, of)
        return
    if source.type == "docstrings":
        yield from docstrings.conversations(files(source), _stdlib_root())
        return
    read = {"jsonl": _jsonl, "parquet": _parquet}.get(source.type)
    for file in files(source):
        try:
            if read is None:
                yield _decode(file.read_bytes())
            else:
                yield from read(file, of)
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror or error}", where=str(file)) from error


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib() -> list[Path]:
    root = _stdlib_root()
    outside = {"site-packages", "dist-packages"}
    return sorted(f for f in root.rglob("*.py") if outside.isdisjoint(f.relative_to(root).parts) and f.is_file())


def _path(source: Source) -> str:
    if source.path is None:
        raise UserError(
            f"source of type {source.type} has no path", where="data.sources", fix="set data.sources[].path"
        )
    return source.path


def _match(source: Source) -> list[Path]:
    if source.path is None:
        raise UserError(
            f"source of type {source.type} has no path", where="data.sources", fix="set data.sources[].path"
        )
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        return sorted(Path(name) for name in found if Path(name).is_file())
    suffixes = _SUFFIXES.get(source.type, ("",))
    return sorted(
        f
        for f in path.rglob("*")
        if f.name.endswith(suffixes)
        and f.is_file()
        and not any(part.startswith(".") for part in f.relative_to(path).parts)
    )


def _looked_for(source: Source) -> str:
    if source.type in _EMBEDDED:
        return "this Python has no standard library source on disk; name files with type text, jsonl or parquet"
    wanted = f"*{_SUFFIXES.get(source.type, ('',))[0]}"
    return f"data.sources[].path is a file, a folder with {wanted} files, or a glob; looked in {Path.cwd()}"


def _decode(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _jsonl(file: Path, of: Rows) -> Iterator[str | None]:
    import fsspec  # type: ignore[import-untyped]

    line = 0
    try:
        with fsspec.open(str(file), "rb", compression="infer") as stream:
            for line, data in enumerate(stream, start=1):
                if not data.strip():
                    continue
                row = json.loads(data.rstrip())
                where = f"{file}:{line}"
                if not isinstance(row, dict):
                    raise UserError(f"a row is {type(row).__name__}, not an object", where=where)
                of.columns(list(row), where)
                yield of.document(row, where)
    except (ValueError, EOFError) as error:  # JSON and Unicode errors are ValueErrors, a truncated archive an EOFError
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"unreadable row: {reason}", where=f"{file}:{line}", fix="fix or delete the line") from error


def _parquet(file: Path, of: Rows) -> Iterator[str | None]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    row = 0
    try:
        with pq.ParquetFile(file) as table:
            columns = of.columns(table.schema_arrow.names, str(file))
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                for value in batch.to_pylist():
                    row += 1
                    yield of.document(value, f"{file}: row {row}")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"unreadable Parquet after row {row}: {reason}", where=str(file)) from error


def _hub(source: Source, of: Rows) -> Iterator[str | None]:
    import datasets

    path = _path(source)
    row = 0
    try:
        dataset = datasets.load_dataset(
            path,
            source.name,
            split=source.split or "train",
            revision=source.revision,
            streaming=source.max_tokens is not None,  # only the files that are read are fetched
        )
        columns = of.columns(dataset.column_names or list(dataset._resolve_features().features or ()), path)
        for batch in dataset.select_columns(columns).with_format("arrow").iter(batch_size=_ROWS):
            for value in batch.to_pylist():
                row += 1
                yield of.document(value, f"{path}: row {row}")
    except UserError:
        raise
    except Exception as error:  # HTTP, DNS, authentication, parsing: each library below has its own errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        after = f" after row {row:,}" if row else ""
        raise UserError(
            f"cannot read dataset {path!r}{after}: {reason}",
            where="data.sources",
            fix="check path, name, split and revision, and that this machine reaches the Hub (HF_ENDPOINT)",
        ) from error
