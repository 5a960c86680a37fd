"""A blend by its sources: the valid split of each, and the source of every training sample.

Neither needs further files: megatron-core's dataset of a blend has one of each source, and says which of them a
sample is from.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from torch.utils.data import Dataset

from llmrecipes.data.folder.data_manifest import Counts
from llmrecipes.data.folder.prepared import Prepared, drawn_samples, drawn_sources
from llmrecipes.data.read.batches import SOURCE
from llmrecipes.data.read.dataset import ConversationDataset
from llmrecipes.data.read.pair_samples import PairDataset
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.source import source_names


class WithSource(Dataset[dict[str, Any]]):
    """Samples of a blend with `source`, the number of their source in the recipe. A sample has tokens of one source.

    Args:
        samples: from `dataset.build`.
        numbers: numbers of the sources, in the order of the blend.
    """

    def __init__(self, samples: Dataset[Any], numbers: Sequence[int]) -> None:
        self._samples = samples
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self._samples[number]
        place = int(sample.get("dataset_id", 0))  # without a blend there is one source
        return {**sample, SOURCE: torch.tensor(self._numbers[place])}


def with_source(samples: Dataset[Any], recipe: Recipe, prepared: Prepared) -> WithSource:
    """Training samples with their source.

    Args:
        samples: from `dataset.build`, of the training split.
        recipe: whose sources are blended.
        prepared: its data.
    """
    return WithSource(samples, drawn_sources(recipe, prepared, "train"))


class HeldOutPart(Dataset[dict[str, Any]]):
    """The first samples of one source's valid split, as many as whole global batches have; none of them twice, unless
    there are fewer than one global batch has.

    Args:
        samples: samples of the source.
        batch: samples of a global batch.
        batches: global batches, at most.
    """

    def __init__(self, samples: Dataset[Any], batch: int, batches: int) -> None:
        self._samples = samples
        self._distinct: int = len(samples)  # type: ignore[arg-type]
        self.batches = max(1, min(batches, self._distinct // batch))
        self._size = self.batches * batch

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < self._size:
            raise IndexError(number)
        sample: dict[str, Any] = self._samples[number % self._distinct]
        return sample


def held_out_parts(recipe: Recipe, prepared: Prepared, valid: Dataset[Any]) -> dict[str, HeldOutPart]:
    """The valid split of each source that has a sequence of it, by the source's name.

    Args:
        recipe: whose sources are blended.
        prepared: its data.
        valid: the valid split of the blend, from `dataset.build`.
    """
    names = source_names(recipe.data.sources)
    train = recipe.train
    most = drawn_samples(recipe, "valid")
    return {
        names[number]: HeldOutPart(of_source(valid, place, most), train.global_batch_size, train.eval_iters)
        for place, number in enumerate(drawn_sources(recipe, prepared, "valid"))
    }


def counts_of_parts(recipe: Recipe, prepared: Prepared) -> dict[str, Counts]:
    """What the valid split of each source has, by the source's name."""
    names = source_names(recipe.data.sources)
    return {name: source.splits["valid"] for name, source in zip(names, prepared.manifest.sources, strict=True)}


def of_source(blend: Dataset[Any], place: int, most: int) -> Dataset[Any]:
    """The samples of one source of a blend, of conversations at most `most`, by its place in the blend."""
    if isinstance(blend, ConversationDataset | PairDataset):
        # Sequences are packed from long conversations to short ones, so those that are taken are spread evenly.
        count = len(blend.packed[place])
        taken = min(most, count)
        sequences = np.arange(taken, dtype=np.int64) * count // taken
        part = copy.copy(blend)
        part.order = np.stack([np.full(taken, place, np.int64), sequences], 1)
        return part
    return blend.datasets[place] if isinstance(blend, BlendedDataset) else blend
