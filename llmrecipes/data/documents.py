"""The documents of a prepared split one by one, and its tokens as one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes.data.manifest import stem
from llmrecipes.data.prepared import Prepared
from llmrecipes.data.split import Split
from llmrecipes.data.tokens import TokenFile

CHUNK = 1 << 20
"""Tokens that are read at once."""


def token_files(prepared: Prepared, split: Split) -> list[IndexedDataset]:
    """The token files of a split: each a sequence of documents, which end with an end token."""
    found = []
    for number, source in enumerate(prepared.manifest.sources):
        if source.splits[split].documents:
            name = stem(number, split)
            tokens = IndexedDataset(str(prepared.path / name), mmap=False)
            tokens.bin_reader = TokenFile(prepared.path / f"{name}.bin")
            found.append(tokens)
    return found


def without_end(tokens: Sequence[int] | np.ndarray, eod: int) -> list[int]:
    """A document's token ids without its end token."""
    ids = [int(each) for each in tokens]
    return ids[:-1] if ids and ids[-1] == eod else ids


def documents(prepared: Prepared, split: Split) -> Iterator[list[int]]:
    """Token ids of a split's documents, source by source, without end tokens."""
    for tokens in token_files(prepared, split):
        for number in range(len(tokens)):
            yield without_end(tokens[number], prepared.manifest.tokenizer.eod)


def token_stream(prepared: Prepared, split: Split, overlap: int, size: int = CHUNK) -> Iterator[np.ndarray]:
    """All tokens of a split, in pieces of at most `size` + `overlap`.

    Args:
        prepared: the opened folder.
        split: of its documents, with end tokens.
        overlap: tokens at the end of a piece that the next one repeats.
        size: new tokens of a piece.
    """
    kind = np.dtype(prepared.manifest.dtype)
    for number, source in enumerate(prepared.manifest.sources):
        total = source.splits[split].tokens
        if not total:
            continue
        file = TokenFile(prepared.path / f"{stem(number, split)}.bin")
        for start in range(0, total, size):
            first = max(0, start - overlap)
            yield file.read(kind, min(total, start + size) - first, first * kind.itemsize)
