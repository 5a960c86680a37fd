"""Joining shards by all tasks at once: the files of a prepared folder, each task writing its bytes of them.

It is for documents that are compared for equality only, of their texts or of what the step `duplicates` makes of them:
no spans, no near-duplicates, no `max_tokens`, no conversations. Then which document is dropped does not depend on what
was kept before, and five stages follow the encoding. Their items are claimed and published as shards are; a stage
begins when nothing of the one before is missing.

1. `repeats`, an item a range of digests, or of marks: documents that repeat an earlier one, from those of all shards.
2. `counts`, an item a shard: what is kept of it. Its ids are not read.
3. `layout`, one item: where the shards begin, by prefix sums, and the files, in their sizes.
4. `packed`, an item 64 MiB of held-out text: a member of a gzip file.
5. `placed`, an item a shard: its tokens, lengths and digests, written where they belong, and synced.

Every item has the same bytes whoever makes it, so one that is made twice changes nothing. `collect` then does what is
left to one process: the counts and the names, and to put the held-out texts together.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from pydantic import Field

from llmrecipes.data import sources
from llmrecipes.data.corpus import Tally
from llmrecipes.data.curriculum import SUFFIX as SCORES
from llmrecipes.data.manifest import (
    IDX_DTYPES,
    IDX_HEADER,
    IDX_MAGIC,
    ChatCounts,
    Counts,
    HeldOut,
    Record,
    SourceRecord,
    stem,
)
from llmrecipes.data.prepared import HeldOutSplit, held_out_name
from llmrecipes.data.shards import KEY_BYTES, Shards, publish
from llmrecipes.data.split import DIGEST_BYTES, SPLITS, Split
from llmrecipes.data.steps import DUPLICATES, Document, Dropped
from llmrecipes.data.write import MEMBER_BYTES, SAMPLES, Output, Samples, compressed, record, require_readable, summary
from llmrecipes.errors import UserError
from llmrecipes.io import sync

JOINED = "joined"
"""Folder, among the shards, of the files that tasks write."""


class ShardCounts(Record):
    """What is kept of a shard, and what is dropped."""

    splits: dict[Split, Counts]
    read: int
    failure: str
    dropped: dict[str, int]
    rules: dict[str, int]
    changed: dict[str, int]
    samples: list[tuple[str, str, str]]
    texts: list[HeldOutSplit] = Field(default_factory=list)
    """Splits whose text is in a file of the shard."""


class Layout(Record):
    """Documents and tokens in front of each shard, in the files of its source; and of all, by file name. Of each
    held-out split the bytes of text of each shard."""

    before: list[dict[Split, tuple[int, int]]]
    every: dict[str, tuple[int, int]]
    texts: dict[HeldOutSplit, list[int]]

    @property
    def members(self) -> list[tuple[HeldOutSplit, int]]:
        """Of which gzip files consist: split, and the byte of its text at which a member begins."""
        return [(split, at) for split, sizes in self.texts.items() for at in range(0, sum(sizes), MEMBER_BYTES)]


@dataclass(frozen=True)
class _Item:
    """Names of an item of a stage."""

    folder: Path
    stage: str
    number: int

    @property
    def file(self) -> Path:
        return self.folder / f"{self.number:06d}.{self.stage}"

    def publish(self, token: str, content: bytes) -> None:
        """With the name that says that it is complete."""
        publish(self.folder / f".{self.number:06d}.{self.stage}-{token}.part", self.file, content)


def _missing(folder: Path, stage: str, count: int) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            done = {entry.name for entry in entries if entry.name.endswith(f".{stage}")}
    except FileNotFoundError:  # the data is published, and the shards are deleted
        return []
    return [number for number in range(count) if f"{number:06d}.{stage}" not in done]


@dataclass(frozen=True)
class Stage:
    """A stage of joining: `make` makes an item; it returns early if the item is lost to another task."""

    shards: Shards
    name: str
    count: int | None
    """Items; None: as the layout says."""
    make: Callable[[Shards, _Item, str, Callable[[], bool]], None]

    def needed(self) -> list[int]:
        """Numbers of the items that are missing."""
        count = self.count
        if count is None:
            try:
                count = len(_read_layout(self.shards.folder).members)
            except FileNotFoundError:  # not yet, or not any more
                return []
        return _missing(self.shards.folder, self.name, count)

    def claim(self, number: int) -> Path:
        """The folder whose creation claims an item."""
        return self.shards.folder / f"{number:06d}.{self.name}.claim"

    def work(self, number: int, token: str, lost: Callable[[], bool]) -> None:
        """Make an item and publish it.

        Raises:
            UserError: a shard is damaged.
            OSError: something cannot be read or written.
        """
        self.make(self.shards, _Item(self.shards.folder, self.name, number), token, lost)


def stages(shards: Shards) -> tuple[Stage, ...]:
    """What follows the encoding, in order; nothing if one process has to join the shards."""
    if not shards.parallel:
        return ()
    count = len(shards.shards)
    return (
        Stage(shards, "repeats", len(shards.kinds) * shards.ranges, _repeats),
        Stage(shards, "counts", count, _counts),
        Stage(shards, "layout", 1, _layout),
        Stage(shards, "packed", None, _packed),
        Stage(shards, "placed", count, _placed),
    )


def _repeats(shards: Shards, item: _Item, token: str, lost: Callable[[], bool]) -> None:
    kind, of_range = shards.kinds[item.number // shards.ranges], item.number % shards.ranges
    keys_by_shard: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for number in range(len(shards.shards)):
        if lost():
            return
        of_shard, place = shards.keys(number, of_range, kind)
        keys_by_shard.append(of_shard)
        places.append(np.stack([np.full(len(place), number), place]))
    keys = np.frombuffer(b"".join(part.tobytes() for part in keys_by_shard), "<u8").reshape(-1, KEY_BYTES[kind] // 8)
    where = np.concatenate(places, axis=1)
    order = np.lexsort(keys.T)  # stable: of equal keys the first document comes first
    ordered = keys[order]
    repeated = np.sort(order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)])
    item.publish(token, np.ascontiguousarray(where[:, repeated], "<i8").tobytes())


@cache
def _all_repeats(folder: Path, first: int, last: int) -> tuple[np.ndarray, ...]:
    """Of each item of `repeats`: shards, and places in them, of the documents that repeat an earlier one."""
    files = [_Item(folder, "repeats", number).file for number in range(first, last)]
    return tuple(np.memmap(file, "<i8", "r").reshape(2, -1) for file in files if file.stat().st_size)


class _Equal:
    """Drops the documents of a shard that repeat an earlier one, in every byte or by their marks."""

    def __init__(self, shards: Shards, number: int) -> None:
        self._place = -1
        self._repeats = [set[int]() for _ in shards.kinds]
        for kind, repeats in enumerate(self._repeats):
            for owners, places in _all_repeats(shards.folder, kind * shards.ranges, (kind + 1) * shards.ranges):
                first, last = np.searchsorted(owners, [number, number + 1])
                repeats.update(places[first:last].tolist())

    def add(self, document: Document) -> Dropped | None:
        """None if it is kept."""
        self._place += 1
        if self._place in self._repeats[0]:
            return Dropped(DUPLICATES)
        if any(self._place in repeats for repeats in self._repeats[1:]):
            return Dropped(DUPLICATES, excerpt=document.excerpt)
        return None


@dataclass
class _Counted:
    """The kept documents of a split, as numbers."""

    documents: int = 0
    tokens: int = 0
    size: int = 0

    def add(self, document: Document, length: int, ids: np.ndarray, answers: bytes) -> None:
        """The next one."""
        self.documents, self.tokens, self.size = self.documents + 1, self.tokens + length, self.size + document.size


def _counts(shards: Shards, item: _Item, token: str, lost: Callable[[], bool]) -> None:
    parts: dict[Split, _Counted] = {}
    texts: dict[HeldOutSplit, bytearray] = {}
    tally = Tally()
    output = Output(
        shards.spec,
        _Equal(shards, item.number),
        lambda _, split: parts.setdefault(split, _Counted()),
        lambda split, text: texts.setdefault(split, bytearray()).extend(text),
    )
    for worked in shards.batches(item.number, ids=False):
        if lost():
            return
        output.add(worked, None, tally)
    for split, text in texts.items():
        _Item(item.folder, split, item.number).publish(token, bytes(text))
    counts = ShardCounts(
        splits={
            split: Counts(documents=part.documents, tokens=part.tokens, bytes=part.size)
            for split, part in parts.items()
        },
        read=tally.read,
        failure=tally.failure,
        dropped=dict(tally.dropped),
        rules=dict(tally.rules),
        changed=dict(tally.changed),
        samples=[(sample.reason, sample.rule, sample.excerpt) for sample in output.samples.kept()],
        texts=list(texts),
    )
    item.publish(token, counts.model_dump_json().encode())


def _read_counts(shards: Shards, number: int) -> ShardCounts:
    return ShardCounts.model_validate_json(_Item(shards.folder, "counts", number).file.read_bytes())


def _layout(shards: Shards, item: _Item, token: str, lost: Callable[[], bool]) -> None:
    before: list[dict[Split, tuple[int, int]]] = []
    bounds: dict[str, tuple[int, int]] = {}
    texts: dict[HeldOutSplit, list[int]] = {}
    for number, shard in enumerate(shards.shards):
        before.append({})
        of_shard = _read_counts(shards, number)
        for held_out in of_shard.texts:
            sizes = texts.setdefault(held_out, [0] * len(shards.shards))
            sizes[number] = _Item(item.folder, held_out, number).file.stat().st_size
        for split, counts in of_shard.splits.items():
            name = stem(shard.source, split)
            documents, tokens = before[-1][split] = bounds.get(name, (0, 0))
            bounds[name] = (documents + counts.documents, tokens + counts.tokens)
    temporary, folder = item.folder / f".{JOINED}-{token}", item.folder / JOINED
    try:
        temporary.mkdir()
        code = next(code for code, name in IDX_DTYPES.items() if name == shards.spec.dtype)
        for name, (documents, tokens) in bounds.items():
            split = next(known for known in SPLITS if name.endswith(f"-{known}"))
            of_file = {
                ".bin": tokens * np.dtype(shards.spec.dtype).itemsize,
                ".sha256": documents * DIGEST_BYTES,
                ".idx": IDX_HEADER.size + 4 * documents + 8 * documents + 8 * (documents + 1),
            }
            if shards.spec.scored(split):
                of_file[SCORES] = 4 * documents
            for suffix, size in of_file.items():
                with (temporary / f"{name}{suffix}").open("wb") as file:
                    if suffix == ".idx":
                        file.write(IDX_HEADER.pack(IDX_MAGIC, 1, code, documents, documents + 1))
                    file.truncate(size)
        with suppress(OSError):  # whoever was killed behind this has left the same files
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if not folder.is_dir():
        raise OSError(0, "cannot make the folder", str(folder))
    item.publish(token, Layout(before=before, every=bounds, texts=texts).model_dump_json().encode())


@cache
def _read_layout(folder: Path) -> Layout:
    return Layout.model_validate_json(_Item(folder, "layout", 0).file.read_bytes())


def _packed(shards: Shards, item: _Item, token: str, lost: Callable[[], bool]) -> None:
    layout = _read_layout(item.folder)
    split, begin = layout.members[item.number]
    text, at = bytearray(), 0
    for number, size in enumerate(layout.texts[split]):
        first, last = max(begin, at), min(begin + MEMBER_BYTES, at + size)
        if first < last:
            with _Item(item.folder, split, number).file.open("rb") as stream:
                stream.seek(first - at)
                text += stream.read(last - first)
        at += size
    if len(text) != min(MEMBER_BYTES, at - begin):
        raise _damaged(item.folder, f"the held-out texts of {split} are shorter than they were")
    item.publish(token, compressed(text))


@dataclass
class _Place:
    """Where the next documents of a split go, and those that are not written yet."""

    documents: int
    tokens: int
    itemsize: int
    every: int
    files: dict[str, int]
    ids: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)

    def add(self, document: Document, length: int, ids: np.ndarray, answers: bytes) -> None:
        """The next one."""
        self.ids.append(ids.tobytes())
        self.lengths.append(length)
        self.digests.append(document.digest)
        self.scores.append(document.score)

    def flush(self) -> None:
        """Write them."""
        lengths = np.array(self.lengths, "<i8")
        ends = self.tokens + np.cumsum(lengths)
        _write_at(self.files[".bin"], b"".join(self.ids), self.tokens * self.itemsize)
        _write_at(self.files[".sha256"], b"".join(self.digests), self.documents * DIGEST_BYTES)
        if SCORES in self.files:
            _write_at(self.files[SCORES], np.array(self.scores, "<f4").tobytes(), self.documents * 4)
        index, start = self.files[".idx"], IDX_HEADER.size
        _write_at(index, lengths.astype("<i4").tobytes(), start + 4 * self.documents)
        start += 4 * self.every
        _write_at(index, ((ends - lengths) * self.itemsize).astype("<i8").tobytes(), start + 8 * self.documents)
        start += 8 * self.every
        numbers = np.arange(self.documents + 1, self.documents + 1 + len(lengths), dtype="<i8")
        _write_at(index, numbers.tobytes(), start + 8 * (self.documents + 1))
        self.documents, self.tokens = self.documents + len(lengths), self.tokens + int(lengths.sum())
        self.ids, self.lengths, self.digests, self.scores = [], [], [], []


def _write_at(file: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _placed(shards: Shards, item: _Item, token: str, lost: Callable[[], bool]) -> None:
    layout, source = _read_layout(item.folder), shards.shards[item.number].source
    before = layout.before[item.number]
    with ExitStack() as stack:

        def place(_: int, split: Split) -> _Place:
            name, files = stem(source, split), dict[str, int]()
            for suffix in (".bin", ".idx", ".sha256", *([SCORES] if shards.spec.scored(split) else [])):
                files[suffix] = os.open(item.folder / JOINED / f"{name}{suffix}", os.O_WRONLY)
                stack.callback(os.close, files[suffix])
            itemsize = np.dtype(shards.spec.dtype).itemsize
            places[split] = _Place(*before[split], itemsize, layout.every[name][0], files)
            return places[split]

        places: dict[Split, _Place] = {}
        output = Output(shards.spec, _Equal(shards, item.number), place, lambda split, text: None)
        for worked in shards.batches(item.number):
            if lost():
                return
            output.add(worked, None, Tally())
            for each in places.values():
                each.flush()
        counts = _read_counts(shards, item.number).splits
        for split, begun in before.items():
            ends = (begun[0] + counts[split].documents, begun[1] + counts[split].tokens)
            if split not in places or (places[split].documents, places[split].tokens) != ends:
                raise _damaged(item.folder, f"shard {item.number} has other documents than were counted")
            for suffix in places[split].files:
                sync(item.folder / JOINED / f"{stem(source, split)}{suffix}")
    item.publish(token, b"")


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(
        what, where=str(folder), rule="a file of the folder has changed since", fix="delete the folder to start over"
    )


def collect(
    part: Path, shards: Shards, log: Callable[[str], None]
) -> tuple[list[SourceRecord], dict[Split, HeldOut], list[ChatCounts]]:
    """Write what is left of a folder whose tokens have been placed; the files of tokens get second names in it.

    Returns:
        What `write.write` returns.

    Raises:
        UserError: a source keeps nothing for training, or has too many damaged files.
    """
    tallies = [Tally() for _ in shards.every]
    kept: dict[tuple[int, Split], Counter[str]] = {}
    samples = Samples(shards.spec.steps)
    for number, shard in enumerate(shards.shards):
        counts, tally = _read_counts(shards, number), tallies[shard.source]
        tally.read += counts.read
        tally.failure = tally.failure or counts.failure
        for total, more in zip(
            (tally.dropped, tally.rules, tally.changed), (counts.dropped, counts.rules, counts.changed), strict=True
        ):
            total.update(more)
        for split, each in counts.splits.items():
            kept.setdefault((shard.source, split), Counter()).update(each.model_dump())
        for reason, rule, excerpt in counts.samples:
            samples.add(shard.source, Dropped(reason, rule, excerpt))
    for number, source in enumerate(shards.every):
        require_readable(number, source, tallies[number], shards.spec.steps.max_unreadable)
    by_split = {key: Counts(**counts) for key, counts in kept.items()}
    reasons = shards.spec.steps.reasons
    records = [record(n, source, tallies[n], reasons, by_split, []) for n, source in enumerate(shards.every)]
    for published in records:
        log(summary(published))
    samples.write(part / SAMPLES, [sources.label(source) for source in shards.every])
    for file in sorted((shards.folder / JOINED).iterdir()):
        os.link(file, part / file.name)
    held_out: dict[Split, HeldOut] = {}
    layout = _read_layout(shards.folder)
    for split, sizes in layout.texts.items():
        file = part / held_out_name(split)
        with file.open("wb") as stream:
            for number, (of_member, _) in enumerate(layout.members):
                if of_member == split:
                    stream.write(_Item(shards.folder, "packed", number).file.read_bytes())
        held_out[split] = HeldOut(bytes=sum(sizes), gzip_bytes=file.stat().st_size)
    return records, held_out, []
