"""The index of a checkpoint: which part of which tensor is in which file.

It is untrusted. What describes all tensors is checked when it is opened; a part is checked when it is used, so that of
millions a rank looks only at those that it reads. Three forms are read: `index.bin`, and of older checkpoints
`index.json` and torch's `.metadata` (`pickled_index`).

`index.bin` has a row for each part of a tensor, in columns of plain integers:

    8 bytes     "LLMRidx1"
    8 bytes     bytes of the header, little-endian
    header      JSON: files, objects, tensors with their type, shape and number of rows, and the types of the columns
    columns     one after the other, little-endian: file, first byte and bytes, then offset and size of each dimension

A tensor's rows are neighbours, in order of their offset in the first dimension: layers, where these are stacked.
Columns are mapped into memory, so a rank reads the pages of its own layers, not the millions of rows of all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmrecipes.checkpoint.manifest import FileRecord
from llmrecipes.recipe.derived.weight_names import FUSED_NORMS

INDEX_NAME = "index.bin"
OPTIMIZER_STATE = "optimizer.state.{}."
"""Start of the names of the optimizer's state of a kind; a weight's name follows."""
AVERAGE = OPTIMIZER_STATE.format("ema")
"""Start of the names of the weights' moving average (`optimizer.ema_decay`)."""
_MOST = 1 << 62
"""Elements of a tensor must be fewer, so that their number fits 64 bits."""

DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
"""Element types by name in the index."""

Span = tuple[str, int, int]
"""File, first byte, bytes."""


