"""The index of a checkpoint: which part of which tensor is in which file, as JSON.

torch.distributed.checkpoint keeps it as a pickle, and reading a pickle can run code. `.metadata` is still written, for
torch's own tools, but nothing here reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from llmrecipes.checkpoint.manifest import FileRecord

INDEX_NAME = "index.json"

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a tensor, or an object, is stored."""

    file: str
    start: int
    length: int
    dtype: torch.dtype | None = None
    """None for an object."""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Index:
    """A validated index.

    Args:
        metadata: names, types, shapes and chunks, as torch's classes; without storage information.
        places: by name and offset.
    """

    metadata: Metadata
    places: dict[MetadataIndex, Place]


def encode(metadata: Metadata) -> bytes:
    """The index of the files that torch.distributed.checkpoint has just written.

    Raises:
        ValueError: a part was transformed (compressed, encrypted), which the index cannot express.
    """
    places = {}
    for key, info in metadata.storage_data.items():
        if info.transform_descriptors:
            raise ValueError(f"{key.fqn} is stored through {info.transform_descriptors}")
        places[key.fqn, _offset(key.offset)] = (info.relative_path, info.offset, info.length)
    tensors = {
        name: (str(stored.properties.dtype).removeprefix("torch."), stored.size, _boxes(stored.chunks))
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    objects = [name for name in metadata.state_dict_metadata if name not in tensors]
    return document(tensors, objects, places).model_dump_json().encode()


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
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    for record in document.objects:
        _require(record.name not in described, record.name, "is there twice")
        described[record.name] = BytesStorageMetadata()
        places[MetadataIndex(record.name)] = Place(*_span(record.name, record.place, document.files, files))
    for tensor in document.tensors:
        _require(tensor.name not in described, tensor.name, "is there twice")
        _require(tensor.dtype in DTYPES, tensor.name, f"has the unknown type {tensor.dtype!r}")
        described[tensor.name] = _tensor(tensor, document.files, files, places)
    return Index(Metadata(described), places)


def _tensor(
    record: TensorRecord, names: list[str], files: Mapping[str, FileRecord], places: dict[MetadataIndex, Place]
) -> TensorStorageMetadata:
    name, dimensions, dtype = record.name, len(record.shape), DTYPES[record.dtype]
    elements = 0
    chunks: list[ChunkStorageMetadata] = []
    for chunk in record.chunks:
        _require(len(chunk) == 2 * dimensions + 3, name, f"has {dimensions} dimensions, a chunk has others")
        offset, size = chunk[:dimensions], chunk[dimensions : 2 * dimensions]
        inside = all(first + length <= end for first, length, end in zip(offset, size, record.shape, strict=True))
        _require(inside, name, f"has the shape {record.shape}, a chunk of {size} at {offset} lies outside")
        key = MetadataIndex(name, offset, len(chunks))
        _require(key not in places, name, f"has two chunks at {offset}")
        span = _span(name, chunk[2 * dimensions :], names, files)
        places[key] = Place(*span, dtype, tuple(size))
        chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
        elements += prod(size)
    # A gap would contain uninitialised memory.
    _require(elements == prod(record.shape), name, f"has the shape {record.shape}, its chunks {elements} elements")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(record.shape), chunks)


def _span(name: str, place: list[int], names: list[str], files: Mapping[str, FileRecord]) -> Span:
    number, start, length = place
    _require(number < len(names), name, f"is in file {number} of {len(names)}")
    size = files[names[number]].size
    _require(start + length <= size, name, f"ends at byte {start + length} of {names[number]}, which has {size}")
    return names[number], start, length


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"{name!r} {problem}")


def _offset(offset: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)


def _boxes(chunks: Iterable[ChunkStorageMetadata]) -> list[Chunk]:
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
