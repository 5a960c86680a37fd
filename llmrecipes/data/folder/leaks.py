"""Whether held-out text of a prepared folder has near-copies in its training text: reads tokens, not sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes.data.folder.documents import text_ids, token_files
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.data.steps.copies import BandIndex, band_keys, bands_of, margin, signature
from llmrecipes.data.steps.split import Split
from llmrecipes.data.steps.words import shingles
from llmrecipes.data.tokens.infilling import restored
from llmrecipes.errors import UserError

HELD_OUT: tuple[Split, ...] = ("valid", "test")
_SEED = 2
"""Not that of the step: what its hash functions missed, others find."""
_WIDER = 0.9
"""Documents are compared from this share of the threshold on, so that hardly any pair above it is missed."""
MOST = 1_000_000
"""Training documents that are compared; of more, evenly spaced ones."""


@dataclass(frozen=True)
class NearCopies:
    """What was compared: documents, and the highest similarity of a training document to a held-out one."""

    held_out: int
    training: int
    compared: int
    threshold: float
    highest: float
    above: int
    """Training documents from the threshold on; the step lets few of them pass, because it estimates."""

    def __str__(self) -> str:
        of = "" if self.compared == self.training else f" of {self.training:,}"
        return (
            f"{self.held_out:,} held-out documents have {self.above:,} near-copies in {self.compared:,}{of} training "
            f"documents; highest similarity {self.highest:.2f}, threshold {self.threshold:g}"
        )


def check_near_copies(prepared: Prepared, most: int = MOST) -> NearCopies | None:
    """Compare training documents with all held-out ones by other hash functions, and similar pairs word by word.

    Memory is bounded by the held-out documents: some 0.5 to 1 KB each with the default permutations.

    Args:
        prepared: the opened folder.
        most: training documents to compare.

    Returns:
        None where the recipe has no step `near_duplicates`, and for conversations, whose tokens have the words of their
        template.

    Raises:
        UserError: a training document is more similar to a held-out one than the step may have missed.
    """
    steps: Any = prepared.manifest.data.get("steps", ())
    settings = next((step for step in steps if step["type"] == "near_duplicates"), None)
    if settings is None or prepared.manifest.chat is not None:
        return None
    threshold, permutations, words = (settings[key] for key in ("threshold", "permutations", "shingle_words"))
    tokenizer = prepared.tokenizer()
    record = prepared.manifest.tokenizer

    def grams(tokens: IndexedDataset, number: int) -> frozenset[str]:
        ids = restored(text_ids(tokens[number], record.eod, record.prefix or ()), record.fim)
        return frozenset(shingles(tokenizer.decode(ids), words))

    held = [(tokens, number) for split in HELD_OUT for tokens, number in _documents(prepared, split)]
    held_grams = lru_cache(1024)(lambda place: grams(*held[place]))
    index = BandIndex()
    bands = bands_of(_WIDER * threshold, permutations)
    for place in range(len(held)):
        index.add(band_keys(signature(list(held_grams(place)), permutations, _SEED), *bands), place)
    total = prepared.manifest.counts("train").documents
    stride = -(-total // most)
    highest = 0.0
    above = 0
    compared = 0
    worst = ""
    for order, (tokens, number) in enumerate(_documents(prepared, "train")):
        if order % stride:
            continue
        compared += 1
        mine = grams(tokens, number)
        _, candidates = index.find(band_keys(signature(list(mine), permutations, _SEED), *bands))
        pairs = (
            (len(mine & held_grams(place)) / len(mine | held_grams(place)), place) for place in set(candidates.tolist())
        )
        similarity, place = max(pairs, default=(0.0, 0))
        above += similarity >= threshold
        if similarity > highest:
            highest = similarity
            worst = f"{_name(tokens, number)} and {_name(*held[place])}"
    if highest >= min(1.0, threshold + margin(threshold, permutations)):
        raise UserError(
            f"training and held-out text have near-copies: {worst} share {highest:.2f} of their shingles",
            where=str(prepared.path),
            rule=f"held-out text must have no near-copies of training text (threshold {threshold:g})",
            fix="delete the folder and prepare again",
        )
    return NearCopies(len(held), total, compared, threshold, highest, above)


def _documents(prepared: Prepared, split: Split) -> Iterator[tuple[IndexedDataset, int]]:
    for tokens in token_files(prepared, split):
        for number in range(len(tokens)):
            yield tokens, number


def _name(tokens: IndexedDataset, number: int) -> str:
    return f"{Path(tokens.path_prefix).name}[{number}]"
