"""The index of a checkpoint: which part of which tensor is in which file, as JSON.

torch.distributed.checkpoint keeps it as a pickle, and reading a pickle can run code. `.metadata` is still written, for
torch's own tools, but nothing here reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmrecipes.checkpoint.manifest import FileRecord

INDEX_NAME = "index.json"
_MOST = 1 << 62
"""Elements of a tensor must be fewer, so that their number fits 64 bits."""

DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
"""Element types by name in the index."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Span = tuple[str, int, int]
"""File, first byte, bytes."""
Chunk = tuple[Iterable[int], Iterable[int]]
"""Offset and size of a part of a tensor, by dimension."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorRecord(_Strict):
    """A tensor and its parts."""

    name: str
    dtype: str
    shape: list[Count]
    chunks: list[list[Count]]
    """For each part: offset and size, both by dimension, then number of the file, first byte and bytes."""


class ObjectRecord(_Strict):
    """Plain values, as torch.save writes them."""

    name: str
    place: Annotated[list[Count], Field(min_length=3, max_length=3)]
    """Number of the file, first byte and bytes."""


class Document(_Strict):
    """`index.json`. A chunk takes about 40 bytes: 1.6 MB for 405B parameters in 40,000 chunks."""

    format: Literal[1] = 1
    files: list[str]
    tensors: list[TensorRecord]
    objects: list[ObjectRecord]


Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a checkpoint of k parts, by first dimension and then file order.

    Args:
        dtype: of its elements.
        shape: global, of d dimensions.
        offsets, sizes: [k, d] of the parts.
        places: [k, 3] number of the file, first byte and bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Integers
    sizes: Integers
    places: Integers

    def overlapping(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
        """Parts that have elements of a box."""
        first, last = 0, len(self.offsets)
        if self.shape and last:
            # Sorted by the first dimension, in which layers are stacked: only the parts of a box's layers are compared.
            start = self.offsets[:, 0]
            first = int(np.searchsorted(start, offset[0] - self._longest + 1, "left"))
            last = int(np.searchsorted(start, offset[0] + shape[0], "left"))
        offsets, sizes = self.offsets[first:last], self.sizes[first:last]
        box, ends = np.asarray(offset, np.int64), np.asarray(offset, np.int64) + np.asarray(shape, np.int64)
        found: list[int] = (np.flatnonzero(((offsets < ends) & (offsets + sizes > box)).all(1)) + first).tolist()
        return found

    @property
    def _longest(self) -> int:
        return int(self.sizes[:, 0].max())


@dataclass(frozen=True)
class Index:
    """A validated index."""

    files: tuple[str, ...]
    tensors: dict[str, Stored]
    objects: dict[str, Span]
    """Place of each object, by name."""


def merge(documents: Iterable[Document]) -> Document:
    """One index of the indexes of all ranks' files.

    Raises:
        ValueError: they do not fit together; the checkpoint could not be loaded.
    """
    files: list[str] = []
    tensors: dict[str, TensorRecord] = {}
    objects: list[ObjectRecord] = []
    for document in documents:
        base = len(files)
        files += document.files
        for each in document.objects:
            number, start, length = each.place
            objects.append(ObjectRecord(name=each.name, place=[number + base, start, length]))
        for tensor in document.tensors:
            known = tensors.setdefault(
                tensor.name, TensorRecord(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, chunks=[])
            )
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{tensor.name!r} is {known.dtype} {known.shape} and {tensor.dtype} {tensor.shape}")
            position = 2 * len(tensor.shape)
            for chunk in tensor.chunks:
                chunk[position] += base
                known.chunks.append(chunk)
    return Document(files=files, tensors=list(tensors.values()), objects=objects)


def document(
    tensors: Mapping[str, tuple[str, Iterable[int], Iterable[Chunk]]],
    objects: Iterable[str],
    places: Mapping[tuple[str, tuple[int, ...] | None], Span],
) -> Document:
    """Build an index from names, shapes and places.

    Args:
        tensors: element type, global shape and chunks by name.
        objects: names.
        places: by name and offset; an object's offset is None.

    Raises:
        KeyError: an entry has no place.
        ValidationError: an entry has the wrong type.
    """
    numbers: dict[str, int] = {}

    def place(name: str, offset: tuple[int, ...] | None) -> list[int]:
        file, start, length = places[name, offset]
        return [numbers.setdefault(file, len(numbers)), start, length]

    records = [
        TensorRecord(
            name=name,
            dtype=dtype,
            shape=list(shape),
            chunks=[[*offset, *size, *place(name, tuple(offset))] for offset, size in chunks],
        )
        for name, (dtype, shape, chunks) in tensors.items()
    ]
    values = [ObjectRecord(name=name, place=place(name, None)) for name in objects]
    return Document(files=list(numbers), tensors=records, objects=values)


def parse(text: bytes) -> Document:
    """Read `index.json`.

    Raises:
        ValueError: it is not an index.
    """
    try:
        return Document.model_validate_json(text)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where + ': ' if where else ''}{first['msg']}") from problem


def build(document: Document, files: Mapping[str, FileRecord]) -> Index:
    """Check an index against the files of its checkpoint, in one pass over it.

    Args:
        document: the index, untrusted.
        files: the manifest's; other files do not belong to the checkpoint.

    Raises:
        ValueError: with the first inconsistent tensor or object, and why.
    """
    for file in document.files:
        if file not in files:
            raise ValueError(f"the manifest does not list {file!r}")
    sizes = np.asarray([files[file].size for file in document.files], np.int64)
    tensors: dict[str, Stored] = {}
    objects: dict[str, Span] = {}
    for record in document.objects:
        _require(record.name not in objects, record.name, "is there twice")
        _require_places(record.name, np.asarray([record.place], np.int64), document.files, sizes)
        objects[record.name] = (document.files[record.place[0]], record.place[1], record.place[2])
    for tensor in document.tensors:
        _require(tensor.name not in tensors and tensor.name not in objects, tensor.name, "is there twice")
        _require(tensor.dtype in DTYPES, tensor.name, f"has the unknown type {tensor.dtype!r}")
        tensors[tensor.name] = _tensor(tensor, document.files, sizes)
    return Index(tuple(document.files), tensors, objects)


def _tensor(record: TensorRecord, names: list[str], file_sizes: Integers) -> Stored:
    name, shape, dimensions = record.name, record.shape, len(record.shape)
    _require(prod(shape) < _MOST, name, f"has the shape {shape}")
    columns = 2 * dimensions + 3
    fits = all(len(chunk) == columns for chunk in record.chunks)
    _require(fits, name, f"has {dimensions} dimensions, a chunk has others")
    table = np.asarray(record.chunks, np.int64).reshape(-1, columns)
    offsets, sizes, places = table[:, :dimensions], table[:, dimensions : 2 * dimensions], table[:, 2 * dimensions :]
    # As differences, because sums of such numbers may exceed 64 bits.
    inside = (offsets <= shape) & (sizes <= np.asarray(shape, np.int64) - offsets)
    for number in np.flatnonzero(~inside.all(1))[:1]:
        chunk = f"a chunk of {sizes[number].tolist()} at {offsets[number].tolist()} lies outside"
        _require(False, name, f"has the shape {shape}, {chunk}")
    if dimensions:
        _require(len(np.unique(offsets, axis=0)) == len(offsets), name, "has two chunks at the same place")
    # A gap would contain uninitialised memory.
    elements = sum(sizes.prod(1, dtype=np.int64).tolist())
    _require(elements == prod(shape), name, f"has the shape {shape}, its chunks {elements} elements")
    _require_places(name, places, names, file_sizes)
    order = np.lexsort((places[:, 1], places[:, 0], *([offsets[:, 0]] if dimensions else [])))
    return Stored(DTYPES[record.dtype], tuple(shape), offsets[order], sizes[order], places[order])


def _require_places(name: str, places: Integers, names: list[str], file_sizes: Integers) -> None:
    if not len(places):
        return
    number = int(places[:, 0].max())
    _require(number < len(names), name, f"is in file {number} of {len(names)}")
    sizes = file_sizes[places[:, 0]]
    for wrong in np.flatnonzero((places[:, 1] > sizes) | (places[:, 2] > sizes - places[:, 1]))[:1]:
        file, start, length = places[wrong].tolist()
        _require(False, name, f"ends at byte {start + length} of {names[file]}, which has {int(file_sizes[file])}")


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"{name!r} {problem}")
