"""Which documents are dropped because of earlier ones, decided by any number of workers.

Three stages, whose items are done and published as shards are. None has to know which documents others keep: a
document is dropped if an earlier one has the same digest or mark, kept or not, or else if it is similar to an earlier
representative of one of its buckets.

1. `repeats`, an item a range of digests, or of marks: documents that repeat an earlier one, from those of all shards.
2. `bands`, an item a shard: the key of each band of its documents, the place of the document and its sketch, ordered by
   ranges of keys. Those that are repeats are left out.
3. `near`, an item a range of keys, which is read of all shards: what is dropped in its buckets, as
   `copies.NearDuplicates` does in all of them. A document is dropped if it is dropped in one. Files are read from their
   beginning to their end; nothing is looked up by document.

Spans are different: whether a document is kept depends on which others are. One item, `decided`, goes through all
shards in order and writes of each what happens to its documents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmrecipes.data.preparation.shard_files import damaged, framed, publish, unframed
from llmrecipes.data.preparation.shards import KEY_BYTES, Shards
from llmrecipes.data.steps.copies import NearDuplicates, different, doubled
from llmrecipes.data.steps.steps import DUPLICATES, NEAR_DUPLICATES, Cut, Document, Dropped, Seen, left_of

_MOST_RANGES, _LEAST_RANGES = 1024, 16
"""Each of 1,024 has 310 million of the 21 bands of 15 billion documents; 16 also where shards are few, and may be
large."""
PIECE = 1 << 14
"""Documents whose bands are in memory at once, and stored together."""


@dataclass(frozen=True)
class Item:
    """Names of an item of a stage."""

    folder: Path
    stage: str
    number: int

    @property
    def file(self) -> Path:
        return self.folder / f"{self.number:06d}.{self.stage}"

    def publish(self, *content: bytes) -> None:
        """With the name that says that it is complete."""
        publish(self.file, content)


@dataclass(frozen=True)
class JoinStage:
    """A stage of joining: `make` makes an item."""

    shards: Shards
    name: str
    count: Callable[[Shards], int]
    """Items, once the stages before are done."""
    make: Callable[[Shards, Item], None]

    def needed(self) -> list[int]:
        """Numbers of the items that are missing."""
        with os.scandir(self.shards.joining) as entries:
            done = {entry.name for entry in entries if entry.name.endswith(f".{self.name}")}
        return [number for number in range(self.count(self.shards)) if f"{number:06d}.{self.name}" not in done]

    def work(self, number: int) -> None:
        """Make an item and publish it.

        Raises:
            UserError: a shard is damaged.
            OSError: something cannot be read or written.
        """
        self.make(self.shards, Item(self.shards.joining, self.name, number))


def stages(shards: Shards) -> tuple[JoinStage, ...]:
    """They, in order; without near-duplicates the first only."""
    if not shards.comparable:
        return (JoinStage(shards, "decided", one, _decided),)
    repeats = JoinStage(shards, "repeats", _all_ranges, _repeats)
    if shards.spec.steps.near is None:
        return (repeats,)
    return repeats, JoinStage(shards, "bands", one_a_shard, _bands), JoinStage(shards, "near", _band_ranges, _near)


def one_a_shard(shards: Shards) -> int:
    """Items of a stage that has one for each shard."""
    return len(shards.joined)


def one(shards: Shards) -> int:
    """The item of a stage that has only one."""
    return 1


def _all_ranges(shards: Shards) -> int:
    return len(shards.kinds) * shards.ranges


def _band_ranges(shards: Shards) -> int:
    return min(_MOST_RANGES, max(_LEAST_RANGES, len(shards.shards)))


def _repeats(shards: Shards, item: Item) -> None:
    kind = shards.kinds[item.number // shards.ranges]
    of_range = item.number % shards.ranges
    keys_by_shard: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for number in range(len(shards.joined)):
        of_shard, place = shards.keys(number, of_range, kind)
        keys_by_shard.append(of_shard)
        places.append(np.stack([np.full(len(place), number), place]))
    keys = np.frombuffer(b"".join(part.tobytes() for part in keys_by_shard), "<u8").reshape(-1, KEY_BYTES[kind] // 8)
    where = np.concatenate(places, axis=1)
    order = np.lexsort(keys.T)  # stable: of equal keys the first document comes first
    ordered = keys[order]
    repeated = np.sort(order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)])
    item.publish(np.ascontiguousarray(where[:, repeated], "<i8").tobytes())


def _bands(shards: Shards, item: Item) -> None:
    repeats = Compared(shards, item.number, near_too=False)
    ranges = _band_ranges(shards)
    bands = NearDuplicates(**(shards.spec.steps.near or {})).bands

    def pieces() -> Iterator[bytes]:
        place = 0
        places = list[int]()
        marks = list[bytes]()
        for worked in shards.batches(item.number, ids=False):
            for document in (outcome for outcome in worked.outcomes if isinstance(outcome, Document)):
                if repeats.add(document) is None:
                    places.append(place)
                    marks.append(document.marks[-1])
                place += 1
            if len(places) >= PIECE:
                yield piece(places, marks, bands, ranges)
                places, marks = [], []
        if places:
            yield piece(places, marks, bands, ranges)

    publish(item.file, pieces())


def _near(shards: Shards, item: Item) -> None:
    step = NearDuplicates(**(shards.spec.steps.near or {}))
    files = [Item(item.folder, "bands", number).file for number in range(len(shards.joined))]
    dropped = dropped_in(files, item.number, _band_ranges(shards), step)
    item.publish(dropped.astype("<i8").tobytes())


_DECISIONS = "decisions"


def _decided(shards: Shards, item: Item) -> None:
    seen = Seen(shards.spec.steps)
    for number in range(len(shards.joined)):
        place = 0
        rows = list[list[object]]()
        for worked in shards.batches(number, ids=False):
            for document in (outcome for outcome in worked.outcomes if isinstance(outcome, Document)):
                decision = seen.add(document)
                if isinstance(decision, Dropped):
                    rows.append([place, decision.reason, decision.rule, decision.excerpt])
                elif decision is not None:
                    left = decision.document.text.decode()
                    rows.append([place, decision.reason, decision.pieces, decision.excerpt, left])
                place += 1
        Item(item.folder, _DECISIONS, number).publish(json.dumps(rows).encode())
    item.publish()


class Decided:
    """What happens to the documents of a shard, as `decided` has written it."""

    def __init__(self, shards: Shards, number: int) -> None:
        rows = json.loads(Item(shards.joining, _DECISIONS, number).file.read_bytes())
        self._of_place = {place: decision for place, *decision in rows}
        self._spec = shards.spec.steps
        self._place = -1

    def add(self, document: Document) -> Dropped | Cut | None:
        """None if it is kept."""
        self._place += 1
        reason, rule, excerpt, *left = self._of_place.get(self._place, ("", "", ""))
        if left:
            return Cut(reason, left_of(document, left[0], reason, self._spec.rule), rule, excerpt)
        return Dropped(reason, rule, excerpt) if reason else None


def judge(shards: Shards, number: int) -> Compared | Decided:
    """What says which documents of a shard are kept, once its stages are done."""
    return Compared(shards, number) if shards.comparable else Decided(shards, number)


@cache
def _all_dropped(folder: Path, stage: str, first: int, last: int) -> tuple[np.ndarray, ...]:
    """Documents that each item of `repeats` or `near` drops: their shards, and their places in them."""
    files = [Item(folder, stage, number).file for number in range(first, last)]
    return tuple(np.memmap(file, "<i8", "r").reshape(2, -1) for file in files if file.stat().st_size)


class Compared:
    """Drops the documents of a shard that repeat an earlier one, in every byte or by their marks, or are similar to
    one."""

    def __init__(self, shards: Shards, number: int, *, near_too: bool = True) -> None:
        self._place = -1

        def dropped(stage: str, first: int, last: int) -> set[int]:
            of_shard = set[int]()
            for owners, places in _all_dropped(shards.joining, stage, first, last):
                begin, end = np.searchsorted(owners, [number, number + 1])
                of_shard.update(places[begin:end].tolist())
            return of_shard

        count = shards.ranges
        self._repeats = [dropped("repeats", kind * count, (kind + 1) * count) for kind in range(len(shards.kinds))]
        by_bands = near_too and shards.spec.steps.near
        self._near = dropped("near", 0, _band_ranges(shards)) if by_bands else set[int]()

    def add(self, document: Document) -> Dropped | None:
        """None if it is kept."""
        self._place += 1
        if self._place in self._repeats[0]:
            return Dropped(DUPLICATES)
        if any(self._place in repeats for repeats in self._repeats[1:]):
            return Dropped(DUPLICATES, excerpt=document.excerpt)
        return Dropped(NEAR_DUPLICATES, excerpt=document.excerpt) if self._place in self._near else None


def piece(places: list[int], marks: list[bytes], bands: int, ranges: int) -> bytes:
    """Bands of some documents: where the parts of the ranges begin; then of each range the places in the shard and the
    keys, in the order of the documents, and in a second part their sketches, both with a SHA-256.

    Args:
        places: places of the documents in their shard, ascending.
        marks: marks of `copies.NearDuplicates`.
        bands: bands of a document.
        ranges: ranges of keys.
    """
    words = np.frombuffer(b"".join(marks), "<u8").reshape(len(marks), -1)
    keys = words[:, :bands].ravel()
    sketches = words[:, bands:]
    where = np.array(places, "<u4")
    of_range = (keys >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32)
    order = np.argsort(of_range, kind="stable")
    bounds = np.searchsorted(of_range[order], np.arange(ranges + 1, dtype=np.uint64))
    parts: list[bytes] = []
    for first, last in pairwise(bounds.tolist()):
        chosen = order[first:last]
        documents = chosen // bands
        parts += framed(where[documents].tobytes(), keys[chosen].tobytes()), framed(b"", sketches[documents].tobytes())
    starts = np.cumsum([8 * (len(parts) + 1), *map(len, parts)], dtype="<i8")
    return starts.tobytes() + b"".join(parts)


def read(file: Path, of_range: int, ranges: int) -> Iterator[tuple[np.ndarray, np.ndarray, Callable[[], np.ndarray]]]:
    """The bands of a shard in a range, piece by piece.

    Returns:
        Keys, uint64[n]; places of their documents in the shard, uint32[n]; and a function, to be called before the
        next piece, that reads their sketches, uint64[n, words].

    Raises:
        UserError: the file is not what was written.
    """
    failure = damaged(file, "the bands of a shard are damaged", "delete it")
    with file.open("rb") as stream:

        def part(begin: int, end: int) -> tuple[bytes, bytes]:
            stream.seek(begin)
            return unframed(stream.read(end - begin), failure)

        begin, size = 0, file.stat().st_size
        while begin < size:
            starts = _starts(stream, begin + 16 * of_range, 3) + _starts(stream, begin + 16 * ranges, 1)
            bounds = [0, *starts, size - begin]
            if len(starts) != 4 or any(after < before for before, after in pairwise(bounds)) or not starts[3]:
                raise failure
            first, second, end = (begin + start for start in starts[:3])
            places, keys = part(first, second)

            def sketches(begin: int = second, end: int = end, count: int = len(keys) // 8) -> np.ndarray:
                return np.frombuffer(part(begin, end)[1], "<u8").reshape(count, -1)

            yield np.frombuffer(keys, "<u8"), np.frombuffer(places, "<u4"), sketches
            begin += starts[3]


def _starts(stream: BinaryIO, at: int, count: int) -> list[int]:
    stream.seek(at)
    content = stream.read(8 * count)
    values: list[int] = np.frombuffer(content[: len(content) // 8 * 8], "<i8").tolist()
    return values


def dropped_in(files: Sequence[Path], of_range: int, ranges: int, step: NearDuplicates) -> np.ndarray:
    """The documents that are similar to an earlier representative of one of the buckets in a range.

    Held are 16 bytes for each band of the range until they are sorted, 28 for each bucket of several documents, and a
    sketch and 8 bytes for each of its representatives: one if all of its documents are similar to the first. Each
    document of a bucket is compared with its representatives, so a bucket of n that are not similar takes n² / 2.

    Args:
        files: files of the bands of each shard, in order.
        of_range: number of the range.
        ranges: ranges of keys.
        step: the settings.

    Returns:
        Numbers of files, and places in their shards, ascending: int64[2, n].

    Raises:
        UserError: a file is not what was written.
    """
    keys = np.concatenate(
        [np.empty(0, "<u8"), *(keys for file in files for keys, _, _ in read(file, of_range, ranges))]
    )
    keys.sort()
    common = np.unique(keys[1:][keys[1:] == keys[:-1]])
    del keys
    similar = [np.empty((2, 0), np.int64)]
    buckets = Buckets(len(common), step.most_different, step.words)
    for number, file in enumerate(files if len(common) else ()):
        for its_keys, places, sketches in read(file, of_range, ranges):
            bucket = np.minimum(np.searchsorted(common, its_keys), len(common) - 1)
            inside = np.flatnonzero(common[bucket] == its_keys)
            if len(inside):
                where = np.unique(places[inside[buckets.add(bucket[inside], sketches()[inside])]])
                similar.append(np.stack([np.full(len(where), number), where.astype(np.int64)]))
    return np.concatenate(similar, axis=1)


_FEW, _BLOCK = 16, 1 << 16
"""Representatives of a bucket that are compared with those of all others at once; further ones so many at a time."""


class Buckets:
    """Representatives of buckets, as `copies.NearDuplicates` has them, for many documents at once.

    Args:
        count: number of the buckets.
        most: values in which sketches of similar documents differ at most.
        words: words of a sketch.
    """

    def __init__(self, count: int, most: int, words: int) -> None:
        self._most = most
        self._words = words
        self._count = 0
        # Of a bucket the first and last of its first `_FEW` representatives, and their number; of these the next one.
        self._first, self._last, self._sizes = np.full(count, -1), np.full(count, -1), np.zeros(count, np.int32)
        self._next, self._sketches = np.empty(1024, np.int64), np.empty((1024, words), np.uint64)
        self._further: dict[int, tuple[np.ndarray, int]] = {}

    def __len__(self) -> int:
        """Representatives of all buckets."""
        return self._count + sum(count for _, count in self._further.values())

    def add(self, buckets: np.ndarray, sketches: np.ndarray) -> np.ndarray:
        """Whether each of some documents is similar to an earlier representative of its bucket: bool[n].

        Args:
            buckets: buckets of each; int64[n]. A bucket's documents are in the order of the sources.
            sketches: uint64[n, words].
        """
        similar = np.zeros(len(buckets), bool)
        waiting = np.arange(len(buckets))
        at = self._first[buckets]
        while True:  # the first representatives of all buckets, then the second ones, ...
            there = at >= 0
            waiting = waiting[there]
            at = at[there]
            if not len(waiting):
                break
            close = different(sketches[waiting], self._sketches[at]) <= self._most
            similar[waiting[close]] = True
            waiting = waiting[~close]
            at = self._next[at[~close]]
        new = np.flatnonzero(~similar)
        while len(new):
            full = self._sizes[buckets[new]] == _FEW
            for number in new[full].tolist():
                similar[number] = not self._represents(int(buckets[number]), sketches[number])
            new = new[~full]
            # The first of them in each bucket represents it too, and the others are compared with it.
            _, first = np.unique(buckets[new], return_index=True)
            self._represent(buckets[new[first]], sketches[new[first]])
            new = np.delete(new, first)
            close = different(sketches[new], self._sketches[self._last[buckets[new]]]) <= self._most
            similar[new[close]] = True
            new = new[~close]
        return similar

    def _represent(self, buckets: np.ndarray, sketches: np.ndarray) -> None:
        """One more of the first representatives of each of these buckets."""
        while self._count + len(buckets) > len(self._next):
            self._next, self._sketches = doubled(self._next), doubled(self._sketches)
        numbers = np.arange(self._count, self._count + len(buckets))
        self._count += len(buckets)
        self._sketches[numbers], self._next[numbers] = sketches, -1
        last = self._last[buckets]
        self._next[last[last >= 0]] = numbers[last >= 0]
        self._first[buckets[last < 0]] = numbers[last < 0]
        self._last[buckets] = numbers
        self._sizes[buckets] += 1

    def _represents(self, bucket: int, its_sketch: np.ndarray) -> bool:
        """Whether a document is a further representative, because it is not similar to one of those; it is then."""
        stored, count = self._further.get(bucket, (np.empty((_FEW, self._words), np.uint64), 0))
        for first in range(0, count, _BLOCK):
            if (different(stored[first : min(first + _BLOCK, count)], its_sketch) <= self._most).any():
                return False
        if count == len(stored):
            stored = doubled(stored)
        stored[count] = its_sketch
        self._further[bucket] = stored, count + 1
        return True
