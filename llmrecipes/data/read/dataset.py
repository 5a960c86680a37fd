"""Samples of a split: a `passes.PassDataset` for each source, blended by weight; and their order, built once.

`BlendedMegatronDatasetBuilder` is not used: it waits at barriers of the process group even if every index is cached,
and names its caches by absolute path, so that a moved folder would be indexed again.
"""

from __future__ import annotations

import copy
import logging
import shutil
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets import blended_dataset
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split as MegatronSplit
from torch.utils.data import Dataset

from llmrecipes.data.folder import checked
from llmrecipes.data.folder.data_manifest import LISTING, File, listing_text, open_array, stem, valid_stem
from llmrecipes.data.folder.documents import TokenFile
from llmrecipes.data.folder.prepared import (
    TOKENIZER,
    Prepared,
    check_index,
    drawn_samples,
    drawn_sources,
    index_folder,
    index_usable,
    rare_sources,
    require_training,
    samples_of_sources,
    train_weights,
)
from llmrecipes.data.read import precomputed
from llmrecipes.data.read.curriculum import order_by_difficulty
from llmrecipes.data.read.pair_samples import PairDataset
from llmrecipes.data.read.passes import PassDataset
from llmrecipes.data.steps.split import SPLITS, Split
from llmrecipes.recipe.rules.preference_rules import rows_of_a_pair
from llmrecipes.recipe.schema import Recipe

logger = logging.getLogger(__name__)


def build(recipe: Recipe, prepared: Prepared, split: Split) -> PassDataset | BlendedDataset | Talks | None:
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
        return load_conversations(recipe, prepared, split, folder)
    return load(recipe, prepared, split, folder, fresh=False)


def load(
    recipe: Recipe, prepared: Prepared, split: Split, cache: Path, *, fresh: bool
) -> PassDataset | BlendedDataset | None:
    """As `build`, with the indices in `cache`; `fresh` builds them in `cache` (for `build_order`)."""
    if split == "train":
        require_training(recipe, prepared)
    shares = train_weights(recipe, prepared) if split == "train" else prepared.weights
    usable = drawn_sources(recipe, prepared, split)
    if not usable:
        return None
    total = sum(shares[n] for n in usable)
    weights = [shares[n] / total for n in usable]
    config = _config(recipe, prepared, split, [stem(n, split) for n in usable], weights, cache)
    size = drawn_samples(recipe, split)
    # megatron-core would open arrays with `allow_pickle`: it only provides the names, and `open_array` opens them.
    config.defer_npy_index_mmap = not fresh
    sizes = samples_of_sources(size, weights)
    parts = [_source(prepared, stem(n, split), split, part, config) for n, part in zip(usable, sizes, strict=True)]
    if fresh and split == "train" and recipe.data.curriculum is not None:
        drawn = {n: (part, int(size * weight)) for n, part, weight in zip(usable, parts, weights, strict=True)}
        order_by_difficulty(drawn, prepared, recipe.data.curriculum, cache)
    opened: PassDataset | BlendedDataset = parts[0]
    if len(parts) > 1:
        opened = _blend(parts, weights, size, config, fresh=fresh)
    config.defer_npy_index_mmap = False
    return opened


def build_set(recipe: Recipe, prepared: Prepared, label: str) -> PassDataset:
    """Open a set of `data.valid_sources`, as `build` opens a split.

    Raises:
        UserError: tokens or indices are not prepared or are damaged.
    """
    prepared.check([TOKENIZER, *prepared.tokens_of_set(label)], logger.info)
    return load_set(recipe, prepared, label, check_index(recipe, prepared, logger.info), fresh=False)


def load_set(recipe: Recipe, prepared: Prepared, label: str, cache: Path, *, fresh: bool) -> PassDataset:
    """As `build_set`, with the indices in `cache`; `fresh` builds them there."""
    name = valid_stem(label)
    config = _config(recipe, prepared, "valid", [name], [1.0], cache)
    config.defer_npy_index_mmap = not fresh
    opened = _source(prepared, name, "valid", drawn_samples(recipe, "valid"), config)
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


