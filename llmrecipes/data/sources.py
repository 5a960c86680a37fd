"""Sources of a recipe as streams of documents: a column of text of each row, or a conversation.

Files on disk are read row by row, not through `datasets`: its JSON reader infers the columns' types from the first
chunk, so it fails on a row with an additional key, and it silently converts a number in the text column to text.
Reading rows gives file and line of an error. Hub datasets are read through `datasets`.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
        UserError: there are no files.
    """
    if source.type == "hub":
        return []
    paths = _stdlib() if source.type in _EMBEDDED else _match(source)
    if not paths:
        raise UserError(
            f"no files in source {label(source)!r}",
            where="data.sources",
            rule="a source has at least one file",
            fix=_looked_for(source),
        )
    return paths


def listing(source: Source) -> Listing | None:
    """Names and sizes of a source's files; None for `hub`."""
    paths = files(source)
    if not paths:
        return None
    digest, total = hashlib.sha256(), 0
    for file in paths:
        size = file.stat().st_size
        total += size
        digest.update(f"{file.name}\0{size}\n".encode())
    return Listing(len(paths), total, digest.hexdigest())


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
        paths = files(source)
    except UserError:
        return limit
    if not paths or source.type == "parquet" or any(path.suffix in _COMPRESSED for path in paths):
        return limit
    size = float(sum(path.stat().st_size for path in paths))
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
    of = rows_of(source, chat)
    if source.type == "hub":
        yield from _hub(source, of)
        return
    if source.type == "docstrings":
        yield from docstring_conversations(files(source), _stdlib_root())
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
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        return sorted(Path(name) for name in names if Path(name).is_file())
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


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages; a template may refuse some of them, or their order."""


class Rows(Protocol):
    """Which columns are read, and the document that a row is."""

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        """The columns to read.

        Raises:
            UserError: they are missing.
        """

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        """The document; empty if the row has none, None if it is not valid Unicode.

        Raises:
            UserError: the row holds something else.
        """


def rows_of(source: Source, chat: Chat | None) -> Rows:
    """How rows of a source are read."""
    return _Text(source.text_key) if chat is None else _Conversations(chat)


class _Text:
    def __init__(self, key: str) -> None:
        self._key = key

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        if self._key not in present:
            raise _no_column(repr(self._key), present, where, "data.sources[].text_key names the column of text")
        return [self._key]

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        value = row[self._key]
        if value is None:
            return ""
        return valid(_string(value, repr(self._key), where, "set data.sources[].text_key"))


class _Conversations:
    def __init__(self, chat: Chat) -> None:
        self._messages, self._pair = chat.messages_key, [chat.prompt_key, chat.completion_key]

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        if self._messages in present:
            return [self._messages]
        if all(key in present for key in self._pair):
            return self._pair
        keys = f"{self._messages!r}, nor {self._pair[0]!r} and {self._pair[1]!r}"
        rule = "a conversation is in data.chat.messages_key, or in prompt_key and completion_key"
        raise _no_column(keys, present, where, rule)

    def document(self, row: Mapping[str, Any], where: str) -> str | None:
        if self._messages in row:
            messages = self._turns(row[self._messages], where)
        elif None in (row[key] for key in self._pair):
            messages = []
        else:
            prompt, completion = (
                _string(row[key], repr(key), where, "conversations of several turns go into data.chat.messages_key")
                for key in self._pair
            )
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return conversation(messages) if messages else ""

    def _turns(self, value: Any, where: str) -> list[dict[str, str]]:
        if value is None:
            return []
        if not isinstance(value, list):
            raise _not_messages(f"{self._messages!r} holds {type(value).__name__}, not a list", where)
        turns = []
        for number, message in enumerate(value):
            name = f"message {number} of {self._messages!r}"
            if not isinstance(message, dict):
                raise _not_messages(f"{name} is {_kind(message)}, not an object", where)
            if missing := [key for key in ("role", "content") if key not in message]:
                keys = ", ".join(map(repr, message)) or "none"
                raise _not_messages(f"{name} has no {missing[0]!r}; its keys: {keys}", where)
            fix = "fix or delete the row"
            role, content = (_string(message[key], f"{key!r} of {name}", where, fix) for key in ("role", "content"))
            if role not in ROLES:
                raise _not_messages(f"{name} has the role {role[:40]!r}", where)
            turns.append({"role": role, "content": content})
        return turns


def conversation(messages: list[dict[str, str]]) -> str | None:
    """The one text of a conversation, which its hash is made of; None if it is not valid Unicode."""
    return valid(json.dumps(messages, ensure_ascii=False))


def contents(text: bytes) -> list[str]:
    """What the messages of such a text say."""
    return [message["content"] for message in json.loads(text)]


def valid(text: str) -> str | None:
    """The text, unless it has a lone surrogate, which is legal in JSON but not valid Unicode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
    return text


