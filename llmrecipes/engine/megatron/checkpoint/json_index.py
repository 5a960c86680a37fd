"""The index of checkpoints that older versions wrote as JSON, `index.json`."""

from __future__ import annotations

from typing import Literal

from llmrecipes.engine.megatron.checkpoint.table import Count, ObjectRecord, Strict, Table, make, read_json

JSON_NAME = "index.json"


class TensorRecord(Strict):
    """A tensor and its parts."""

    name: str
    dtype: str
    shape: list[Count]
    chunks: list[list[Count]]
    """For each part: offset and size, both by dimension, then number of the file, first byte and bytes."""


class Document(Strict):
    """`index.json`."""

    format: Literal[1] = 1
    files: list[str]
    tensors: list[TensorRecord]
    objects: list[ObjectRecord]


def read(text: bytes) -> Table:
    """Read `index.json`.

    Raises:
        ValueError: it is not an index.
    """
    document = read_json(Document, text)
    return make(
        document.files,
        document.objects,
        (
            (tensor.name, tensor.dtype, tensor.shape, [row(chunk, len(tensor.shape)) for chunk in tensor.chunks])
            for tensor in document.tensors
        ),
    )


def row(chunk: list[int], dimensions: int) -> list[int]:
    """A row of the table, of a part as it is in JSON."""
    boxes = [number for pair in zip(chunk[:dimensions], chunk[dimensions:], strict=False) for number in pair]
    return [*chunk[2 * dimensions :], *boxes]