def _source(prepared: Prepared, name: str, split: Split, size: int, config: GPTDatasetConfig) -> PassDataset:
    tokens = IndexedDataset(str(prepared.path / name), mmap=False)
    tokens.bin_reader = TokenFile(prepared.path / f"{name}.bin")
    documents = np.arange(len(tokens), dtype=np.int32)
    # The second argument only names the cache: it must not change when the folder moves.
    label = f"{prepared.manifest.fingerprint}/{name}"
    source = PassDataset(tokens, label, documents, size, MegatronSplit[split], config)
    if config.defer_npy_index_mmap:
        source.document_index = open_array(Path(source.path_to_document_index))
        source.sample_index = open_array(Path(source.path_to_sample_index))
        source.shuffle_index = open_array(Path(source.path_to_shuffle_index))
    return source


def _blend(
    parts: list[PassDataset], weights: list[float], size: int, config: GPTDatasetConfig, *, fresh: bool
) -> BlendedDataset:
    """A BlendedDataset whose indices are in the cache.

    megatron-core queries its rank before it writes them, which fails in a process without a group: new ones are
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
    for split in SPLITS:
        _say_what_is_short(recipe, prepared, split, log)
    if any(step.does.weighs for step in recipe.data.steps):
        drawn = drawn_samples(recipe, "train") * recipe.model.seq_length / sum(prepared.weights)
        for source, weight in zip(prepared.manifest.sources, prepared.weights, strict=True):
            passes = weight * drawn / source.splits["train"].tokens
            log(f"{source.label}: {weight:.1%} of the samples, {passes:.2g} passes")
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for split in SPLITS:
            if recipe.data.chat is None:
                load(recipe, prepared, split, part, fresh=True)
            else:
                write_order(recipe, prepared, split, part, log)
        for label in prepared.manifest.valid_sources:
            load_set(recipe, prepared, label, part, fresh=True)
        contents = checked.describe(part, prepared.ids)
        files = {name: File(bytes=content.bytes, sha256=content.sha256) for name, content in contents.items()}
        (part / LISTING).write_text(listing_text(files), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # it has no listing
        part.rename(target)
        checked.remember(prepared.path, {f"{target.relative_to(prepared.path)}/{n}": c for n, c in contents.items()})
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _say_what_is_short(recipe: Recipe, prepared: Prepared, split: Split, log: Callable[[str], None]) -> None:
    length, usable = recipe.model.seq_length, prepared.usable(split, recipe.model.seq_length)
    short = [n for n in range(len(prepared.manifest.sources)) if n not in usable]
    if split == "train":
        require_training(recipe, prepared)
        if rare := rare_sources(recipe, prepared):
            log(f"warning: less than one sample of training is from: {', '.join(rare)}")
    elif not usable and prepared.manifest.chat is not None:
        log(f"the {split} split has no conversations; it is not evaluated")
    elif not usable:
        log(f"the {split} split has fewer than {length + 1:,} tokens in every source; it is not evaluated")
    elif prepared.manifest.chat is None:
        for n in short:
            source = prepared.manifest.sources[n]
            log(f"{source.label}: {source.splits[split].tokens:,} tokens are less than a sequence; left out of {split}")


class ConversationFile:
    """Token ids of the conversations of one split of one source, and which of them are answers."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._index = IndexedDataset(str(prefix), mmap=False).index  # when it is deleted, its arrays are unmapped
        self._dtype = np.dtype(dtype)
        self._ids, self._answers = TokenFile(Path(f"{prefix}.bin")), TokenFile(Path(f"{prefix}.answers"))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation; valid as long as this object."""
        lengths: np.ndarray = self._index.sequence_lengths
        return lengths

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a conversation, and for each of them 1 if it is an answer's.

        Raises:
            OSError: they cannot be read.
        """
        place, length = int(self._index.sequence_pointers[number]), int(self.lengths[number])
        ids = self._ids.read(self._dtype, length, place)
        return ids, self._answers.read(np.uint8, length, place // self._dtype.itemsize)


class ConversationDataset(Dataset[dict[str, Any]]):
    """Samples of a split, in the order that `write_order` wrote.

    Positions begin at 0 in every conversation, and in the padding behind the last one; that is how attention knows
    where they begin. The first token of a conversation is nobody's label.

    Args:
        files: files of the sources that the split has.
        packed: the sequences of each.
        order: [samples, 2]: source and sequence of each sample, whose source samples have too, as those of a blend.
        length: length of a sequence.
        pad: id of the padding, whose labels the loss does not count.
    """

    def __init__(
        self, files: list[ConversationFile], packed: list[Packed], order: np.ndarray, length: int, pad: int
    ) -> None:
        self.packed, self.order = packed, order
        self._files, self._length, self._pad = files, length, pad

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> dict[str, Any]:
        source, sequence = (int(value) for value in self.order[number])
        packed = self.packed[source]
        tokens = np.full(self._length, self._pad, np.int64)
        labels = tokens.copy()
        mask = np.zeros(self._length, np.float32)
        positions = np.empty(self._length, np.int64)
        start = 0
        for member in packed.members[packed.bounds[sequence] : packed.bounds[sequence + 1]]:
            ids, answers = self._files[source][int(member)]
            end = start + len(ids) - 1
            tokens[start:end], labels[start:end], mask[start:end] = ids[:-1], ids[1:], answers[1:]
            positions[start:end] = np.arange(end - start)
            start = end
        positions[start:] = np.arange(self._length - start)
        return {
            "dataset_id": source,
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions),
        }


