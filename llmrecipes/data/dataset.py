"""Samples of a split: megatron-core's GPTDataset for each source, blended by weight.

`BlendedMegatronDatasetBuilder` is not used: it waits at barriers of the process group even if every index is cached,
and names its caches by absolute path, so that a moved folder would be indexed again.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from megatron.core.datasets import blended_dataset
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split as MegatronSplit

from llmrecipes.data import conversations, index, listing
from llmrecipes.data.conversations import ConversationDataset
from llmrecipes.data.manifest import stem
from llmrecipes.data.prepared import TOKENIZER, Prepared
from llmrecipes.data.split import SPLITS, Split
from llmrecipes.data.tokens import TokenFile
from llmrecipes.recipe.schema import Recipe

logger = logging.getLogger(__name__)


def build(recipe: Recipe, prepared: Prepared, split: Split) -> GPTDataset | BlendedDataset | ConversationDataset | None:
    """Open a split for training: nothing is built, and no rank waits for another except while files are checked.

    Args:
        recipe: gives sequence length, seed, batch and weights.
        prepared: from `prepare` or `open_prepared`.
        split: train, valid or test.

    Returns:
        A dataset of at least `index.samples(recipe, split)` samples, each with `tokens`, `labels`, `loss_mask` and
        `position_ids` of [seq_length]; None if no source has a sequence of this held-out split.

    Raises:
        UserError: tokens or indices are not prepared or are damaged, or a source is too short to train on.
    """
    prepared.check([TOKENIZER, *prepared.tokens(split)], logger.info)
    folder = index.check(recipe, prepared, logger.info)
    if recipe.data.chat is not None:
        return conversations.load(recipe, prepared, split, folder)
    return load(recipe, prepared, split, folder, fresh=False)


def load(
    recipe: Recipe, prepared: Prepared, split: Split, cache: Path, *, fresh: bool
) -> GPTDataset | BlendedDataset | None:
    """As `build`, with the indices in `cache`; `fresh` builds them there (for `build_index`)."""
    if split == "train":
        index.require_training(recipe, prepared)
    usable = prepared.usable(split, recipe.model.seq_length)
    if not usable:
        return None
    total = sum(prepared.weights[n] for n in usable)
    weights = [prepared.weights[n] / total for n in usable]
    config = _config(recipe, prepared, split, [stem(n, split) for n in usable], weights, cache)
    size = index.samples(recipe, split)
    # megatron-core would open arrays with `allow_pickle`: it only provides the names, and they are opened here.
    config.defer_npy_index_mmap = not fresh
    if len(usable) == 1:
        opened: GPTDataset | BlendedDataset = _source(prepared, usable[0], split, size, config)
    else:
        # The blend draws each source's share, rounded up by one sample.
        shares = [math.ceil(size * weight) + 1 for weight in weights]
        parts = [_source(prepared, n, split, share, config) for n, share in zip(usable, shares, strict=True)]
        opened = _blend(parts, weights, size, config, fresh=fresh)
    config.defer_npy_index_mmap = False
    return opened


def _config(
    recipe: Recipe, prepared: Prepared, split: Split, names: list[str], weights: list[float], cache: Path
) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=recipe.train.seed,
        sequence_length=recipe.model.seq_length,
        blend_per_split=[(names, weights) if s == split else None for s in SPLITS],
        path_to_cache=str(cache),
        tokenizer=prepared.tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # our attention is causal
    )


def _source(prepared: Prepared, number: int, split: Split, size: int, config: GPTDatasetConfig) -> GPTDataset:
    name = stem(number, split)
    tokens = IndexedDataset(str(prepared.path / name), mmap=False)
    tokens.bin_reader = TokenFile(prepared.path / f"{name}.bin")
    documents = np.arange(len(tokens), dtype=np.int32)
    # The second argument only names the cache: it must not change when the folder moves.
    label = f"{prepared.manifest.fingerprint}/{name}"
    source = GPTDataset(tokens, label, documents, size, MegatronSplit[split], config)
    if config.defer_npy_index_mmap:
        source.document_index = listing.array(Path(source.path_to_document_index))
        source.sample_index = listing.array(Path(source.path_to_sample_index))
        source.shuffle_index = listing.array(Path(source.path_to_shuffle_index))
    return source


def _blend(
    parts: list[GPTDataset], weights: list[float], size: int, config: GPTDatasetConfig, *, fresh: bool
) -> BlendedDataset:
    """A BlendedDataset whose indices are in the cache.

    megatron-core 0.16 queries its rank before it writes them, which fails in a process without a group: new ones are
    built in memory and written here under its names.
    """
    if fresh:
        in_memory = copy.copy(config)
        in_memory.path_to_cache = None
        with _quiet(blended_dataset.__name__):  # it warns that it cannot save
            built = BlendedDataset(parts, weights, size, in_memory)
        prefix = f"{config.path_to_cache}/{built.unique_description_hash}-{type(built).__name__}-{built.split.name}"
        np.save(f"{prefix}-dataset_index.npy", built.dataset_index)
        np.save(f"{prefix}-dataset_sample_index.npy", built.dataset_sample_index)
        Path(f"{prefix}-description.txt").write_text(built.unique_description, encoding="utf-8")
    blended = BlendedDataset(parts, weights, size, config)
    if config.defer_npy_index_mmap:
        blended.dataset_index = listing.array(Path(blended.path_to_dataset_index))
        blended.dataset_sample_index = listing.array(Path(blended.path_to_dataset_sample_index))
    return blended


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