def _string(value: Any, name: str, where: str, fix: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} holds {_kind(value)}, not text", where=where, fix=fix)
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _not_messages(what: str, where: str) -> UserError:
    return UserError(
        what,
        where=where,
        rule=f"a message has role ({', '.join(ROLES[:4])}, …) and content, both text",
        fix="fix or delete the row, or set data.chat.messages_key",
    )


def _no_column(keys: str, present: Sequence[str], where: str, rule: str) -> UserError:
    columns = ", ".join(present) or "none"
    return UserError(
        f"no column {keys}; the columns are {columns}", where=where, rule=rule, fix=f"name one of: {columns}"
    )


_LONGEST_QUESTION, _LONGEST_ANSWER = 120, 400  # characters; longer ones are tables and whole manuals
_FOLLOWING = 3
"""Most methods in the conversation about their class."""
_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_conversations(files: Iterable[Path], root: Path) -> Iterator[str | None]:
    """Questions about functions and classes of the standard library, answered with their docstring's first paragraph.

    A small set of conversations that is on every machine: some 5,000, one in twelve of several turns. In the order of
    the files; none about tests.

    Args:
        files: Python source files.
        root: folder of the top-level modules among them.
    """
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        if {"test", "tests", "idlelib", "lib2to3"}.isdisjoint(parts):
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield from map(conversation, _module_conversations(name, file))


def _module_conversations(name: str, file: Path) -> Iterator[list[dict[str, str]]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of old escapes in strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # a file that shows what a syntax error is
    for node in tree.body:
        if isinstance(node, _Definition) and (turn := _turn(f"{name}.{node.name}{_arguments(node)}", node)):
            yield turn
        elif isinstance(node, ast.ClassDef):
            yield from _class_conversations(f"{name}.{node.name}", node)


def _class_conversations(name: str, node: ast.ClassDef) -> Iterator[list[dict[str, str]]]:
    """A conversation about a class, then one for each of the methods that it has no room for."""
    methods = [method for method in node.body if isinstance(method, _Definition) and not method.name.startswith("_")]
    turns = [_turn(f"{name}.{method.name}{_arguments(method)}", method) for method in methods]
    answered = [turn for turn in turns if turn]
    first = _turn(name, node, "What is {}?")
    if first is not None:
        yield first + [message for turn in answered[:_FOLLOWING] for message in turn]
        answered = answered[_FOLLOWING:]
    yield from answered


def _turn(
    name: str, node: _Definition | ast.ClassDef, question: str = "What does {} do?"
) -> list[dict[str, str]] | None:
    answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    content = question.format(name)
    if not answer or len(answer) > _LONGEST_ANSWER or len(content) > _LONGEST_QUESTION:
        return None
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _arguments(node: _Definition) -> str:
    names = [
        argument.arg for argument in (*node.args.posonlyargs, *node.args.args) if argument.arg not in ("self", "cls")
    ]
    return f"({', '.join(names)})"
