"""Joining shards: the files of a prepared folder, each item writing its bytes of them.

The stages of `compare` and four others follow the encoding. Their items are published as shards are; a stage begins
when nothing of the one before is missing (`pipeline`).

1. `repeats`, `bands`, `near`, or `decided`: which documents are dropped.
2. `counts`, an item a shard: what is kept of it. Its ids are not read.
3. `layout`, one item: where the shards begin, by prefix sums, and the files, in their sizes.
4. `packed`, an item 64 MiB of held-out text: a member of a gzip file.
5. `placed`, an item a shard: its tokens, lengths and digests, written where they belong, and synced.

A source with `max_tokens` ends before those behind it are compared, one after the other: as many of its shards as have
these tokens are compared and counted, with all before it. If comparing leaves fewer, more shards are encoded, and the
stages up to `counts` begin again, in another folder; what happens to a document stays the same, because only earlier
ones matter. One item, `end`, finds the shard in which there are enough, and counts it again up to that document; what
is behind it is seen by no stage. Where the last source ends is found by `layout`.

Every item has the same bytes whoever makes it, so one that is made twice changes nothing.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from pydantic import Field

from llmrecipes.data.folder.data_manifest import (
    IDX_DTYPES,
    IDX_HEADER,
    IDX_MAGIC,
    ChatCounts,
    Counts,
    Record,
    stem,
)
from llmrecipes.data.folder.prepared import HeldOutSplit
from llmrecipes.data.preparation.corpus import Tally
from llmrecipes.data.preparation.repeated_documents import Item, judge
from llmrecipes.data.preparation.shard_files import part_of
from llmrecipes.data.preparation.shards import End, Shards
from llmrecipes.data.preparation.write import MEMBER_BYTES, DocumentSink, compressed
from llmrecipes.data.read.curriculum import SUFFIX as SCORES
from llmrecipes.data.steps.split import DIGEST_BYTES, SPLITS, Split
from llmrecipes.data.steps.steps import UNREADABLE, Document
from llmrecipes.errors import UserError
from llmrecipes.io import sync

JOINED = "joined"
"""Folder, among the shards, of the files that are placed."""


class ShardCounts(Record):
    """What is kept of a shard, and what is dropped."""

    splits: dict[Split, Counts]
    tally: Tally
    samples: list[tuple[str, str, str]]
    texts: list[HeldOutSplit] = Field(default_factory=list)
    """Splits whose text is in a file of the shard."""
    talks: ChatCounts = ChatCounts()
    """Of conversations."""


class ShardOffsets(Record):
    """Documents and tokens in front of each shard, in the files of its source; and of all, by file name. Of each
    held-out split the bytes of text of each shard."""

    before: list[dict[Split, tuple[int, int]]]
    every: dict[str, tuple[int, int]]
    texts: dict[HeldOutSplit, list[int]]
    room: int | None = None
    """Tokens that are used of the last shard in `before`; None: all."""

    @property
    def members(self) -> list[tuple[HeldOutSplit, int]]:
        """Members of gzip files: split, and the byte of its text at which one begins."""
        return [(split, at) for split, sizes in self.texts.items() for at in range(0, sum(sizes), MEMBER_BYTES)]


def kept_tokens(shards: Shards) -> list[int]:
    """Kept tokens in each shard, of the source whose end is looked for."""

    def kept(number: int) -> int:
        return sum(of_split.tokens for of_split in read_item(Item(shards.joining, "counts", number)).splits.values())

    return [kept(number) if shard.source == shards.ending else 0 for number, shard in enumerate(shards.joined)]


def _last(shards: Shards) -> tuple[int, int] | None:
    """The shard in which a source ends, and the tokens that are used of it; None if it has fewer in all."""
    most = shards.every[shards.ending].max_tokens if shards.ending is not None else None
    sums = list(accumulate(kept_tokens(shards))) if most is not None else []
    if most is None or sums[-1] < most:
        return None
    number = next(number for number, kept in enumerate(sums) if kept >= most)
    return number, most - (sums[number - 1] if number else 0)


def find_end(shards: Shards, item: Item) -> None:
    end = End(source=shards.ending or 0)
    last = _last(shards)
    if last is not None:
        number, room = last
        cut = Item(item.folder, f"counts{_CUT}", number)
        compared = 0
        count_shard(shards, cut, room, _CUT)
        counts = read_item(cut)
        read = left = counts.tally.read + counts.tally.dropped[UNREADABLE]
        for worked in shards.batches(number, ids=False):
            compared += sum(isinstance(outcome, Document) for outcome in worked.outcomes[:left])
            if (left := left - len(worked.outcomes)) <= 0:
                break
        end = End(source=end.source, shard=number, read=read, compared=compared)
    item.publish(end.model_dump_json().encode())


def members(shards: Shards) -> int:
    return len(read_layout(shards.joining).members)


@dataclass
class _Counted:
    """The kept documents of a split, as numbers."""

    documents: int = 0
    tokens: int = 0
    size: int = 0

    def add(self, document: Document, length: int, ids: np.ndarray, answers: bytes) -> None:
        """The next one."""
        self.documents, self.tokens, self.size = self.documents + 1, self.tokens + length, self.size + document.size


_ANSWERS = ".answers"
_CUT = "-cut"
"""Behind the name of what is counted of a shard up to the end of `max_tokens`."""


def used_item(shards: Shards, stage: str, number: int) -> Item:
    """What was counted of a shard, as far as it is used."""
    cut = Item(shards.joining, f"{stage}{_CUT}", number)
    return cut if shards.ending is not None and cut.file.exists() else Item(shards.joining, stage, number)


def count_shard(shards: Shards, item: Item, room: int | None = None, suffix: str = "") -> None:
    if not shards.final and shards.shards[item.number].source != shards.ending:  # all that is asked is an end
        item.publish()
        return
    added, talks = 0, ChatCounts()
    parts: dict[Split, _Counted] = {}
    texts: dict[HeldOutSplit, bytearray] = {}
    tally = Tally()
    output = DocumentSink(
        shards.spec,
        judge(shards, item.number),
        lambda _, split: parts.setdefault(split, _Counted()),
        lambda split, text: texts.setdefault(split, bytearray()).extend(text),
    )
    for worked in shards.batches(item.number, ids=False):
        if room is not None and added >= room:
            break
        of_batch = output.add(worked, None if room is None else room - added, tally)
        added = added + of_batch.tokens
        talks = of_batch.talks_with(talks)
    for split, text in texts.items():
        Item(item.folder, f"{split}{suffix}", item.number).publish(bytes(text))
    counts = ShardCounts(
        splits={
            split: Counts(documents=part.documents, tokens=part.tokens, bytes=part.size)
            for split, part in parts.items()
        },
        tally=tally,
        samples=[(sample.reason, sample.rule, sample.excerpt) for sample in output.samples.kept()],
        texts=list(texts),
        talks=talks,
    )
    item.publish(counts.model_dump_json().encode())


def read_counts(shards: Shards, number: int) -> ShardCounts:
    return read_item(used_item(shards, "counts", number))


def read_item(counts: Item) -> ShardCounts:
    return ShardCounts.model_validate_json(counts.file.read_bytes())


def lay_out(shards: Shards, item: Item) -> None:
    before: list[dict[Split, tuple[int, int]]] = []
    bounds: dict[str, tuple[int, int]] = {}
    texts: dict[HeldOutSplit, list[int]] = {}
    used = len(shards.joined)
    room = None
    if (last := _last(shards)) is not None:
        number, room = last
        used = number + 1
        count_shard(shards, Item(item.folder, f"counts{_CUT}", number), room, _CUT)
    for number, shard in enumerate(shards.joined[:used]):
        before.append({})
        of_shard = read_counts(shards, number)
        for held_out in of_shard.texts:
            sizes = texts.setdefault(held_out, [0] * used)
            sizes[number] = used_item(shards, held_out, number).file.stat().st_size
        for split, counts in of_shard.splits.items():
            name = stem(shard.source, split)
            documents, tokens = before[-1][split] = bounds.get(name, (0, 0))
            bounds[name] = (documents + counts.documents, tokens + counts.tokens)
    folder = item.folder / JOINED
    temporary = part_of(folder)
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
            if shards.chat is not None:
                of_file[_ANSWERS] = tokens
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
    item.publish(ShardOffsets(before=before, every=bounds, texts=texts, room=room).model_dump_json().encode())


def read_layout(folder: Path) -> ShardOffsets:
    file = Item(folder, "layout", 0).file
    return _parsed_layout(file, file.stat().st_mtime_ns)


@cache
def _parsed_layout(file: Path, modified: int) -> ShardOffsets:
    return ShardOffsets.model_validate_json(file.read_bytes())


def pack(shards: Shards, item: Item) -> None:
    layout = read_layout(item.folder)
    split, begin = layout.members[item.number]
    text, at = bytearray(), 0
    for number, size in enumerate(layout.texts[split]):
        first, last = max(begin, at), min(begin + MEMBER_BYTES, at + size)
        if first < last:
            with used_item(shards, split, number).file.open("rb") as stream:
                stream.seek(first - at)
                text += stream.read(last - first)
        at += size
    if len(text) != min(MEMBER_BYTES, at - begin):
        raise _damaged(item.folder, f"the held-out texts of {split} have become shorter")
    item.publish(compressed(text))


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
    answers: list[bytes] = field(default_factory=list)

    def add(self, document: Document, length: int, ids: np.ndarray, answers: bytes) -> None:
        """The next one."""
        self.ids.append(ids.tobytes())
        self.lengths.append(length)
        self.digests.append(document.digest)
        self.scores.append(document.score)
        self.answers.append(answers)

    def flush(self) -> None:
        """Write them."""
        lengths = np.array(self.lengths, "<i8")
        ends = self.tokens + np.cumsum(lengths)
        _write_at(self.files[".bin"], b"".join(self.ids), self.tokens * self.itemsize)
        _write_at(self.files[".sha256"], b"".join(self.digests), self.documents * DIGEST_BYTES)
        if SCORES in self.files:
            _write_at(self.files[SCORES], np.array(self.scores, "<f4").tobytes(), self.documents * 4)
        if _ANSWERS in self.files:
            _write_at(self.files[_ANSWERS], b"".join(self.answers), self.tokens)
        index = self.files[".idx"]
        start = IDX_HEADER.size
        _write_at(index, lengths.astype("<i4").tobytes(), start + 4 * self.documents)
        start += 4 * self.every
        _write_at(index, ((ends - lengths) * self.itemsize).astype("<i8").tobytes(), start + 8 * self.documents)
        start += 8 * self.every
        numbers = np.arange(self.documents + 1, self.documents + 1 + len(lengths), dtype="<i8")
        _write_at(index, numbers.tobytes(), start + 8 * (self.documents + 1))
        self.documents, self.tokens = self.documents + len(lengths), self.tokens + int(lengths.sum())
        self.ids = []
        self.lengths = []
        self.digests = []
        self.scores = []
        self.answers = []


def _write_at(file: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset = offset + written


def place_shard(shards: Shards, item: Item) -> None:
    layout = read_layout(item.folder)
    source = shards.shards[item.number].source
    if item.number >= len(layout.before):  # behind the end
        item.publish()
        return
    before = layout.before[item.number]
    with ExitStack() as stack:

        def opened(_: int, split: Split) -> _Place:
            name = stem(source, split)
            files = dict[str, int]()
            more = (*([SCORES] if shards.spec.scored(split) else []), *([_ANSWERS] if shards.chat is not None else []))
            for suffix in (".bin", ".idx", ".sha256", *more):
                files[suffix] = os.open(item.folder / JOINED / f"{name}{suffix}", os.O_WRONLY)
                stack.callback(os.close, files[suffix])
            itemsize = np.dtype(shards.spec.dtype).itemsize
            places[split] = _Place(*before[split], itemsize, layout.every[name][0], files)
            return places[split]

        places: dict[Split, _Place] = {}
        room = layout.room if item.number + 1 == len(layout.before) else None
        added = 0
        output = DocumentSink(shards.spec, judge(shards, item.number), opened, lambda split, text: None)
        for worked in shards.batches(item.number):
            if room is not None and added >= room:
                break
            added += output.add(worked, None if room is None else room - added, Tally()).tokens
            for each in places.values():
                each.flush()
        counts = read_counts(shards, item.number).splits
        for split, begun in before.items():
            ends = (begun[0] + counts[split].documents, begun[1] + counts[split].tokens)
            if split not in places or (places[split].documents, places[split].tokens) != ends:
                raise _damaged(item.folder, f"shard {item.number} no longer has the documents that were counted")
            for suffix in places[split].files:
                sync(item.folder / JOINED / f"{stem(source, split)}{suffix}")
    item.publish(b"")


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(
        what, where=str(folder), rule="its files must not change meanwhile", fix="delete the folder to start over"
    )
