"""`.metadata`, torch.distributed.checkpoint's own index, for torch's and megatron-core's tools; not read here."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from llmrecipes.engine.megatron.checkpoint.index import DTYPES
from llmrecipes.engine.megatron.checkpoint.table import Table

METADATA_NAME = ".metadata"
MOST_PARTS = 100_000
"""Most parts with which it is written: pickling stops the training loop, which needs the same lock, 10 µs for each."""


def pickled(index: Table) -> bytes:
    """`.metadata` of the same content as an index."""
    described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for each in index.objects:
        described[each.name] = BytesStorageMetadata()
        stored[MetadataIndex(each.name)] = _info(index, each.place)
    for tensor, rows in zip(index.tensors, index.rows, strict=True):
        parts = []
        for number, row in enumerate(np.stack([column[rows] for column in index.columns], 1).tolist()):
            end = 3 + 2 * len(tensor.shape)
            offset, size = torch.Size(row[3:end:2]), torch.Size(row[4:end:2])
            parts.append(ChunkStorageMetadata(offset, size))
            stored[MetadataIndex(tensor.name, offset, number)] = _info(index, row[:3])
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), parts)
    found = Metadata(described, storage_data=stored, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    return pickle.dumps(found)


def _info(index: Table, place: list[int]) -> _StorageInfo:
    number, start, length = place
    return _StorageInfo(index.files[number], start, length)
