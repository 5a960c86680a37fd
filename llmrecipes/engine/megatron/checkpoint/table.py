"""The file format of an index: a row for each part of a tensor, in columns of plain integers.

    8 bytes     "LLMRidx1"
    8 bytes     bytes of the header, little-endian
    header      JSON: files, objects, tensors with their type, shape and number of rows, and the types of the columns
    columns     one after the other, little-endian: file, first byte and bytes, then offset and size of each dimension

A tensor's rows are neighbours, in order of their offset in the first dimension: layers, where these are stacked.
Columns are mapped into memory, so a rank reads the pages of its own layers, not the millions of rows of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAGIC = b"LLMRidx1"
DIMENSIONS = 8
"""Most dimensions of a tensor."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Integers = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.int64]
Kind = Literal["u1", "u2", "u4", "i8"]

_PLACE = 3
"""Columns in front of those of the dimensions."""
_KINDS: tuple[Kind, ...] = ("u1", "u2", "u4", "i8")


class Strict(BaseModel):
    """Untrusted data: nothing is converted or ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


T = TypeVar("T", bound=Strict)


class ObjectRecord(Strict):
    """Plain values, as torch.save writes them."""

    name: str
    place: Annotated[list[Count], Field(min_length=_PLACE, max_length=_PLACE)]
    """Number of the file, first byte and bytes."""


class TensorHead(Strict):
    """A tensor and how many rows it has."""

    name: str
    dtype: str
    shape: Annotated[list[Count], Field(max_length=DIMENSIONS)]
    rows: Count
    longest: Count
    """Largest size of a part in the first dimension."""


class Header(Strict):
    """The JSON in front of the columns."""

    files: list[str]
    objects: list[ObjectRecord]
    tensors: list[TensorHead]
    columns: Annotated[list[Kind], Field(min_length=_PLACE, max_length=_PLACE + 2 * DIMENSIONS)]


@dataclass(frozen=True, eq=False)
class Table:
    """An index as it is in its file, not yet compared with the checkpoint."""

    files: list[str]
    objects: list[ObjectRecord]
    tensors: list[TensorHead]
    columns: list[Integers]
    """Each [rows]; see the format."""

    @property
    def rows(self) -> list[slice]:
        """Rows of each tensor."""
        return [slice(start, stop) for start, stop in pairwise(accumulate((t.rows for t in self.tensors), initial=0))]


Described = tuple[str, str, Sequence[int], Sequence[Sequence[int]]]
"""A tensor: name, type, shape, and its parts as rows of the table."""


def make(files: list[str], objects: list[ObjectRecord], tensors: Iterable[Described]) -> Table:
    """Build a table.

    Raises:
        ValueError: a row has other dimensions than its tensor, or a number that 64 bits do not hold.
    """
    parts, heads = [], []
    for name, dtype, shape, rows in tensors:
        width = _PLACE + 2 * len(shape)
        if any(len(row) != width for row in rows):
            raise ValueError(f"{name!r} has {len(shape)} dimensions, a part has others")
        numbers = np.asarray(rows, np.int64).reshape(-1, width).T
        heads.append(TensorHead(name=name, dtype=dtype, shape=list(shape), rows=len(rows), longest=0))
        parts.append(Table(files, [], heads[-1:], list(numbers)))
    return _joined(files, objects, parts, [0] * len(parts))


def merge(tables: Sequence[Table]) -> Table:
    """One index of the indexes of all ranks' files.

    Raises:
        ValueError: they do not fit together; the checkpoint could not be loaded.
    """
    bases = list(accumulate((len(table.files) for table in tables), initial=0))
    objects = [
        ObjectRecord(name=each.name, place=[each.place[0] + base, *each.place[1:]])
        for table, base in zip(tables, bases, strict=False)
        for each in table.objects
    ]
    if len({each.name for each in objects}) < len(objects):
        raise ValueError("two ranks have written an object of the same name")
    return _joined([file for table in tables for file in table.files], objects, tables, bases[:-1])


def _joined(files: list[str], objects: list[ObjectRecord], tables: Sequence[Table], bases: Sequence[int]) -> Table:
    """Rows of all tables, sorted; `bases` are added to their numbers of files."""
    numbers: dict[str, int] = {}
    heads: list[TensorHead] = []
    total = sum(len(table.columns[0]) for table in tables)
    whole = np.zeros((max((len(table.columns) for table in tables), default=_PLACE), total), np.int64)
    tensor = np.empty(total, np.int64)
    first = 0
    for table, base in zip(tables, bases, strict=True):
        own = []
        for head in table.tensors:
            number = numbers.setdefault(head.name, len(heads))
            if number == len(heads):
                heads.append(head)
            elif (known := heads[number]).dtype != head.dtype or known.shape != head.shape:
                raise ValueError(f"{head.name!r} is {known.dtype} {known.shape} and {head.dtype} {head.shape}")
            own.append(number)
        rows = slice(first, first := first + len(table.columns[0]))
        tensor[rows] = np.repeat(own, [head.rows for head in table.tensors])
        for number, column in enumerate(table.columns):
            whole[number, rows] = column
        whole[0, rows] += base
    # By tensor, first dimension, file and first byte.
    order = np.lexsort((whole[1], whole[0], *whole[_PLACE : _PLACE + 1], tensor))
    counts = np.bincount(tensor, minlength=len(heads))
    for row in whole:
        row[:] = row[order]
    starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
    longest = np.zeros(len(heads), np.int64)
    if len(whole) > _PLACE and total:
        longest[counts > 0] = np.maximum.reduceat(whole[_PLACE + 1], starts[counts > 0])
    heads = [
        head.model_copy(update={"rows": int(count), "longest": int(most)})
        for head, count, most in zip(heads, counts, longest, strict=True)
    ]
    return Table(files, objects, heads, list(whole))


def encode(table: Table) -> bytes:
    """The file of a table."""
    kinds = [_narrowest(column) for column in table.columns]
    header = Header(files=table.files, objects=table.objects, tensors=table.tensors, columns=kinds)
    text = header.model_dump_json().encode()
    columns = (column.astype(f"<{kind}").tobytes() for column, kind in zip(table.columns, kinds, strict=True))
    return b"".join((MAGIC, len(text).to_bytes(8, "little"), text, *columns))


def decode(data: memoryview | bytes) -> Table:
    """Read a file; columns are views of it, and nothing is allocated for what it only declares.

    Raises:
        ValueError: it is not an index.
    """
    view = memoryview(data)
    if bytes(view[:8]) != MAGIC:
        raise ValueError("it does not begin like an index")
    end = 16 + int.from_bytes(view[8:16], "little")
    if end > len(view):
        raise ValueError(f"it has {len(view)} bytes, its header ends at {end}")
    header = read_json(Header, bytes(view[16:end]))
    dimensions, odd = divmod(len(header.columns) - _PLACE, 2)
    most = max((len(tensor.shape) for tensor in header.tensors), default=0)
    if odd or most > dimensions:
        raise ValueError(f"it has {len(header.columns)} columns, and tensors of {most} dimensions")
    rows = sum(tensor.rows for tensor in header.tensors)
    types = [np.dtype(f"<{kind}") for kind in header.columns]
    ends = list(accumulate((rows * kind.itemsize for kind in types), initial=end))
    if ends[-1] != len(view):
        raise ValueError(f"it has {len(view)} bytes, and {ends[-1]} with {rows} parts")
    columns = [np.frombuffer(view[start:stop], kind) for kind, (start, stop) in zip(types, pairwise(ends), strict=True)]
    return Table(header.files, header.objects, header.tensors, columns)


def boxes_of(columns: Sequence[Integers], dimensions: int) -> tuple[Numbers, Numbers]:
    """Offsets and sizes, [rows, dimensions] each, of the columns of a tensor."""
    boxes = [column.astype(np.int64) for column in columns[_PLACE : _PLACE + 2 * dimensions]]
    if not boxes:
        return (empty := np.empty((len(columns[0]), 0), np.int64)), empty
    return np.stack(boxes[::2], 1), np.stack(boxes[1::2], 1)


def read_json(kind: type[T], text: bytes) -> T:
    """Read JSON.

    Raises:
        ValueError: with the first field that is wrong.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where + ': ' if where else ''}{first['msg']}") from problem


def _narrowest(column: Integers) -> Kind:
    most = int(column.max(initial=0))
    return next((kind for kind in _KINDS if most <= np.iinfo(kind).max), "i8")
