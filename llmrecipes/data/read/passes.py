"""megatron-core's GPTDataset, each of whose passes over the documents is shuffled by itself.

Its own shuffles all passes as one, except a last one of which less than 80 % is drawn. So a quarter of the tokens is
not in the first of two passes, and another number of samples is another order. The order of a single pass is its own.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset

Indices = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]
"""The documents of all passes [passes × documents] in int32; where each sample begins in them [samples + 1, 2]; the
order of samples [samples]. None: opened later."""


class PassDataset(GPTDataset):
    """Samples of a source, whose order begins alike however many are drawn.

    The shuffled documents of all passes are joined and cut into samples. A sample that spans two passes is shuffled
    with the second: no sample is lost, and no pass has tokens of a later one.
    """

    def _build_document_sample_shuffle_indices(self) -> Indices:
        if self.config.defer_npy_index_mmap:
            names: Indices = super()._build_document_sample_shuffle_indices()
            return names
        seed = self.config.random_seed
        length = self.config.sequence_length
        tokens = self._get_num_tokens_per_epoch()
        passes = self._get_num_epochs(tokens)
        borders = [0, *((turn * tokens - 1) // length for turn in range(1, passes + 1))]
        documents = np.empty((passes, len(self.indices)), np.int32)
        order = np.arange(borders[-1], dtype=np.uint32 if borders[-1] < 2**32 - 2 else np.int64)
        for turn, (first, end) in enumerate(pairwise(borders)):
            generator = np.random.default_rng((seed, turn)) if turn else np.random.RandomState(seed)
            documents[turn] = self.indices
            generator.shuffle(documents[turn])
            generator.shuffle(order[first:end])
        joined = documents.reshape(-1)
        samples = helpers.build_sample_idx(
            self.dataset.sequence_lengths.copy(), joined, length, passes, tokens, True, True
        )
        base = Path(
            self.config.path_to_cache, f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        )
        Path(f"{base}-description.txt").write_text(self.unique_description, encoding="utf-8")
        for name, values in (("document_index", joined), ("sample_index", samples), ("shuffle_index", order)):
            np.save(f"{base}-{name}.npy", values)
        return joined, samples, order
