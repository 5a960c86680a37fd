"""The tokens of a prepared split: slices of its files, documents one by one, or one stream."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes.data.folder.data_manifest import stem
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.data.steps.split import Split
from llmrecipes.untrusted import open_file

CHUNK = 1 << 20
"""Tokens that are read at once."""


def token_files(prepared: Prepared, split: Split) -> list[IndexedDataset]:
    """The token files of a split: each a sequence of documents, with what documents begin and end with."""
    files = []
    for number, source in enumerate(prepared.manifest.sources):
        if source.splits[split].documents:
            files.append(_opened(prepared, number, split))
    return files


def _opened(prepared: Prepared, number: int, split: Split) -> IndexedDataset:
    name = stem(number, split)
    tokens = IndexedDataset(str(prepared.path / name), mmap=False)
    tokens.bin_reader = TokenFile(prepared.path / f"{name}.bin")
    return tokens


def _in_pieces(tokens: IndexedDataset, overlap: int, size: int) -> Iterator[np.ndarray]:
    """The documents of a file joined, in pieces of `size` new tokens behind the last `overlap` ones."""
    waiting: list[np.ndarray] = []
    new = 0
    for number in range(len(tokens)):
        waiting.append(tokens[number])
        new += len(waiting[-1])
        while new >= size:
            joined = np.concatenate(waiting)
            cut = len(joined) - new + size
            yield joined[:cut]
            waiting = [joined[max(0, cut - overlap) :]]
            new = new - size
    if new:
        yield np.concatenate(waiting)


def text_ids(tokens: Sequence[int] | np.ndarray, eod: int, prefix: Sequence[int] = ()) -> list[int]:
    """Ids of a document's text, without its end token and what it begins with."""
    ids = [int(token) for token in tokens]
    if ids and ids[-1] == eod:
        ids.pop()
    return ids[len(prefix) :] if ids[: len(prefix)] == list(prefix) else ids


def documents(prepared: Prepared, split: Split) -> Iterator[list[int]]:
    """Token ids of the texts of a split's documents, source by source."""
    record = prepared.manifest.tokenizer
    for tokens in token_files(prepared, split):
        for number in range(len(tokens)):
            yield text_ids(tokens[number], record.eod, record.prefix or ())


def token_stream(prepared: Prepared, split: Split, overlap: int, size: int = CHUNK) -> Iterator[np.ndarray]:
    """All tokens of a split, in pieces of at most `size` + `overlap`.

    Args:
        prepared: the opened folder.
        split: split of its documents, with end tokens.
        overlap: tokens at the end of a piece that the next one repeats.
        size: new tokens of a piece.
    """
    kind = np.dtype(prepared.manifest.dtype)
    for number, source in enumerate(prepared.manifest.sources):
        total = source.splits[split].tokens
        if not total:
            continue
        if source.linked:
            yield from _in_pieces(_opened(prepared, number, split), overlap, size)
            continue
        file = TokenFile(prepared.path / f"{stem(number, split)}.bin")
        for start in range(0, total, size):
            first = max(0, start - overlap)
            yield file.read(kind, min(total, start + size) - first, first * kind.itemsize)


class TokenFile:
    """Reads slices of a `.bin` file, for megatron-core's `IndexedDataset.bin_reader`.

    Not memory-mapped: if a mapped file is truncated or its disk fails, the process is killed by SIGBUS; this read
    fails with an `OSError` that names the file. Forked processes share the open file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stream = open_file(file)
        finalize(self, self._stream.close)

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """`count` ids from a byte offset.

        Raises:
            OSError: they cannot be read, or the file is too short.
        """
        missing = int(count) * np.dtype(dtype).itemsize
        parts: list[bytes] = []
        while missing:
            try:
                part = os.pread(self._stream.fileno(), missing, int(offset))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._file)) from error
            if not part:
                raise OSError(errno.EIO, f"ends at byte {offset:,}", str(self._file))
            parts.append(part)
            missing -= len(part)
            offset += len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype)
