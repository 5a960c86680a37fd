"""A file of torch.save's values whose SHA-256 is known when it is written."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import Executor
from typing import IO, Any, BinaryIO, cast

import torch

from llmrecipes.checkpoint.manifest import FileRecord

_HASHED_BESIDE = 1 << 16
"""Bytes from which a second thread is worth it."""


class HashedFile(io.RawIOBase):
    """A file whose SHA-256 is known when it is written.

    Args:
        file: where it is written.
        thread: hashes what is written while it is written; None: one after the other.
    """

    def __init__(self, file: BinaryIO, thread: Executor | None = None) -> None:
        self._file, self._sha256, self._size, self._thread = file, hashlib.sha256(), 0, thread

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._thread is None or len(data) < _HASHED_BESIDE:
            self._sha256.update(data)
            written = self._file.write(data)
        else:
            hashed = self._thread.submit(self._sha256.update, data)
            try:
                written = self._file.write(data)
            finally:
                hashed.result()
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
