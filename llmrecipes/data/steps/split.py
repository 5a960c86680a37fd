"""Which documents are kept, and the split of each: both depend only on the hash of the text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from llmrecipes.errors import UserError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
DIGEST_BYTES = hashlib.sha256().digest_size


def digest(text: bytes) -> bytes:
    """SHA-256 of a document's UTF-8 text: 32 bytes."""
    return hashlib.sha256(text).digest()


@dataclass(frozen=True)
class SplitRule:
    """Split of a document from the first 8 bytes of its digest, read as a number in [0, 1)."""

    weights: tuple[float, float, float]

    def of(self, document: bytes) -> Split:
        """The split of the document with this digest."""
        place = int.from_bytes(document[:8], "big") / 2**64 * sum(self.weights)
        train, valid, test = self.weights
        if place < train:
            return "train"
        if place < train + valid:
            return "valid"
        # Rounding may put `place` at the very end; it must not select a split of weight 0.
        return "test" if test > 0 else "train"


def check_disjoint(digests: Iterable[tuple[Split, Path]]) -> int:
    """Prove from the stored digests that no document is in two splits, nor twice in one.

    Args:
        digests: split and digest file, one pair for each source and split.

    Returns:
        The number of documents.

    Raises:
        UserError: the first document that appears twice, and where.
    """
    import numpy as np

    parts = [(split, file, np.fromfile(file, dtype=f"V{DIGEST_BYTES}")) for split, file in digests]
    if not parts:
        return 0
    everything = np.concatenate([part for _, _, part in parts])
    unique, counts = np.unique(everything, return_counts=True)
    if len(unique) == len(everything):
        return len(everything)
    twice = unique[counts > 1][0]
    places = [f"{file.name} ({split})" for split, file, part in parts if (part == twice).any()]
    raise UserError(
        f"document {twice.tobytes().hex()[:16]} appears twice: {', '.join(places)}",
        where=str(parts[0][1].parent),
        rule="a document must be in one split only",
        fix="delete the folder and prepare again",
    )
