"""The order of a curriculum: the documents of a source by their difficulty, window by window.

`prepare` writes it into the index of samples, which ranks map into memory: which sample a step has stays a function of
the recipe and the step, on any layout and after a resume, and no rank sorts anything.
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmrecipes.recipe.source import Curriculum

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset

SUFFIX = ".scores"
"""Of the file of a source's compression ratios: a little-endian float32 for each training document."""


def compression_ratio(text: bytes) -> float:
    """Bytes of a text after DEFLATE at its fastest level, by its bytes: low where it repeats itself."""
    return len(zlib.compress(text, 1, wbits=-zlib.MAX_WBITS)) / len(text)


def order_by_difficulty(source: GPTDataset, prefix: Path, drawn: int, curriculum: Curriculum) -> None:
    """Rewrite the indices of a source: first the ordered samples, then the others as they are shuffled.

    Args:
        source: whose indices have just been built.
        prefix: of the files of its tokens, without suffix.
        drawn: samples that the run draws from it.
        curriculum: how.
    """
    from megatron.core.datasets import helpers

    lengths: np.ndarray = source.dataset.sequence_lengths.copy()
    scores: np.ndarray = lengths
    if curriculum.score == "compression_ratio":
        scores = np.memmap(f"{prefix}{SUFFIX}", "<f4", "r", shape=lengths.shape)
    config, passes = source.config, len(source.document_index) // len(lengths)
    count = round(drawn * curriculum.share)
    tokens = count * config.sequence_length + 1  # and the label of the last one
    documents = ordered(lengths, scores, passes, tokens, config.random_seed, curriculum)
    samples = helpers.build_sample_idx(
        lengths, documents, config.sequence_length, passes, int(lengths.sum(dtype=np.int64)), True, True
    )
    shuffled = np.asarray(source.shuffle_index)
    order = np.concatenate([np.arange(count, dtype=shuffled.dtype), shuffled[shuffled >= count]])
    base = f"{source.unique_description_hash}-{type(source).__name__}-{source.index_split.name}"
    for name, values in (("document_index", documents), ("sample_index", samples), ("shuffle_index", order)):
        file = Path(config.path_to_cache, f"{base}-{name}.npy")
        part = file.with_suffix(".part")
        with part.open("wb") as stream:  # beside the old one, which may be mapped into memory
            np.save(stream, values)
        part.replace(file)


def ordered(
    lengths: np.ndarray, scores: np.ndarray, passes: int, tokens: int, seed: int, curriculum: Curriculum
) -> np.ndarray:
    """Numbers of documents [passes × documents] in int32, each pass shuffled and then sorted window by window.

    Args:
        lengths: tokens of each document.
        scores: of each document.
        passes: over all documents.
        tokens: from the first on, whose documents are sorted.
        seed: of the run.
        curriculum: how.
    """
    places = []
    for turn in range(passes):
        order = np.random.default_rng((seed, turn)).permutation(len(lengths)).astype(np.int32)
        ends = np.cumsum(lengths[order], dtype=np.int64)
        within = min(tokens, int(ends[-1]))
        tokens -= within
        borders = [within * number // curriculum.windows for number in range(curriculum.windows + 1)]
        # A window ends with the document that has its last token.
        edges = [0, *(int(np.searchsorted(ends, border)) + 1 for border in borders[1:])] if within else []
        for first, last in pairwise(edges):
            window = order[first:last]
            keys = scores[window]
            order[first:last] = window[np.argsort(keys if curriculum.order == "ascending" else -keys, kind="stable")]
        places.append(order)
    return np.concatenate(places)
