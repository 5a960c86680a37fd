"""`.metadata`, torch.distributed.checkpoint's own index, for torch's and megatron-core's tools; not read here."""

from __future__ import annotations

import pickle

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

from llmrecipes.engine.megatron.checkpoint.index import DTYPES, Document

METADATA_NAME = ".metadata"
MOST_PARTS = 100_000
"""Most parts with which it is written: pickling stops the training loop, which needs the same lock, 10 µs for each."""


def pickled(index: Document) -> bytes:
    """`.metadata` of the same content as an index."""
    described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for each in index.objects:
        described[each.name] = BytesStorageMetadata()
        stored[MetadataIndex(each.name)] = _info(index, each.place)
    for tensor in index.tensors:
        dimensions, chunks = len(tensor.shape), []
        for number, chunk in enumerate(tensor.chunks):
            offset, size = torch.Size(chunk[:dimensions]), torch.Size(chunk[dimensions : 2 * dimensions])
            chunks.append(ChunkStorageMetadata(offset, size))
            stored[MetadataIndex(tensor.name, offset, number)] = _info(index, chunk[2 * dimensions :])
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    found = Metadata(described, storage_data=stored, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    return pickle.dumps(found)


def _info(index: Document, place: list[int]) -> _StorageInfo:
    number, start, length = place
    return _StorageInfo(index.files[number], start, length)