class StoredSlices(NamedTuple):
    """Stored slices that together have every element of a slice once."""

    offsets: Numbers
    """[k, d] in the tensor."""
    sizes: Numbers
    """[k, d]"""
    places: Numbers
    """[k, 3] number of the file, first byte and bytes."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a checkpoint.

    Args:
        name: of the tensor.
        dtype: of its elements.
        shape: global, of d dimensions.
        longest: size of a part in the first dimension, at most.
        columns: of its parts, as in the table.
        file_sizes: [files] bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    longest: int
    columns: list[Integers]
    file_sizes: Numbers

    def slices(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> StoredSlices:
        """Stored slices that have elements of a slice; what lies outside of the tensor is in none.

        Raises:
            ValueError: they do not fit the tensor or their files, or do not have every element once.
        """
        low = np.asarray(offset, np.int64)
        high = np.minimum(low + np.asarray(shape, np.int64), np.asarray(self.shape, np.int64))
        first = 0
        last = len(self.columns[0])
        if self.shape:
            # Only stored slices of its layers are compared. If rows are not sorted, `covered` fails below.
            first = int(np.searchsorted(self._starts, low[0] - self.longest + 1, "left"))
            last = int(np.searchsorted(self._starts, high[0], "left"))
        offsets, sizes = slices_of([column[first:last] for column in self.columns], len(self.shape))
        overlapping = np.flatnonzero(((offsets < high) & (offsets + sizes > low)).all(1))
        offsets = offsets[overlapping]
        sizes = sizes[overlapping]
        places = np.stack([column[first:last][overlapping].astype(np.int64) for column in self.columns[:3]], 1)
        self._require_inside(offsets, sizes)
        require_places(self.name, places, self.file_sizes)
        starts = np.maximum(offsets, low)
        ends = np.minimum(offsets + sizes, high)
        if not covered(np.maximum(high - low, 0), starts - low, ends - starts):
            raise ValueError(f"{self.name!r}: stored slices leave gaps or overlap in {shape} at {offset}")
        return StoredSlices(offsets, sizes, places)

    @cached_property
    def _starts(self) -> Numbers:
        """[parts] offsets in the first dimension."""
        return self.columns[3].astype(np.int64)

    def _require_inside(self, offsets: Numbers, sizes: Numbers) -> None:
        # As differences, because sums of such numbers may exceed 64 bits.
        inside = (offsets >= 0) & (sizes >= 0) & (offsets <= self.shape) & (sizes <= np.subtract(self.shape, offsets))
        for number in np.flatnonzero(~inside.all(1))[:1]:
            part = f"a slice of {sizes[number].tolist()} at {offsets[number].tolist()}"
            raise ValueError(f"{self.name!r} has the shape {list(self.shape)}, {part} lies outside")


@dataclass(frozen=True)
class Index:
    """What a checkpoint has."""

    files: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    objects: dict[str, Span]
    """Place of each object, by name."""


def build(table: Table, files: Mapping[str, FileRecord]) -> Index:
    """The index of a checkpoint, of its table.

    Args:
        table: untrusted.
        files: the manifest's; other files do not belong to the checkpoint.

    Raises:
        ValueError: with the first inconsistent tensor or object, and why.
    """
    for file in table.files:
        if file not in files:
            raise ValueError(f"the manifest does not list {file!r}")
    sizes = np.asarray([files[file].size for file in table.files], np.int64)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Span] = {}
    for record in table.objects:
        _require(record.name not in objects, record.name, "occurs twice")
        require_places(record.name, np.asarray([record.place], np.int64), sizes)
        objects[record.name] = (table.files[record.place[0]], record.place[1], record.place[2])
    for head, rows in zip(table.tensors, table.rows, strict=True):
        _require(head.name not in tensors and head.name not in objects, head.name, "occurs twice")
        _require(head.dtype in DTYPES, head.name, f"has the unknown type {head.dtype!r}")
        _require(prod(size + 1 for size in head.shape) < _MOST, head.name, f"has the shape {head.shape}")
        columns = [column[rows] for column in table.columns]
        tensors[head.name] = StoredTensor(
            head.name, DTYPES[head.dtype], tuple(head.shape), head.longest, columns, sizes
        )
    return Index(tuple(table.files), {_current(name, tensors): stored for name, stored in tensors.items()}, objects)


def _current(name: str, names: Container[str]) -> str:
    """Name of a tensor in checkpoints of this version: earlier ones had norms of local layers with latent attention
    apart from the linear layer that follows."""
    for linear, norm in FUSED_NORMS.items():
        front, separate, kind = name.rpartition(f"{norm}.")
        if separate and f"{front}{linear}.weight" in names:
            return f"{front}{linear}.layer_norm_{kind}"
    return name


def covered(shape: npt.ArrayLike, offsets: Numbers, sizes: Numbers) -> bool:
    """Whether slices have every element of a whole once.

    A slice is the sum of the orthants at its corners, with a minus where an odd number of a corner's coordinates are
    ends. So the slices are the whole if all corners but the whole's own cancel.

    Args:
        shape: [d] of the whole, of less than 2⁶² corners.
        offsets, sizes: [k, d] of the slices, inside of it.
    """
    whole = np.asarray(shape, np.int64)
    if not whole.all():
        return True  # there are none
    cut = ~((offsets == 0) & (sizes == whole)).all(0)  # others are the same for all slices
    whole = whole[cut]
    starts = offsets[:, cut]
    ends = (offsets + sizes)[:, cut]
    if not whole.size:
        return len(offsets) == 1
    steps = np.concatenate(([1], np.cumprod(whole[:0:-1] + 1)))[::-1]
    signed: tuple[list[Numbers], list[Numbers]] = [], []
    for corner in product((False, True), repeat=len(whole)):
        sign = sum(corner) % 2
        signed[sign].append(np.where(corner, ends, starts) @ steps)
        signed[1 - sign].append(np.where(corner, whole, 0)[None] @ steps)
    plus, minus = (np.sort(np.concatenate(numbers)) for numbers in signed)
    return np.array_equal(plus, minus)


def as_index(starts: Numbers, ends: Numbers) -> tuple[slice, ...]:
    """A slice as an index of a tensor.

    Args:
        starts, ends: [d]
    """
    return tuple(slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))


def require_places(name: str, places: Numbers, file_sizes: Numbers) -> None:
    """Check that spans of bytes lie inside their files.

    Args:
        name: of the tensor or object.
        places: [k, 3] number of the file, first byte and bytes.
        file_sizes: [files]

    Raises:
        ValueError: one does not.
    """
    numbers, starts, lengths = places.T
    for number in numbers[(numbers < 0) | (numbers >= len(file_sizes))][:1]:
        raise ValueError(f"{name!r} is in file {number} of {len(file_sizes)}")
    sizes = file_sizes[numbers]
    wrong = (starts < 0) | (lengths < 0) | (starts > sizes) | (lengths > sizes - starts)
    for file, start, length in places[wrong][:1].tolist():
        raise ValueError(f"{name!r} ends at byte {start + length} of file {file}, which has {file_sizes[file]}")


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"{name!r} {problem}")


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


def make_table(files: list[str], objects: list[ObjectRecord], tensors: Iterable[Described]) -> Table:
    """Build a table.

    Raises:
        ValueError: a row has other dimensions than its tensor, or a number that 64 bits do not hold.
    """
    parts, heads = [], []
    for name, dtype, shape, rows in tensors:
        width = _PLACE + 2 * len(shape)
        if any(len(row) != width for row in rows):
            raise ValueError(f"{name!r} has {len(shape)} dimensions, a slice has others")
        numbers = np.asarray(rows, np.int64).reshape(-1, width).T
        heads.append(TensorHead(name=name, dtype=dtype, shape=list(shape), rows=len(rows), longest=0))
        parts.append(Table(files, [], heads[-1:], list(numbers)))
    return _joined(files, objects, parts, [0] * len(parts))


def merge_tables(tables: Sequence[Table]) -> Table:
    """One index of the indexes of all ranks' files.

    Raises:
        ValueError: they do not fit together; the checkpoint could not be loaded.
    """
    bases = list(accumulate((len(table.files) for table in tables), initial=0))
    objects = [
        ObjectRecord(name=record.name, place=[record.place[0] + base, *record.place[1:]])
        for table, base in zip(tables, bases, strict=False)
        for record in table.objects
    ]
    if len({record.name for record in objects}) < len(objects):
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
        places = []
        for head in table.tensors:
            number = numbers.setdefault(head.name, len(heads))
            if number == len(heads):
                heads.append(head)
            elif (known := heads[number]).dtype != head.dtype or known.shape != head.shape:
                raise ValueError(f"{head.name!r} is {known.dtype} {known.shape} and {head.dtype} {head.shape}")
            places.append(number)
        rows = slice(first, first := first + len(table.columns[0]))
        tensor[rows] = np.repeat(places, [head.rows for head in table.tensors])
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
        raise ValueError("its first bytes are not those of an index")
    end = 16 + int.from_bytes(view[8:16], "little")
    if end > len(view):
        raise ValueError(f"it has {len(view)} bytes, but its header ends at byte {end}")
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


def slices_of(columns: Sequence[Integers], dimensions: int) -> tuple[Numbers, Numbers]:
    """Offsets and sizes, [rows, dimensions] each, of the columns of a tensor."""
    numbers = [column.astype(np.int64) for column in columns[_PLACE : _PLACE + 2 * dimensions]]
    if not numbers:
        return (empty := np.empty((len(columns[0]), 0), np.int64)), empty
    return np.stack(numbers[::2], 1), np.stack(numbers[1::2], 1)


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


JSON_NAME = "index.json"


class JsonTensor(Strict):
    """A tensor and its parts."""

    name: str
    dtype: str
    shape: list[Count]
    chunks: list[list[Count]]
    """For each part: offset and size, both by dimension, then number of the file, first byte and bytes."""


class JsonIndex(Strict):
    """`index.json`."""

    format: Literal[1] = 1
    files: list[str]
    tensors: list[JsonTensor]
    objects: list[ObjectRecord]


def read_json_index(text: bytes) -> Table:
    """Read `index.json`.

    Raises:
        ValueError: it is not an index.
    """
    document = read_json(JsonIndex, text)
    return make_table(
        document.files,
        document.objects,
        (
            (tensor.name, tensor.dtype, tensor.shape, [json_row(chunk, len(tensor.shape)) for chunk in tensor.chunks])
            for tensor in document.tensors
        ),
    )


def json_row(chunk: list[int], dimensions: int) -> list[int]:
    """A row of the table, of a part as it is in JSON."""
    numbers = [number for pair in zip(chunk[:dimensions], chunk[dimensions:], strict=False) for number in pair]
    return [*chunk[2 * dimensions :], *numbers]
