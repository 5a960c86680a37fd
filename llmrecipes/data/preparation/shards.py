"""Shards: parts of the sources, each encoded to one file, from which the prepared folder is written.

A shard's file has the outcome of every document before documents are compared with each other. Duplicates, `max_tokens`
and the order are decided when shards are joined (`join`). So the prepared folder does not depend on how the sources are
cut, nor on who encoded what.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from errno import ENOENT
from pathlib import Path
from typing import NamedTuple

import numpy as np

import llmrecipes
from llmrecipes.data.folder.data_manifest import Record, TokenizerRecord
from llmrecipes.data.preparation.corpus import EncoderSpec, Worked, batches_of, encode_all
from llmrecipes.data.preparation.executor import Executor, ThisProcess
from llmrecipes.data.preparation.shard_files import (
    ShardReading,
    damaged,
    dumped,
    framed,
    part_of,
    publish,
    read,
    unframed,
)
from llmrecipes.data.sources import file_parts, sources
from llmrecipes.data.sources.file_parts import FilePart, can_cut, size_of
from llmrecipes.data.steps.split import DIGEST_BYTES
from llmrecipes.data.steps.steps import DUPLICATES, Document
from llmrecipes.data.tokens.gigatoken import Gigatoken
from llmrecipes.errors import UserError
from llmrecipes.io import sync
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import GIB

PLAN = "plan.json"
_REQUIRED = ".required"
_END = ".end"
_CUT = ".cut"
KEY_BYTES = {"digests": DIGEST_BYTES, "marks": 16}
"""Of what is compared for equality; the marks are those of `copies.Duplicates` without spans."""
MOST_RANGES = 256
"""Of digests. Each has 60 million of 15 billion documents, which take some 8 GB to sort."""
_LATE_SECONDS = 120.0
"""Network file systems cache what is in a folder for up to 60 s."""
_CHANGED = "delete the folder to start over"


class Shard(Record):
    """Files of a source, by their places in its list, or a range of bytes of one; without places all documents of a
    source that is not read by files."""

    source: int
    first: int | None = None
    last: int | None = None
    begin: int = 0
    end: int | None = None

    def parts(self, source: Source) -> list[FilePart] | None:
        """What is read of the source; None: all of it."""
        if self.first is None:
            return None
        return [FilePart(file, self.begin, self.end) for file in sources.files(source)[self.first : self.last]]


class End(Record):
    """Where a source with `max_tokens` ends: in a shard, behind so many of the documents that were read and so many of
    those that are compared. Without a shard, it has fewer tokens."""

    source: int
    shard: int | None = None
    read: int = 0
    compared: int = 0


class ShardPlan(Record):
    """What all workers agree upon before they begin: version, tokenizer, files and shards."""

    version: str
    dtype: str
    tokenizer: TokenizerRecord
    listings: list[str | None]
    shards: list[Shard]


def plan(recipe_sources: tuple[Source, ...], dtype: str, tokenizer: TokenizerRecord) -> ShardPlan:
    """What all workers agree upon, for these sources."""
    return ShardPlan(
        version=llmrecipes.__version__,
        dtype=dtype,
        tokenizer=tokenizer,
        listings=_listings(recipe_sources),
        shards=cut(recipe_sources),
    )


def cut(recipe_sources: tuple[Source, ...]) -> list[Shard]:
    """Cut the sources into shards, in their order: files up to `parts.part_bytes`, or a part of a larger one."""
    shards: list[Shard] = []
    for number, source in enumerate(recipe_sources):
        if source.tokenized:  # read by who joins the shards
            continue
        if not sources.by_file(source):
            shards.append(Shard(source=number))
            continue
        growing = False
        size = 0
        files = sources.files(source)
        most = file_parts.part_bytes(files)
        for place, file in enumerate(files):
            length = size_of(file)
            for part in file_parts.parts_of(source.type, [file], most):
                if growing and part.end is None and size + length <= most:
                    shards[-1], size = shards[-1].model_copy(update={"last": place + 1}), size + length
                    continue
                shards.append(Shard(source=number, first=place, last=place + 1, begin=part.begin, end=part.end))
                growing = part.end is None
                size = length
    return shards


def uncut(recipe_sources: tuple[Source, ...]) -> Iterator[str]:
    """A line for each source of which one worker reads more than a shard should have."""
    for source in recipe_sources:
        if source.type == "hub" and not sources.by_file(source):
            yield f"{sources.label(source)}: one shard, read by one worker"
        if not sources.by_file(source):
            continue
        files = sources.files(source)
        most = file_parts.part_bytes(files)
        whole = [file for file in files if size_of(file) > most and not can_cut(source.type, file)]
        if whole:
            largest = max(whole, key=size_of)
            yield (
                f"{sources.label(source)}: large files that cannot be split, each read by one worker: {len(whole):,}; "
                f"the largest, {largest.name}, has {size_of(largest) / GIB:.1f} GiB"
            )


def read_plan(folder: Path, recipe_sources: tuple[Source, ...]) -> ShardPlan:
    """The plan of a folder of shards.

    Raises:
        UserError: it is of another version, or the sources have changed since.
    """
    stored = ShardPlan.model_validate_json((folder / PLAN).read_text(encoding="utf-8"))
    if stored.version != llmrecipes.__version__:
        raise UserError(
            f"started by llmrecipes {stored.version}, this is {llmrecipes.__version__}", where=str(folder), fix=_CHANGED
        )
    for source, then, now in zip(recipe_sources, stored.listings, _listings(recipe_sources), strict=True):
        if then != now:
            raise UserError(
                f"source {sources.label(source)!r} has other files than when this was started",
                where=str(folder),
                rule="all workers must read the same files",
                fix=f"use the same files on every node, or {_CHANGED}",
            )
    return stored


def _listings(recipe_sources: tuple[Source, ...]) -> list[str | None]:
    listed = map(sources.listing, recipe_sources)
    return [None if shard is None else shard.sha256 for shard in listed]


class Done(NamedTuple):
    """A shard that is published: its file, its tokens, and whether it has all documents, or ends behind those that its
    source was required to have."""

    file: Path
    tokens: int
    whole: bool


@dataclass(frozen=True)
class Shards:
    """The shards of a recipe, in a folder that all workers share.

    Args:
        folder: folder of plan, tokenizer and shards.
        every: sources, by number.
        chat: the documents are conversations.
        ending: number of a source with `max_tokens` of which the end is looked for; None: all ends are known.
        first: how many are joined; None: all.
        required: tokens of that source that they were required to have then.
        ends: those of the sources before, by number.
    """

    folder: Path
    every: tuple[Source, ...]
    spec: EncoderSpec
    shards: tuple[Shard, ...]
    chat: Chat | None = None
    ending: int | None = None
    first: int | None = None
    required: int = 0
    ends: Mapping[int, End] = field(default_factory=dict)

    @property
    def comparable(self) -> bool:
        """Whether documents are compared by ranges of their digests and marks: what happens to one does not depend on
        which others are kept."""
        return self.spec.steps.shareable

    @property
    def ranges(self) -> int:
        """Into how many parts digests are divided to be compared."""
        return min(MOST_RANGES, len(self.shards))

    @property
    def final(self) -> bool:
        """Whether all sources are joined: the end of the last one may be looked for."""
        return self.ending is None or self.ending == max(shard.source for shard in self.shards)

    @property
    def joined(self) -> tuple[Shard, ...]:
        """Those that are joined. Of some of them no document is used (`end`)."""
        return self.shards[: self.first]

    @property
    def joining(self) -> Path:
        """The folder of the files that are made to join them."""
        if self.ending is None:
            return self.folder
        return self.folder / f"first-{self.first}-{self.required}"

    def end(self, number: int) -> End | None:
        """How much of a shard is used, if its source ends in it or before; None: all."""
        end = self.ends.get(self.shards[number].source)
        if end is None or end.shard is None or number < end.shard:
            return None
        return end if number == end.shard else End(source=end.source)

    def used(self) -> Shards | None:
        """These, joined up to the first with which the next source whose end is not known has the tokens that are
        required; None if that is not encoded yet, because more are required since."""
        ends = {end.source: end for end in map(_end_of, self.folder.glob(f"first-*/*{_END}"))}
        known = replace(self, ends=ends)
        limited = (n for n, of in enumerate(self.every) if of.max_tokens is not None and not of.tokenized)
        ending = next((n for n in limited if n not in ends), None)
        if ending is None:
            return known
        most = self._required()[ending] or 0
        tokens = 0
        done = self.published()
        for number, shard in enumerate(self.shards):
            if tokens >= most or shard.source > ending:
                break
            if (end := known.end(number)) is not None and not end.read:
                continue
            if number not in done:
                return None
            if shard.source == ending:
                tokens += done[number].tokens
                if tokens < most and not done[number].whole:
                    return None
        else:
            number = len(self.shards)
        using = replace(known, ending=ending, first=number, required=most)
        using.joining.mkdir(exist_ok=True)
        return using

    def require(self, source: int, tokens: int) -> None:
        """Let a source have so many tokens before documents are compared."""
        (self.folder / f"{source}-{tokens}{_REQUIRED}").touch()

    def _required(self) -> list[int | None]:
        """Tokens that the shards of each source have to have; None: all of them are needed."""
        required = [source.max_tokens for source in self.every]
        for path in self.folder.glob(f"*{_REQUIRED}"):
            source, tokens = map(int, path.stem.split("-"))
            required[source] = max(required[source] or 0, tokens)
        return required

    def published(self) -> dict[int, Done]:
        """The shards that are published, by number."""
        done = dict[int, Done]()
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".shard")]
        for name in names:
            number, tokens, *cut = name.removesuffix(".shard").split(".")
            shard = Done(self.folder / name, int(tokens), not cut)
            if int(number) not in done or done[int(number)].tokens < shard.tokens or shard.whole:
                done[int(number)] = shard
        return done

    def _file(self, number: int) -> Path:
        """File of a published shard; a network file system may show one of another machine later."""
        waited = time.monotonic() + _LATE_SECONDS
        while number not in (done := self.published()):
            if time.monotonic() > waited:
                raise OSError(ENOENT, "a shard that was published is not there", str(self.folder / f"{number:06d}"))
            time.sleep(1)
        return done[number].file

    def needed(self) -> list[int]:
        """Numbers of the shards to encode: those that are missing, of a source with `max_tokens` only until the ones
        before them have as many tokens, or as many as it takes so that they are kept (`require`)."""
        done = self.published()
        missing = list[int]()
        tokens = [0 for _ in self.every]
        required = self._required()
        for number, shard in enumerate(self.shards):
            most = required[shard.source]
            enough = most is not None and tokens[shard.source] + (done[number].tokens if number in done else 0) >= most
            if number in done and (done[number].whole or enough):
                tokens[shard.source] += done[number].tokens
            elif most is None or tokens[shard.source] < most:
                missing.append(number)
        return missing

    def missing(self) -> Iterator[int]:
        """Numbers of the shards that must still be encoded, each once; with `max_tokens`, decided again after each."""
        if all(source.max_tokens is None for source in self.every):
            yield from self.needed()
            return
        begun = set[int]()
        while (number := next((number for number in self.needed() if number not in begun), None)) is not None:
            begun.add(number)
            yield number

    def _limit(self, number: int) -> int | None:
        """Tokens behind which a shard may end, because its source has enough; None: it has all documents."""
        source = self.shards[number].source
        if (most := self._required()[source]) is None:
            return None
        done = self.published()
        before = [n for n in range(number) if self.shards[n].source == source]
        return most - sum(done[n].tokens for n in before) if all(n in done for n in before) else most

    def work(
        self,
        number: int,
        executor: Executor | None = None,
        report: Callable[[ShardReading], None] = lambda reading: None,
    ) -> ShardReading:
        """Encode a shard and publish it.

        Args:
            number: of the shard.
            executor: encodes its batches; None: this process.
            report: receives what was read, batch by batch.

        Raises:
            UserError: it cannot be read.
            OSError: it cannot be written.
        """
        part = part_of(self.folder / f"{number:06d}")
        differences = Gigatoken.differences
        executor = executor or ThisProcess()
        try:
            encoded = self._encode(number, part, executor, report)
            if Gigatoken.differences > differences:  # what was encoded before the difference may have others
                encoded = self._encode(number, part, executor, report)
            reading, whole, keys = encoded
            for kind, of_kind in zip(self.kinds, keys, strict=True):  # before the shard, which says that they are there
                publish(self._keys(number, kind), [self._by_range(of_kind, KEY_BYTES[kind])])
            file = self.folder / f"{number:06d}.{reading.tokens}{'' if whole else _CUT}.shard"
            sync(part)
            part.rename(file)
            for shorter in self.folder.glob(f"{number:06d}.*{_CUT}.shard"):
                if shorter != file:
                    shorter.unlink(missing_ok=True)
            sync(self.folder)
            return reading
        finally:
            part.unlink(missing_ok=True)

    def _encode(
        self,
        number: int,
        part: Path,
        executor: Executor,
        report: Callable[[ShardReading], None],
    ) -> tuple[ShardReading, bool, list[list[bytes]]]:
        """Encode a shard to a file. What was read, whether that was all, and what is compared of its documents by
        kind."""
        shard = self.shards[number]
        source = self.every[shard.source]
        limit = self._limit(number)
        skip = self.spec.steps.max_unreadable > 0
        every = ShardReading(shard.source)
        whole = True
        keys = [list[bytes]() for _ in self.kinds]
        batches = batches_of(shard.source, sources.documents(source, self.chat, shard.parts(source), skip=skip))
        with part.open("wb") as file, closing(encode_all(batches, self.spec, executor)) as encoded:
            for worked in encoded:
                every.add(worked)
                report(ShardReading(shard.source).add(worked))
                for document in (outcome for outcome in worked.outcomes if isinstance(outcome, Document)):
                    for of_kind, key in zip(keys, (document.digest, *document.marks), strict=False):
                        of_kind.append(key)
                file.write(framed(*dumped(worked)))
                if limit is not None and every.tokens >= limit:
                    whole = False
                    break
            file.write(framed(b"", b""))
        return every, whole, keys

    @property
    def kinds(self) -> tuple[str, ...]:
        """What of documents is compared for equality: their digests, and the marks of `duplicates`, which are the first
        of a document; nothing if what happens to one depends on which others are kept."""
        if not self.comparable:
            return ()
        names = {name for name, _, _ in self.spec.steps.comparisons}
        return ("digests", "marks") if DUPLICATES in names else ("digests",)

    def _keys(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:06d}.{kind}"

    def _by_range(self, all_keys: list[bytes], width: int) -> bytes:
        """Where the ranges begin and end, and of each the keys and their places in the shard, with a SHA-256."""
        keys = np.frombuffer(b"".join(all_keys), np.uint8).reshape(-1, width)
        of_range = (keys[:, 0].astype(np.int64) * 256 + keys[:, 1]) * self.ranges >> 16
        parts = []
        for number in range(self.ranges):
            places = np.flatnonzero(of_range == number).astype("<i8")
            parts.append(framed(places.tobytes(), keys[places].tobytes()))
        ends = np.cumsum([8 * (self.ranges + 1), *map(len, parts)], dtype="<i8")
        return ends.tobytes() + b"".join(parts)

    def keys(self, number: int, of_range: int, kind: str = "digests") -> tuple[np.ndarray, np.ndarray]:
        """The keys [n, 32 or 16] of a shard's documents in a range, and their places in the shard [n], ascending; only
        of documents that are used.

        Raises:
            UserError: the file is not what was written.
        """
        end = self.end(number)
        if end is not None and not end.read:
            return np.empty((0, KEY_BYTES[kind]), np.uint8), np.empty(0, "<i8")
        file = self._keys(number, kind)
        with file.open("rb") as stream:
            stream.seek(8 * of_range)
            bounds = np.frombuffer(stream.read(16), "<i8")
            size = file.stat().st_size
            content = b""
            if len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= size:
                stream.seek(int(bounds[0]))
                content = stream.read(int(bounds[1] - bounds[0]))
        places, keys = unframed(
            content, damaged(file, f"the {kind} of a shard are damaged", "delete it and the .shard of the same number")
        )
        all_keys = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES[kind])
        where = np.frombuffer(places, "<i8")
        used = len(where) if end is None else int(np.searchsorted(where, end.compared))
        return all_keys[:used], where[:used]

    def digests(self) -> set[bytes]:
        """Digests of all documents that are used, kept or not."""
        every = set[bytes]()
        for number in range(len(self.joined)):
            for of_range in range(self.ranges):
                every.update(map(bytes, self.keys(number, of_range)[0]))
        return every

    def batches(self, number: int, *, ids: bool = True) -> Iterator[Worked]:
        """The batches of a shard that is published, as far as it is used; without ids, their hashes are not checked.

        Raises:
            UserError: the file is not what was written.
        """
        end = self.end(number)
        if end is not None and not end.read:
            return
        left = None if end is None else end.read
        for worked in read(self._file(number), self.shards[number].source, ids=ids):
            yield worked if left is None else worked.first(left)
            left = None if left is None else left - len(worked.outcomes)
            if left is not None and left <= 0:
                return


def _end_of(file: Path) -> End:
    return End.model_validate_json(file.read_bytes())
