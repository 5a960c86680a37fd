"""Samples of conversations: several in a sequence, or one and padding; and which ones share a sequence."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from llmrecipes.data.documents import TokenFile
from llmrecipes.data.manifest import open_array, stem
from llmrecipes.data.prepared import Prepared, drawn_samples
from llmrecipes.data.split import SPLITS, Split
from llmrecipes.recipe.schema import Recipe


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


class ConversationDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples of a split, in the order that `write_order` wrote.

    Positions begin at 0 in every conversation, and in the padding behind the last one; that is how attention knows
    where they begin. The first token of a conversation is nobody's label.

    Args:
        files: of the sources that the split has.
        packed: the sequences of each.
        order: [samples, 2]: source and sequence of each sample.
        length: of a sequence.
        pad: id of the padding, whose labels the loss does not count.
    """

    def __init__(
        self, files: list[ConversationFile], packed: list[Packed], order: np.ndarray, length: int, pad: int
    ) -> None:
        self._files, self._packed, self._order, self._length, self._pad = files, packed, order, length, pad

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        source, sequence = (int(each) for each in self._order[number])
        packed = self._packed[source]
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
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions),
        }


def write_order(recipe: Recipe, prepared: Prepared, split: Split, folder: Path, log: Callable[[str], None]) -> None:
    """Write which conversations share a sequence, and the order of samples: once, in `prepare`.

    Args:
        recipe: gives length, seed, batch, weights and packing.
        prepared: the opened folder.
        split: whose samples.
        folder: of the arrays.
        log: receives how full the sequences are.
    """
    chat, length, seed = recipe.data.chat, recipe.model.seq_length, recipe.train.seed
    usable = prepared.usable(split, length)
    if chat is None or not usable:
        return
    sequences, tokens, talks = [], 0, 0
    for number in usable:
        file = ConversationFile(prepared.path / stem(number, split), prepared.manifest.dtype)
        positions = file.lengths.astype(np.int64) - 1
        packed = best_fit(positions, length, seed) if chat.packing else alone(len(positions))
        np.save(folder / f"{stem(number, split)}-members.npy", packed.members)
        np.save(folder / f"{stem(number, split)}-bounds.npy", packed.bounds)
        sequences.append(len(packed))
        tokens, talks = tokens + int(positions.sum()), talks + len(positions)
    weights = [prepared.weights[number] for number in usable]
    order = _order(sequences, weights, drawn_samples(recipe, split), (seed, SPLITS.index(split)))
    np.save(folder / f"{split}-order.npy", order)
    filled = tokens / (sum(sequences) * length)
    how = "packed" if chat.packing else "padded, one in each (data.chat.packing is false)"
    log(f"{split}: {talks:,} conversations in {sum(sequences):,} sequences of {length:,}, {how}; {filled:.1%} filled")


def _order(sequences: list[int], weights: list[float], samples: int, seed: tuple[int, int]) -> np.ndarray:
    """[samples, 2]: source and sequence; each pass over a source is shuffled by itself, so a longer run begins alike.

    Args:
        sequences: of each source.
        weights: of each source.
        samples: to draw.
        seed: of the run, and a number of the split.
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


def load(recipe: Recipe, prepared: Prepared, split: Split, folder: Path) -> ConversationDataset | None:
    """Open a split: its arrays are mapped into memory, no array is read completely.

    Args:
        recipe: gives the length of a sequence.
        prepared: the opened folder.
        split: to open.
        folder: of the arrays, checked.

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
    return ConversationDataset(files, packed, order, recipe.model.seq_length, prepared.manifest.tokenizer.eod)


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


def alone(count: int) -> Packed:
    """One conversation per sequence."""
    return Packed(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def best_fit(lengths: np.ndarray, room: int, seed: int) -> Packed:
    """Put conversations into as few sequences as best-fit decreasing finds.

    Conversations are taken from the longest to the shortest, and each goes into the sequence with the least room that
    is enough for it (Johnson 1974, "Fast algorithms for bin packing"). Sequences with the same room are
    interchangeable, so all conversations of one length are placed together, and the work grows with the number of
    different lengths instead of that of conversations (as in histogram packing: Krell et al., arXiv 2107.02027).

    Args:
        lengths: of each conversation, from 1 to `room`.
        room: of a sequence.
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
