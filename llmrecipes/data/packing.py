"""Which conversations share a sequence: best-fit decreasing, for millions of them at once.

Conversations are taken from the longest to the shortest, and each goes into the sequence with the least room that is
enough for it (Johnson 1974, "Fast algorithms for bin packing"). Sequences with the same room are interchangeable, so
all conversations of one length are placed together, and the work grows with the number of different lengths instead of
that of conversations (as in histogram packing: Krell et al., arXiv 2107.02027).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


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
    """Each conversation in a sequence of its own."""
    return Packed(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def best_fit(lengths: np.ndarray, room: int, seed: int) -> Packed:
    """Put conversations into as few sequences as best-fit decreasing finds.

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
        found = open_with[room_left]
        if wanted >= len(found):
            del open_with[room_left]
            rooms.remove(room_left)
            return found
        open_with[room_left] = found[wanted:]
        return found[:wanted]

    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            place = bisect_left(rooms, size)
            space = rooms[place] if place < len(rooms) else room
            each = space // size  # one sequence after the other is filled: the fullest is the best fit
            wanted = -(-left // each)
            if place < len(rooms):
                used = take(space, wanted)
            else:
                used = np.arange(sequences, sequences + wanted)
                sequences += wanted
            placed = min(left, each * len(used))
            full, rest = divmod(placed, each)
            sequence_of[start : start + placed] = np.repeat(used, each)[:placed]
            leave(space - each * size, used[:full])
            if rest:
                leave(space - rest * size, used[full : full + 1])
            start += placed
            left -= placed
    by_sequence = np.argsort(sequence_of, kind="stable")
    bounds = np.zeros(sequences + 1, np.int64)
    np.cumsum(np.bincount(sequence_of, minlength=sequences), out=bounds[1:])
    return Packed(order[by_sequence].astype(np.int64), bounds)
