"""Rows of a JSON file: an object on each line, or one array of objects, which is read in bounded memory."""

from __future__ import annotations

import codecs
import io
import json
import re
import shlex
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO

from llmrecipes.data.sources.file_parts import MOST_BYTES, FilePart, decompressor, is_array, too_large
from llmrecipes.errors import UserError

SHAPES = "a file has a JSON object on each line, or is one array of objects"
_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_TOKEN = 16
"""Characters before the end of a text within which it may have been cut inside a number, a literal or an escape."""


class RowError(ValueError):
    """A row that is not JSON, with its place."""

    def __init__(self, reason: str, where: str, fix: str = "fix or delete the row") -> None:
        super().__init__(reason)
        self.where, self.fix = where, fix


def json_rows(part: FilePart, stream: BinaryIO) -> Generator[tuple[str, Any], None, None]:
    """The rows that begin in a part of a file, each with its place.

    Args:
        part: the part; it is the whole file if that is an array.
        stream: the unpacked file at its beginning.

    Raises:
        RowError: a row is not JSON, or is nested too deeply.
        Damaged: a row has more than `MOST_BYTES`.
    """
    if not part.begin and is_array(stream):
        yield from _elements(str(part.file), stream)
        return
    for where, line in part.lines(stream):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig", "surrogatepass").rstrip())
        except (ValueError, RecursionError) as error:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise RowError("the file is UTF-16", where, _rewritten("iconv -f UTF-16 -t UTF-8", part)) from error
            if line.strip() == b"{":
                raise RowError("an object over several lines", where, _rewritten("jq -c .", part)) from error
            at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise RowError(f"{getattr(error, 'msg', str(error)).removesuffix(' at')}{at}", where) from error
        yield where, row


def wrapped(row: dict[str, Any], part: FilePart, where: str) -> UserError | None:
    """The error for an object that only holds the list of rows; None: it holds something else."""
    ((name, value),) = row.items() if len(row) == 1 else (("", None),)
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return None
    unwrap = shlex.join(["jq", "-c", f".[{json.dumps(name)}][]"])
    return UserError(f"one object with a list, {name!r}", where=where, rule=SHAPES, fix=_rewritten(unwrap, part))


def _rewritten(command: str, part: FilePart) -> str:
    file = str(part.file)
    if decompressor(part.file.name) is not None or "://" in file:
        return f"{command} FILE > ROWS.jsonl, where FILE is unpacked on this machine, and ROWS.jsonl as the source"
    return f"{command} {shlex.quote(file)} > ROWS.jsonl, and ROWS.jsonl as the source"


def _elements(file: str, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    reader = io.TextIOWrapper(stream, "utf-8-sig", "surrogatepass", newline="")
    try:
        yield from _read_array(reader, file)
    finally:
        reader.detach()


def _read_array(reader: io.TextIOWrapper, file: str) -> Iterator[tuple[str, Any]]:
    while reader.read(1) != "[":
        pass
    decode = json.JSONDecoder().raw_decode
    number = 0
    text = ""
    at = 0
    before = "["
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        where = f"{file}: row {number + 1}"
        if at == len(text):
            text = _more(reader, _CHUNK, where)
            at = 0
            if not text:
                raise RowError("the array has no end", where)
        elif text[at] == "]" and before != ",":
            rest = text[at + 1 :]
            while rest and not rest.strip():
                rest = _more(reader, _CHUNK, where)
            if rest:
                raise RowError("text follows the array", where)
            return
        elif before == "row":
            if text[at] != ",":
                raise RowError("Expecting ',' delimiter", where)
            at, before = at + 1, ","
        else:
            try:
                row, at = decode(text, at)
            except json.JSONDecodeError as error:
                wrong = error.pos < len(text) - _TOKEN and not error.msg.startswith("Unterminated string")
                if not wrong and len(text) - at > MOST_BYTES:
                    raise too_large(where) from error
                more = "" if wrong else _more(reader, len(text) - at + _CHUNK, where)
                if not more:
                    raise RowError(error.msg, where) from error
                text, at = text[at:] + more, 0
                continue
            except RecursionError as error:
                raise RowError(str(error), where) from error
            number, before = number + 1, "row"
            yield where, row


def _more(reader: io.TextIOWrapper, size: int, where: str) -> str:
    try:
        return reader.read(size)
    except UnicodeDecodeError as error:
        raise RowError(str(error), f"{where} or later") from error
