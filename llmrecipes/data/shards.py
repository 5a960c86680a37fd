"""Shards: parts of the sources, each encoded by one task to one file, from which the prepared folder is written.

A shard's file has the outcome of every document before documents are compared with each other. Duplicates, `max_tokens`
and the order are left to who joins the shards: all tasks (`join`), or one process that does what `prepare` does without
tasks. So the prepared folder does not depend on how the sources are cut, nor on who encoded what.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import llmrecipes
from llmrecipes.data import parts, sources
from llmrecipes.data.chat import Conversations
from llmrecipes.data.corpus import EncoderSpec, Worked, batches_of, encode_all
from llmrecipes.data.encode import Encoded
from llmrecipes.data.gigatoken import Gigatoken
from llmrecipes.data.manifest import Record, TokenizerRecord
from llmrecipes.data.parts import Part
from llmrecipes.data.split import DIGEST_BYTES
from llmrecipes.data.steps import DUPLICATES, Document, Dropped, StepSpec
from llmrecipes.errors import UserError
from llmrecipes.io import sync
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import GIB

PLAN, _REQUIRED = "plan.json", ".required"
KEY_BYTES = {"digests": DIGEST_BYTES, "marks": 16}
"""Of what is compared for equality; the marks are those of `copies.Duplicates` without spans."""
MOST_RANGES = 256
"""Of digests. Each has 60 million of 15 billion documents, which take some 8 GB to sort."""
_CHANGED = "delete the folder to start over"
_FRAME = struct.Struct("<QQ32s")


class Shard(Record):
    """Files of a source, by their places in its list, or a range of bytes of one; without places all documents of a
    source that is not read by files."""

    source: int
    first: int | None = None
    last: int | None = None
    begin: int = 0
    end: int | None = None

    def parts(self, source: Source) -> list[Part] | None:
        """What is read of the source; None: all of it."""
        if self.first is None:
            return None
        return [Part(file, self.begin, self.end) for file in sources.files(source)[self.first : self.last]]


class Plan(Record):
    """What all tasks agree upon before they begin: version, tokenizer, files and shards."""

    version: str
    dtype: str
    tokenizer: TokenizerRecord
    listings: list[str | None]
    shards: list[Shard]


def plan(recipe_sources: tuple[Source, ...], dtype: str, tokenizer: TokenizerRecord) -> Plan:
    """What all tasks agree upon, for these sources."""
    return Plan(
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
        growing, size, files = False, 0, sources.files(source)
        most = parts.part_bytes(files)
        for place, file in enumerate(files):
            length = parts.size_of(file)
            for part in parts.parts_of(source.type, [file], most):
                if growing and part.end is None and size + length <= most:
                    shards[-1], size = shards[-1].model_copy(update={"last": place + 1}), size + length
                    continue
                shards.append(Shard(source=number, first=place, last=place + 1, begin=part.begin, end=part.end))
                growing, size = part.end is None, length
    return shards


def uncut(recipe_sources: tuple[Source, ...]) -> Iterator[str]:
    """A line for each source of which one task reads more than a shard should have."""
    for source in recipe_sources:
        if source.type == "hub" and not sources.by_file(source):
            yield f"{sources.label(source)}: one shard, read by one task"
        if not sources.by_file(source):
            continue
        files = sources.files(source)
        most = parts.part_bytes(files)
        whole = [file for file in files if parts.size_of(file) > most and not parts.can_cut(source.type, file)]
        if whole:
            largest = max(whole, key=parts.size_of)
            yield (
                f"{sources.label(source)}: large files that cannot be cut, each read by one task: {len(whole):,}; "
                f"the largest, {largest.name}, has {parts.size_of(largest) / GIB:.1f} GiB"
            )


def can_join(recipe_sources: tuple[Source, ...], chat: Chat | None, steps: StepSpec) -> bool:
    """Whether several tasks can join the shards: what happens to a document does not depend on which others are kept,
    and all sources have texts, of which only the last may have `max_tokens`: what is behind the end of it is seen by no
    other document."""
    return (
        chat is None
        and steps.shareable
        and not any(source.tokenized for source in recipe_sources)
        and all(source.max_tokens is None for source in recipe_sources[:-1])
    )


def read_plan(folder: Path, recipe_sources: tuple[Source, ...]) -> Plan:
    """The plan of a folder of shards.

    Raises:
        UserError: it is of another version, or the sources have changed since.
    """
    stored = Plan.model_validate_json((folder / PLAN).read_text(encoding="utf-8"))
    if stored.version != llmrecipes.__version__:
        raise UserError(
            f"begun by llmrecipes {stored.version}, this is {llmrecipes.__version__}", where=str(folder), fix=_CHANGED
        )
    for source, then, now in zip(recipe_sources, stored.listings, _listings(recipe_sources), strict=True):
        if then != now:
            raise UserError(
                f"source {sources.label(source)!r} has other files than when this was begun",
                where=str(folder),
                rule="all tasks read the same files",
                fix=f"the same files on every node, or {_CHANGED}",
            )
    return stored


def _listings(recipe_sources: tuple[Source, ...]) -> list[str | None]:
    listed = map(sources.listing, recipe_sources)
    return [None if shard is None else shard.sha256 for shard in listed]


@dataclass(frozen=True)
class Shards:
    """The shards of a recipe, in a folder that all tasks share.

    Args:
        folder: of plan, tokenizer and shards.
        every: sources, by number.
        chat: the documents are conversations.
        first: how many are joined; None: all.
    """

    folder: Path
    every: tuple[Source, ...]
    spec: EncoderSpec
    shards: tuple[Shard, ...]
    chat: Chat | None = None
    first: int | None = None

    @property
    def parallel(self) -> bool:
        """Whether several tasks can join the shards."""
        return can_join(self.every, self.chat, self.spec.steps)

    @property
    def ranges(self) -> int:
        """Into how many parts digests are divided to be compared."""
        return min(MOST_RANGES, len(self.shards))

    @property
    def limited(self) -> bool:
        """Whether the last source has `max_tokens`, so that perhaps not all shards are needed."""
        return self.every[-1].max_tokens is not None

    @property
    def joined(self) -> tuple[Shard, ...]:
        """Those that are joined."""
        return self.shards[: self.first]

    @property
    def joining(self) -> Path:
        """The folder of the files that are made to join them."""
        return self.folder / f"first-{self.first}" if self.limited else self.folder

    def used(self) -> Shards | None:
        """These, joined up to the first with which the last source has the tokens that are required; None if that is
        not encoded yet, because more are required since.

        Raises:
            FileNotFoundError: they are deleted, because the data is published.
        """
        last, tokens, done = len(self.every) - 1, 0, self.published()
        if (most := self._required(last)) is None:
            return self
        for number, shard in enumerate(self.shards):
            if tokens >= most:
                break
            if number not in done:
                return None
            tokens += done[number][1] if shard.source == last else 0
        else:
            number = len(self.shards)
        using = replace(self, first=number)
        using.joining.mkdir(exist_ok=True)
        return using

    def require(self, tokens: int) -> None:
        """Let the last source have so many tokens before documents are compared."""
        (self.folder / f"{tokens}{_REQUIRED}").touch()

    def _required(self, source: int) -> int | None:
        """Tokens that the shards of a source have to have; None: all of them are needed."""
        most = self.every[source].max_tokens
        if most is None or source != len(self.every) - 1:
            return most
        return max([most, *(int(path.stem) for path in self.folder.glob(f"*{_REQUIRED}"))])

    def claim(self, number: int) -> Path:
        """The folder whose creation claims a shard; it has the lease."""
        return self.folder / f"{number:06d}.claim"

    def published(self) -> dict[int, tuple[Path, int]]:
        """File and tokens of the shards that are complete, by number."""
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".shard")]
        parts = (name.split(".") for name in names)
        return {int(number): (self.folder / f"{number}.{tokens}.shard", int(tokens)) for number, tokens, _ in parts}

    def needed(self) -> list[int]:
        """Numbers of the shards to encode: those that are missing, of a source with `max_tokens` only until the ones
        before them have as many tokens, or as many as it takes so that they are kept (`require`). None once the shards
        are deleted, because the data is published."""
        try:
            done, missing = self.published(), list[int]()
        except FileNotFoundError:
            return []
        tokens, required = [0 for _ in self.every], list(map(self._required, range(len(self.every))))
        for number, shard in enumerate(self.shards):
            most = required[shard.source]
            if number in done:
                tokens[shard.source] += done[number][1]
            elif most is None or tokens[shard.source] < most:
                missing.append(number)
        return missing

    def work(self, number: int, token: str, lost: Callable[[], bool] = lambda: False) -> None:
        """Encode a shard and publish it, if it is complete and `lost` is not true before.

        Raises:
            UserError: it cannot be read.
            OSError: it cannot be written.
        """
        part, differences = self.folder / f".{number:06d}-{token}.part", Gigatoken.differences
        try:
            encoded = self._encode(number, part, lost)
            if Gigatoken.differences > differences:  # what was encoded before the difference may have others
                encoded = self._encode(number, part, lost)
            if encoded is None:
                return
            tokens, keys = encoded
            if self.parallel:  # before the shard, which says that they are there
                for kind, of_kind in zip(self.kinds, keys, strict=True):
                    kept = self.folder / f".{number:06d}-{token}.{kind}.part"
                    publish(kept, self._keys(number, kind), [self._by_range(of_kind, KEY_BYTES[kind])])
            with suppress(FileNotFoundError):  # who has taken the shard over has removed the file
                sync(part)
                part.rename(self.folder / f"{number:06d}.{tokens}.shard")
            sync(self.folder)
        finally:
            part.unlink(missing_ok=True)

    def _encode(self, number: int, part: Path, lost: Callable[[], bool]) -> tuple[int, list[list[bytes]]] | None:
        """Encode a shard to a file. Its tokens, and what is compared of its documents by kind; None if it is lost."""
        shard = self.shards[number]
        source = self.every[shard.source]
        skip = self.spec.steps.max_unreadable > 0
        tokens, keys = 0, [list[bytes]() for _ in self.kinds]
        with part.open("wb") as file:
            reading = batches_of(shard.source, sources.documents(source, self.chat, shard.parts(source), skip=skip))
            for worked in encode_all(reading, self.spec, 1):
                if lost():
                    return None
                tokens += sum(worked.encoded.lengths)
                if self.parallel:
                    documents = [outcome for outcome in worked.outcomes if isinstance(outcome, Document)]
                    for document in documents:
                        for of_kind, key in zip(keys, (document.digest, *document.marks), strict=False):
                            of_kind.append(key)
                file.write(framed(*_dumped(worked)))
            file.write(framed(b"", b""))
        return tokens, keys

    @property
    def kinds(self) -> tuple[str, ...]:
        """What of documents is compared for equality: their digests, and the marks of `duplicates`, which are the first
        of a document."""
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
        """The keys [n, 32 or 16] of a shard's documents in a range, and their places in the shard [n], ascending.

        Raises:
            UserError: the file is not what was written.
        """
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
        return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES[kind]), np.frombuffer(places, "<i8")

    def batches(self, number: int, *, ids: bool = True) -> Iterator[Worked]:
        """The batches of a shard that is published; without ids, their hashes are not checked.

        Raises:
            UserError: the file is not what was written.
        """
        return _read(self.published()[number][0], self.shards[number].source, ids=ids)

    def worked(self, full: Collection[int], token: str) -> Generator[Worked, None, None]:
        """All batches in the order of the documents; one that `max_tokens` needs after all is encoded.

        Args:
            full: numbers of sources that are read no further; grows meanwhile.
            token: of this process.
        """
        done = self.published()
        for number, shard in enumerate(self.shards):
            if shard.source in full:
                continue
            if number not in done:
                self.work(number, token)
                done = self.published()
            for worked in _read(done[number][0], shard.source):
                if shard.source in full:
                    break
                yield worked


def publish(part: Path, file: Path, content: Iterable[bytes]) -> None:
    """Write a file under another name, and rename it when it is on disk; who takes the work over removes the part.
    Nothing is published if an error ends the content."""
    try:
        with part.open("wb") as stream:
            stream.writelines(content)
        with suppress(FileNotFoundError):
            sync(part)
            part.rename(file)
    finally:
        part.unlink(missing_ok=True)
    sync(file.parent)


def framed(header: bytes, body: bytes) -> bytes:
    """Their sizes and their SHA-256, and both."""
    return _FRAME.pack(len(header), len(body), hashlib.sha256(header + body).digest()) + header + body


def unframed(content: bytes, failure: UserError) -> tuple[bytes, bytes]:
    """Header and body of what `framed` made of them; raises the failure if they differ."""
    size = _FRAME.unpack(content[: _FRAME.size])[0] if len(content) >= _FRAME.size else 0
    header, body = content[_FRAME.size :][:size], content[_FRAME.size :][size:]
    if framed(header, body) != content:
        raise failure
    return header, body


def _dumped(worked: Worked) -> tuple[bytes, bytes]:
    """A batch as JSON and bytes: ids, answers, and digest, text and marks of each document."""
    encoded = worked.encoded
    outcomes: list[list[object]] = []
    answers = encoded.answers if isinstance(encoded, Conversations) else b""
    body = [encoded.ids, answers]
    for outcome in worked.outcomes:
        if isinstance(outcome, Dropped):
            outcomes.append([outcome.reason, outcome.rule, outcome.excerpt])
            continue
        sizes = [len(outcome.text), *map(len, outcome.marks)]
        score = [] if outcome.score is None else [outcome.score]
        outcomes.append([outcome.split, outcome.size, outcome.changed, outcome.excerpt, sizes, *score])
        body += [outcome.digest, outcome.text, *outcome.marks]
    header: dict[str, object] = {"ids": len(encoded.ids), "lengths": encoded.lengths, "outcomes": outcomes}
    if isinstance(encoded, Conversations):
        header["chat"] = {"answers": len(answers), "tallies": encoded.tallies, "refusal": encoded.refusal}
    return json.dumps(header).encode(), b"".join(body)


def _loaded(source: int, header: bytes, body: bytes, *, ids: bool = True) -> Worked:
    values, start = json.loads(header), 0

    def cut(size: int) -> bytes:
        nonlocal start
        start += size
        return body[start - size : start]

    tokens, chat = cut(values["ids"]) if ids else b"", values.get("chat")
    answers = cut(chat["answers"]) if chat else b""
    outcomes: list[Document | Dropped] = []
    for row in values["outcomes"]:
        if len(row) == len(("reason", "rule", "excerpt")):
            outcomes.append(Dropped(*row))
            continue
        split, size, changed, excerpt, (length, *marks), *score = row
        digest, text = cut(DIGEST_BYTES), cut(length)
        outcomes.append(Document(text, digest, split, size, tuple(changed), tuple(map(cut, marks)), excerpt, *score))
    lengths = values["lengths"]
    if chat:
        return Worked(source, outcomes, Conversations(tokens, lengths, answers, chat["tallies"], chat["refusal"]))
    return Worked(source, outcomes, Encoded(tokens, lengths))


def damaged(file: Path, what: str, fix: str) -> UserError:
    """For a file that is not what was written."""
    return UserError(what, where=str(file), rule="it has the SHA-256 of each of its parts", fix=f"{fix}, and run again")


def _read(file: Path, source: int, *, ids: bool = True) -> Iterator[Worked]:
    """The batches of a shard; without ids, their hashes are not checked.

    Raises:
        UserError: the file is not what was written.
    """
    with file.open("rb") as stream:
        while True:
            frame = stream.read(_FRAME.size)
            sizes = _FRAME.unpack(frame)[:2] if len(frame) == _FRAME.size else (0, 0)
            left = file.stat().st_size - stream.tell()
            failure = damaged(file, "a shard is damaged", "delete the file, and all .bands and .near if there are some")
            if not ids and frame and 0 < sum(sizes) <= left:
                header = stream.read(sizes[0])
                try:
                    skipped = json.loads(header)["ids"]
                    stream.seek(skipped, os.SEEK_CUR)
                    yield _loaded(source, header, stream.read(sizes[1] - skipped), ids=False)
                except (ValueError, KeyError, TypeError) as error:
                    raise failure from error
                continue
            content = stream.read(sum(sizes)) if sum(sizes) <= left else b""
            header, body = content[: sizes[0]], content[sizes[0] :]
            if framed(header, body) != frame + content:
                raise failure
            if not content:
                return
            yield _loaded(source, header, body)
