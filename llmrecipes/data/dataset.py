"""Samples of a split: megatron-core's GPTDataset for each source, blended by weight; and their order, built once.

`BlendedMegatronDatasetBuilder` is not used: it waits at barriers of the process group even if every index is cached,
and names its caches by absolute path, so that a moved folder would be indexed again.
"""

from __future__ import annotations

import copy
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from megatron.core.datasets import blended_dataset
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split as MegatronSplit

from llmrecipes.data import checked, conversations
from llmrecipes.data.conversations import ConversationDataset
from llmrecipes.data.documents import TokenFile
from llmrecipes.data.manifest import LISTING, File, listing_text, open_array, stem
from llmrecipes.data.prepared import (
    TOKENIZER,
    Prepared,
    check_index,
    drawn_samples,
    index_folder,
    index_usable,
    require_training,
)
from llmrecipes.data.split import SPLITS, Split
from llmrecipes.recipe.schema import Recipe

logger = logging.getLogger(__name__)


def build(recipe: Recipe, prepared: Prepared, split: Split) -> GPTDataset | BlendedDataset | ConversationDataset | None:
    """Open a split for training: nothing is built, and no rank waits for another except while files are checked.

    Args:
        recipe: gives sequence length, seed, batch and weights.
        prepared: from `prepare` or `open_prepared`.
        split: train, valid or test.

    Returns:
        A dataset of at least `drawn_samples(recipe, split)` samples, each with `tokens`, `labels`, `loss_mask` and
        `position_ids` of [seq_length]; None if no source has a sequence of this held-out split.

    Raises:
        UserError: tokens or indices are not prepared or are damaged, or a source is too short to train on.
    """
    prepared.check([TOKENIZER, *prepared.tokens(split)], logger.info)
    folder = check_index(recipe, prepared, logger.info)
    if recipe.data.chat is not None:
        return conversations.load(recipe, prepared, split, folder)
    return load(recipe, prepared, split, folder, fresh=False)


def load(
    recipe: Recipe, prepared: Prepared, split: Split, cache: Path, *, fresh: bool
) -> GPTDataset | BlendedDataset | None:
    """As `build`, with the indices in `cache`; `fresh` builds them in `cache` (for `build_order`)."""
    if split == "train":
        require_training(recipe, prepared)
    usable = prepared.usable(split, recipe.model.seq_length)
    if not usable:
        return None
    total = sum(prepared.weights[n] for n in usable)
    weights = [prepared.weights[n] / total for n in usable]
    config = _config(recipe, prepared, split, [stem(n, split) for n in usable], weights, cache)
    size = drawn_samples(recipe, split)
    # megatron-core would open arrays with `allow_pickle`: it only provides the names, and `open_array` opens them.
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
        source.document_index = open_array(Path(source.path_to_document_index))
        source.sample_index = open_array(Path(source.path_to_sample_index))
        source.shuffle_index = open_array(Path(source.path_to_shuffle_index))
    return source


def _blend(
    parts: list[GPTDataset], weights: list[float], size: int, config: GPTDatasetConfig, *, fresh: bool
) -> BlendedDataset:
    """A BlendedDataset whose indices are in the cache.

    megatron-core 0.16 queries its rank before it writes them, which fails in a process without a group: new ones are
    built in memory and written under its names.
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
        blended.dataset_index = open_array(Path(blended.path_to_dataset_index))
        blended.dataset_sample_index = open_array(Path(blended.path_to_dataset_sample_index))
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


def build_order(recipe: Recipe, prepared: Prepared, log: Callable[[str], None]) -> None:
    """Build the indices of all splits, and publish them with one rename.

    Raises:
        UserError: a source is too short for one sequence of training.
    """
    target = index_folder(recipe, prepared)
    if index_usable(recipe, prepared):
        return
    if (target / LISTING).is_file():
        log(f"note: the sample order in {target} was written without hashes; it is built again, and is the same")
    for split in SPLITS:
        _say_what_is_short(recipe, prepared, split, log)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for split in SPLITS:
            if recipe.data.chat is None:
                load(recipe, prepared, split, part, fresh=True)
            else:
                conversations.write_order(recipe, prepared, split, part, log)
        contents = checked.describe(part, prepared.ids)
        files = {name: File(bytes=content.bytes, sha256=content.sha256) for name, content in contents.items()}
        (part / LISTING).write_text(listing_text(files), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # it has no listing or no hashes
        part.rename(target)
        checked.remember(prepared.path, {f"{target.relative_to(prepared.path)}/{n}": c for n, c in contents.items()})
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _say_what_is_short(recipe: Recipe, prepared: Prepared, split: Split, log: Callable[[str], None]) -> None:
    length, usable = recipe.model.seq_length, prepared.usable(split, recipe.model.seq_length)
    short = [n for n in range(len(prepared.manifest.sources)) if n not in usable]
    if split == "train":
        require_training(recipe, prepared)
    elif not usable and prepared.manifest.chat is not None:
        log(f"the {split} split has no conversation: nothing is evaluated on it")
    elif not usable:
        log(f"the {split} split has fewer than {length + 1:,} tokens in every source: nothing is evaluated on it")
    elif prepared.manifest.chat is None:
        for n in short:
            source = prepared.manifest.sources[n]
            tokens = source.splits[split].tokens
            log(f"{source.label}: {tokens:,} {split} tokens are less than one sequence; left out of {split}")