Talks = ConversationDataset | PairDataset


def write_order(recipe: Recipe, prepared: Prepared, split: Split, folder: Path, log: Callable[[str], None]) -> None:
    """Write which conversations share a sequence, and the order of samples: once, in `prepare`.

    Args:
        recipe: gives length, seed, batch, weights and packing.
        prepared: the opened folder.
        split: whose samples.
        folder: folder of the arrays.
        log: receives how full the sequences are.
    """
    chat, length, seed = recipe.data.chat, recipe.model.seq_length, recipe.train.seed
    usable = prepared.usable(split, length)
    if chat is None or not usable:
        return
    sequences, tokens, talks = [], 0, 0
    for number in usable:
        file = ConversationFile(prepared.path / stem(number, split), prepared.manifest.dtype)
        positions = file.lengths.astype(np.int64) - (1 if chat.preference is None else 2)
        packed = best_fit(positions, length, seed) if chat.packing else unpacked(len(positions))
        np.save(folder / f"{stem(number, split)}-members.npy", packed.members)
        np.save(folder / f"{stem(number, split)}-bounds.npy", packed.bounds)
        sequences.append(len(packed))
        tokens, talks = tokens + int(positions.sum()), talks + len(positions)
    weights = [prepared.weights[number] for number in usable]
    rows = rows_of_a_pair(recipe)
    order = _order(sequences, weights, -(-drawn_samples(recipe, split) // rows), (seed, SPLITS.index(split)))
    np.save(folder / f"{split}-order.npy", order)
    filled = tokens / (rows * sum(sequences) * length)
    how = "packed" if chat.packing else "padded, one per sequence (data.chat.packing is false)"
    what = "conversations" if chat.preference is None else "pairs"
    log(f"{split}: {talks:,} {what} in {rows * sum(sequences):,} sequences of {length:,}, {how}; {filled:.1%} filled")


def _order(sequences: list[int], weights: list[float], samples: int, seed: tuple[int, int]) -> np.ndarray:
    """[samples, 2]: source and sequence; each pass over a source is shuffled by itself, so a longer run begins alike.

    Args:
        sequences: sequences of each source.
        weights: weights of each source.
        samples: to draw.
        seed: seed of the run, and a number of the split.
    """
    order = np.zeros((samples, 2), np.int64)
    if len(sequences) > 1:
        from megatron.core.datasets import helpers

        source, within = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
        shares = np.array(weights) / sum(weights)
        helpers.build_blending_indices(source, within, shares, len(sequences), samples, False)
        order[:, 0], order[:, 1] = source, within
    else:
        order[:, 1] = np.arange(samples)
    for number, count in enumerate(sequences):
        drawn = order[:, 0] == number
        passes, places = np.divmod(order[drawn, 1], count)
        sequence = np.empty(len(places), np.int64)
        for turn in range(int(passes.max(initial=-1)) + 1):
            shuffled = np.random.default_rng((*seed, number, turn)).permutation(count)
            sequence[passes == turn] = shuffled[places[passes == turn]]
        order[drawn, 1] = sequence
    return order


def load_conversations(recipe: Recipe, prepared: Prepared, split: Split, folder: Path) -> Talks | None:
    """Open a split: its arrays are mapped into memory, no array is read completely.

    Args:
        recipe: gives the length of a sequence.
        prepared: the opened folder.
        split: to open.
        folder: folder of the arrays, checked.

    Returns:
        The samples; None if no source has a conversation of the split.

    Raises:
        UserError: an array is corrupt.
    """
    usable = prepared.usable(split, recipe.model.seq_length)
    if not usable:
        return None
    files = [ConversationFile(prepared.path / stem(number, split), prepared.manifest.dtype) for number in usable]
    packed = [
        Packed(*(open_array(folder / f"{stem(number, split)}-{name}.npy") for name in ("members", "bounds")))
        for number in usable
    ]
    order = open_array(folder / f"{split}-order.npy")
    chat, pad = recipe.data.chat, prepared.manifest.tokenizer.eod
    if chat is not None and chat.preference is not None:
        values = None if recipe.dpo is None else recipe.dpo.reference_log_probs
        counts, names = [len(sample.members) for sample in packed], [stem(number, split) for number in usable]
        known = None if values is None else precomputed.log_probs(Path(values), names, counts)
        return PairDataset(files, packed, order, recipe.model.seq_length, pad, packing=chat.packing, reference=known)
    return ConversationDataset(files, packed, order, recipe.model.seq_length, pad)


@dataclass(frozen=True)
class Packed:
    """Sequences of conversations.

    Args:
        members: numbers of conversations, sequence after sequence.
        bounds: where each sequence begins in them, and their end.
    """

    members: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1


def unpacked(count: int) -> Packed:
    """One conversation per sequence."""
    return Packed(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def best_fit(lengths: np.ndarray, room: int, seed: int) -> Packed:
    """Put conversations into as few sequences as best-fit decreasing finds.

    Conversations are taken from the longest to the shortest, and each goes into the sequence with the least room that
    is enough for it (Johnson 1974, "Fast algorithms for bin packing"). Sequences with the same room are
    interchangeable, so all conversations of one length are placed together, and the work grows with the number of
    different lengths instead of that of conversations (as in histogram packing: Krell et al., arXiv 2107.02027).

    Args:
        lengths: lengths of each conversation, from 1 to `room`.
        room: room of a sequence.
        seed: which of the conversations of one length share a sequence.
    """
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    sequence_of = np.empty(len(lengths), np.int64)  # in the order of `order`
    sizes, counts = np.unique(-lengths, return_counts=True)
    open_with: dict[int, np.ndarray] = {}  # room that is left -> sequences
    rooms: list[int] = []  # its keys, in order
    sequences = start = 0

    def leave(room_left: int, numbers: np.ndarray) -> None:
        if not room_left or not len(numbers):
            return
        if room_left not in open_with:
            insort(rooms, room_left)
            open_with[room_left] = numbers
        else:
            open_with[room_left] = np.concatenate([open_with[room_left], numbers])

    def take(room_left: int, wanted: int) -> np.ndarray:
        numbers = open_with[room_left]
        if wanted >= len(numbers):
            del open_with[room_left]
            rooms.remove(room_left)
            return numbers
        open_with[room_left] = numbers[wanted:]
        return numbers[:wanted]

    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            place = bisect_left(rooms, size)
            space = rooms[place] if place < len(rooms) else room
            per_sequence = space // size  # one sequence after the other is filled: the fullest is the best fit
            wanted = -(-left // per_sequence)
            if place < len(rooms):
                used = take(space, wanted)
            else:
                used = np.arange(sequences, sequences + wanted)
                sequences += wanted
            placed = min(left, per_sequence * len(used))
            full, rest = divmod(placed, per_sequence)
            sequence_of[start : start + placed] = np.repeat(used, per_sequence)[:placed]
            leave(space - per_sequence * size, used[:full])
            if rest:
                leave(space - rest * size, used[full : full + 1])
            start += placed
            left -= placed
    by_sequence = np.argsort(sequence_of, kind="stable")
    bounds = np.zeros(sequences + 1, np.int64)
    np.cumsum(np.bincount(sequence_of, minlength=sequences), out=bounds[1:])
    return Packed(order[by_sequence].astype(np.int64), bounds)
