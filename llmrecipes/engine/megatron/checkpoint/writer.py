"""One rank's file of a checkpoint, in the layout of torch.distributed.checkpoint: what torch.save writes, in a row."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llmrecipes.checkpoint.manifest import FileRecord
from llmrecipes.checkpoint.writer import os_error
from llmrecipes.engine.megatron.checkpoint.table import ObjectRecord, Table, make
from llmrecipes.io import sync

_BUFFER = 1 << 20


def write_file(path: Path, tensors: Iterable[ShardedTensor], objects: Mapping[str, Any]) -> tuple[FileRecord, Table]:
    """Write and sync a file.

    It is hashed while it is written, so that it is not read again.

    Args:
        path: the file.
        tensors: parts of tensors, in memory of their own.
        objects: plain values by name.

    Returns:
        Its record for the manifest, and its index.

    Raises:
        OSError: a disk error.
    """
    parts: dict[str, tuple[str, tuple[int, ...], list[list[int]]]] = {}
    found = []
    try:
        with path.open("wb", buffering=_BUFFER) as file:
            stream = HashedFile(file)
            for shard in tensors:
                shape = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
                dtype = str(shard.data.dtype).removeprefix("torch.")
                place = stream.store(shard.data.view(shape))
                box = chain.from_iterable(zip(shard.global_offset, shape, strict=True))
                parts.setdefault(shard.key, (dtype, shard.global_shape, []))[2].append([0, *place, *box])
            for name, value in objects.items():
                found.append(ObjectRecord(name=name, place=[0, *stream.store(value)]))
    except RuntimeError as error:
        # torch's zip code raises one about positions for a failed write; the OSError is only in its context.
        if (cause := os_error(error)) is not None:
            raise cause from error
        raise
    sync(path)
    return stream.record(), make([path.name], found, ((name, *of) for name, of in parts.items()))


class HashedFile(io.RawIOBase):
    """A file whose SHA-256 is known when it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256, self._size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        written = self._file.write(data)
        self._size += written
        return written

    def store(self, value: Any, *, views: bool = False) -> tuple[int, int]:
        """Append a value; returns its first byte and its bytes.

        Args:
            value: plain data.
            views: it is a view of a few elements, to be stored as one.
        """
        start = self._size
        if not views and isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()  # torch.save writes all memory behind a view
        torch.save(value, cast(IO[bytes], self))
        return start, self._size - start

    def record(self) -> FileRecord:
        return FileRecord(size=self._size, sha256=self._sha256.hexdigest())
