"""Files of a prepared folder: `.bin`, `.idx` and document digests of each source and split, and the held-out texts."""

from __future__ import annotations

import gzip
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmrecipes.console import duration
from llmrecipes.data import sources
from llmrecipes.data.chat import REJECTED, Conversations
from llmrecipes.data.corpus import EncoderSpec, Tally, Worked, batches, encode_again, encode_all
from llmrecipes.data.curriculum import SUFFIX as SCORES
from llmrecipes.data.infilling import ORDERS
from llmrecipes.data.manifest import ChatCounts, Counts, HeldOut, SourceFiles, SourceRecord, stem
from llmrecipes.data.parts import parts_of
from llmrecipes.data.prepared import HeldOutSplit, held_out_name
from llmrecipes.data.split import SPLITS, Split, digest
from llmrecipes.data.steps import (
    CUT_PIECES,
    DUPLICATES,
    EMPTY,
    UNDECODABLE,
    UNREADABLE,
    Cut,
    Document,
    Dropped,
    Seen,
    StepSpec,
)
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import MIB

if TYPE_CHECKING:
    from llmrecipes.data.token_sets import LinkedPart

_REPORT_SECONDS = 5.0
SAMPLES = "dropped.jsonl"
"""File of samples of what the steps dropped."""
_SAMPLES = 20
"""Kept of a step."""


def write(
    folder: Path,
    every: tuple[Source, ...],
    spec: EncoderSpec,
    workers: int,
    log: Callable[[str], None],
    chat: Chat | None = None,
    shards: Callable[[Collection[int]], Generator[Worked, None, None]] | None = None,
) -> tuple[list[SourceRecord], dict[Split, HeldOut], list[ChatCounts]]:
    """Read, tokenize and write all sources; the files do not depend on the number of workers.

    Args:
        shards: returns the batches that tasks have encoded, without sources that are full; None: they are encoded now.

    Returns:
        A record of each source, the held-out texts (none of conversations), and counts of each source's conversations.

    Raises:
        UserError: a source that cannot be read, or that keeps nothing for training.
    """
    tallies = [Tally() for _ in every]
    talks = [ChatCounts() for _ in every] if chat else []
    tokens, sizes = [0 for _ in every], [0 for _ in every]
    full: set[int] = set()
    share = spec.steps.max_unreadable
    with ExitStack() as stack:

        def part(number: int, split: Split) -> _WrittenPart:
            new = _WrittenPart(
                folder / stem(number, split), spec.dtype, stack, answers=chat is not None, scores=spec.scored(split)
            )
            written[number, split] = new
            return new

        written: dict[tuple[int, Split], _WrittenPart | LinkedPart] = {}
        linked: dict[int, dict[Split, LinkedPart]] = {}
        texts: dict[HeldOutSplit, TextToWrite] = {}

        def add_text(split: HeldOutSplit, text: bytes) -> None:
            if split not in texts:
                texts[split] = TextToWrite(folder / held_out_name(split), stack)
            texts[split].add(text)

        seen = Seen(spec.steps)
        output = Output(spec, seen, part, add_text)
        started = reported = time.monotonic()
        outcomes = (
            encode_all(batches(every, chat, full, skip=share > 0), spec, workers) if shards is None else shards(full)
        )
        for worked in stack.enter_context(closing(outcomes)):
            number = worked.source
            if number in full:
                continue
            most = every[number].max_tokens
            room = None if most is None else most - tokens[number]
            added = output.add(worked, room, tallies[number])
            require_readable(number, every[number], tallies[number], share)
            tokens[number] += added.tokens
            sizes[number] += added.size
            if talks:
                talks[number] = added.talks_with(talks[number])
            if most is not None and tokens[number] >= most:
                full.add(number)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                log(_progress(every, number, sizes, tokens, reported - started))
        for number, source in enumerate(every):
            if source.tokenized:
                from llmrecipes.data.token_sets import write_set  # loads megatron-core

                tallies[number], linked[number] = write_set(
                    folder, source, spec, seen, partial(part, number), partial(stem, number), add_text, log, stack
                )
                written.update({(number, split): writer for split, writer in linked[number].items()})
        reasons = spec.steps.reasons
        counts = {key: writer.counts for key, writer in written.items()}
        records = [record(n, source, tallies[n], reasons, counts, talks) for n, source in enumerate(every)]
        for n in (number for number, splits in linked.items() if splits):
            records[n] = records[n].model_copy(update={"linked": True})
        for n, made_of in enumerate(records):
            log(summary(made_of) + (f"; read up to max_tokens {every[n].max_tokens:,}" if n in full else ""))
            if talks:
                log(answers_of(made_of.label, talks[n]))
            for line in tallies[n].kinds.warnings(made_of.label):
                log(line)
        for writer in written.values():
            writer.finish()
    output.samples.write(folder / SAMPLES, [sources.label(source) for source in every])
    held_out: dict[Split, HeldOut] = {
        split: HeldOut(bytes=t.bytes, gzip_bytes=t.file.stat().st_size) for split, t in texts.items()
    }
    return records, held_out, talks


class _WrittenPart:
    """The open files of one split of one source."""

    def __init__(self, prefix: Path, dtype: str, stack: ExitStack, *, answers: bool, scores: bool) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._idx = f"{prefix}.idx"
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
        stack.callback(self._builder.data_file.close)
        self._digests = stack.enter_context(prefix.with_suffix(".sha256").open("wb"))
        self._answers = stack.enter_context(prefix.with_suffix(".answers").open("wb")) if answers else None
        self._scores = stack.enter_context(prefix.with_suffix(SCORES).open("wb")) if scores else None
        self._documents = self._tokens = self._bytes = 0

    @property
    def counts(self) -> Counts:
        return Counts(documents=self._documents, tokens=self._tokens, bytes=self._bytes)

    def add(self, document: Document, length: int, ids: np.ndarray, answers: bytes) -> None:
        self._builder.add_document(ids, [length])
        self._digests.write(document.digest)
        if self._answers is not None:
            self._answers.write(answers)
        if self._scores is not None:
            self._scores.write(np.array(document.score, "<f4").tobytes())
        self._documents += 1
        self._tokens += length
        self._bytes += document.size

    def finish(self) -> None:
        self._builder.finalize(self._idx)


MEMBER_BYTES = 64 * MIB
"""Text of a member of a gzip file: tasks compress members independently of each other."""


class TextToWrite:
    """The text of a held-out split, compressed with `gzip -9` for comparison with the model's bits per byte."""

    def __init__(self, file: Path, stack: ExitStack) -> None:
        self.file, self.bytes = file, 0
        self._raw = stack.enter_context(file.open("wb"))
        self._member = bytearray()
        stack.callback(self._write)

    def add(self, text: bytes) -> None:
        self.bytes += len(text)
        self._member += text
        while len(self._member) >= MEMBER_BYTES:
            self._write()

    def _write(self) -> None:
        if self._member:
            self._raw.write(compressed(self._member[:MEMBER_BYTES]))
            del self._member[:MEMBER_BYTES]


def compressed(text: bytes | bytearray) -> bytes:
    """A member of a gzip file, the same whoever writes it and when."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=9, fileobj=buffer, mtime=0) as stream:
        stream.write(text)
    return buffer.getvalue()


def _progress(
    recipe_sources: tuple[Source, ...], number: int, sizes: list[int], tokens: list[int], seconds: float
) -> str:
    done = sum(sizes)
    rate = done / seconds
    line = f"{done / MIB:,.0f} MiB tokenized, {rate / MIB:.1f} MiB/s; at {sources.label(recipe_sources[number])}"
    if not done:  # all was dropped so far
        return line
    left = 0.0
    for source, size, count in zip(recipe_sources[number:], sizes[number:], tokens[number:], strict=True):
        expected = sources.text_bytes(source, size / count if count else None)
        if expected is None:
            return line
        left += max(0.0, expected - size)
    return f"{line}; about {duration(left / rate)} left"


class Part(Protocol):
    """Where the kept documents of one split of one source go."""

    def add(self, document: Document, length: int, ids: np.ndarray, answers: bytes) -> None:
        """The next one, of `length` tokens; `ids` is empty if the batch came without."""
        ...


class Judge(Protocol):
    """Says whether a document is kept."""

    def add(self, document: Document) -> Dropped | Cut | None:
        """None if it is; called for every document in the order in which they were read."""
        ...


class Output:
    """Hands on documents in the order in which they were read, without those that are dropped; one that is cut is
    tokenized again, in this process.

    Args:
        seen: drops duplicates.
        part: makes what takes the documents of a source and split.
        text: takes the texts of held-out splits.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        seen: Judge,
        part: Callable[[int, Split], Part],
        text: Callable[[HeldOutSplit, bytes], None],
    ) -> None:
        self.samples = Samples(spec.steps)
        self._parts: dict[tuple[int, Split], Part] = {}
        self._spec, self._seen, self._part, self._text = spec, seen, part, text

    def add(self, worked: Worked, room: int | None, tally: Tally) -> _Added:
        """Write the documents of a batch until there are `room` tokens; those behind them count as not read."""
        encoded, added = worked.encoded, _Added()
        talks = encoded if isinstance(encoded, Conversations) else None
        ids = np.frombuffer(encoded.ids, self._spec.dtype)
        number = start = 0
        for outcome in worked.outcomes:
            if room is not None and added.tokens >= room:
                break
            if isinstance(outcome, Dropped) and outcome.reason == UNREADABLE:
                tally.dropped[UNREADABLE] += 1
                tally.failure = tally.failure or outcome.excerpt
                continue
            tally.read += 1
            if isinstance(outcome, Dropped):
                self._drop(worked.source, outcome, outcome.kinds, tally)
                continue
            length = encoded.lengths[number]
            place, chosen = number, slice(start, start + length)
            number, start = number + 1, start + length
            judged, kept, its_ids = self._seen.add(outcome), outcome, ids[chosen]
            if isinstance(judged, Dropped):
                self._drop(worked.source, judged, outcome.kinds, tally)
                continue
            tally.kinds.add(outcome.kinds)
            if judged is not None:
                kept, its_ids = encode_again(self._spec, worked.source, judged.document)
                length = len(its_ids)
                tally.rules[f"{judged.reason}.{CUT_PIECES}"] += judged.pieces
                self.samples.add(worked.source, Dropped(judged.reason, CUT_PIECES, judged.excerpt))
            if kept.changed:
                tally.changed.update(kept.changed)
            answers = b""
            if talks is not None:
                answers = talks.answers[chosen]
                added.conversation(talks.tallies[place], answers, talks.refusal)
            if length:
                added.tokens += length
                added.size += kept.size
                self._write(worked.source, kept, length, its_ids, None if talks is None else answers)
        return added

    def _drop(self, source: int, dropped: Dropped, kinds: tuple[str, ...], tally: Tally) -> None:
        tally.kinds.add(kinds, dropped.reason, dropped.rule, dropped.excerpt)
        tally.dropped[dropped.reason] += 1
        if dropped.rule:
            tally.rules[f"{dropped.reason}.{dropped.rule}"] += 1
        self.samples.add(source, dropped)

    def _write(self, source: int, document: Document, length: int, ids: np.ndarray, answers: bytes | None) -> None:
        key = (source, document.split)
        if key not in self._parts:
            self._parts[key] = self._part(*key)
        self._parts[key].add(document, length, ids, answers or b"")
        if document.split != "train" and answers is None:
            self._text(document.split, document.text)


class Samples:
    """Samples of what each step dropped, for people to look at: those whose text has the smallest hashes, so a random
    choice that depends neither on the order nor on the number of processes."""

    def __init__(self, spec: StepSpec) -> None:
        names = [name for name, _, _ in (*spec.steps, *spec.comparisons)]
        self._kept: dict[str, dict[bytes, tuple[int, Dropped]]] = {name: {} for name in names}

    def add(self, source: int, dropped: Dropped) -> None:
        if dropped.excerpt:
            kept = self._kept[dropped.reason]
            kept[digest(dropped.excerpt.encode())] = (source, dropped)
            if len(kept) > _SAMPLES:
                del kept[max(kept)]

    def kept(self) -> Iterator[Dropped]:
        """Those of all steps."""
        for kept in self._kept.values():
            yield from (dropped for _, dropped in kept.values())

    def write(self, file: Path, labels: list[str]) -> None:
        """A JSON object a line, in the order of the steps; no file where nothing was dropped."""
        rows = [
            {"step": name, "rule": dropped.rule, "source": labels[source], "text": dropped.excerpt}
            for name, kept in self._kept.items()
            for _, (source, dropped) in sorted(kept.items())
        ]
        if rows:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.write_text("".join(lines), encoding="utf-8")


@dataclass
class _Added:
    """Counts of a batch: tokens, bytes of text, and the dropped, cut and counted parts of conversations."""

    tokens: int = 0
    size: int = 0
    tally: Counter[str] = field(default_factory=Counter)
    refusal: str = ""

    def conversation(self, tally: dict[str, int], answers: bytes, refusal: str) -> None:
        self.tally.update({**tally, "tokens": len(answers), "answer_tokens": answers.count(1)})
        if REJECTED in tally:
            self.refusal = refusal

    def talks_with(self, counts: ChatCounts) -> ChatCounts:
        """The sums of a source with these."""
        update: dict[str, object] = {name: getattr(counts, name) + value for name, value in self.tally.items()}
        return counts.model_copy(update={**update, "refusal": counts.refusal or self.refusal})


def record(
    number: int,
    source: Source,
    tally: Tally,
    reasons: tuple[str, ...],
    parts: Mapping[tuple[int, Split], Counts],
    talks: list[ChatCounts],
) -> SourceRecord:
    """The record of a source.

    Raises:
        UserError: it keeps nothing for training.
    """
    where = f"data.sources[{number}]"
    kept = {split: parts.get((number, split), Counts()) for split in SPLITS}
    listing = sources.listing(source)
    source_record = SourceRecord(
        label=sources.label(source),
        read=tally.read,
        empty=tally.dropped[EMPTY],
        undecodable=tally.dropped[UNDECODABLE],
        duplicates=tally.dropped[DUPLICATES],
        steps={reason: tally.dropped[reason] for reason in reasons},
        rules=dict(sorted(tally.rules.items())),
        changed={name: tally.changed[name] for name in (*reasons, DUPLICATES, *ORDERS) if tally.changed[name]},
        unreadable=tally.dropped[UNREADABLE],
        splits=kept,
        files=SourceFiles(files=listing.files, bytes=listing.bytes, sha256=listing.sha256) if listing else None,
    )
    if not any(counts.documents for counts in kept.values()):
        if talks and talks[number].dropped:
            raise UserError(
                f"source {sources.label(source)!r} has no conversation to learn from: {_left_out(talks[number])}",
                where=where,
                rule="a conversation needs an answer within data.chat.max_length, and must be accepted by the template",
                fix="check the rows and the template, or raise max_length (at most model.seq_length + 1)",
            )
        raise UserError(
            f"source {sources.label(source)!r} has no documents: {_dropped(source_record)} of {source_record.read:,}",
            where=where,
            rule="a source needs text that no earlier source has",
            fix="use other files, or remove the source",
        )
    if not kept["train"].documents:
        raise UserError(
            f"no document of source {sources.label(source)!r} is in the train split",
            where=where,
            rule="documents are assigned to splits by hash; a split may get none of a few documents",
            fix="add documents, or give train a larger share in data.split",
        )
    return source_record


def require_readable(number: int, source: Source, tally: Tally, share: float) -> None:
    """UserError if more than a share of a source's files cannot be read."""
    damaged = tally.dropped[UNREADABLE]
    if damaged and damaged > share * (total := sum(1 for _ in parts_of(source.type, sources.files(source)))):
        raise UserError(
            f"{damaged:,} of {total:,} files of source {sources.label(source)!r} cannot be read; {tally.failure}",
            where=f"data.sources[{number}]",
            rule=f"data.max_unreadable={share}",
            fix="repair or remove these files, or raise data.max_unreadable",
        )


def _dropped(record: SourceRecord) -> str:
    by_steps = "".join(f", {count:,} by {key}" for key, count in record.steps.items())
    return f"{record.duplicates:,} duplicate, {record.empty:,} empty, {record.undecodable:,} not UTF-8{by_steps}"


def summary(record: SourceRecord) -> str:
    """What was kept of a source, as a line."""
    of_splits = record.splits.values()
    documents, tokens, size = (sum(getattr(c, key) for c in of_splits) for key in ("documents", "tokens", "bytes"))
    splits = ", ".join(f"{split} {counts.tokens:,}" for split, counts in record.splits.items())
    damaged = f"; {record.unreadable:,} damaged files, skipped from the damage on" if record.unreadable else ""
    text = f"{size / MIB:.1f} MiB, " if record.splits["train"].bytes else ""  # a source of tokens has none
    where = "; used in place" if record.linked else ""
    return (
        f"{record.label}: {documents:,} of {record.read:,} documents kept (dropped: {_dropped(record)}), "
        f"{text}{tokens:,} tokens ({splits}){damaged}{where}"
    )


def _left_out(counts: ChatCounts) -> str:
    refusal = f" ({counts.refusal})" if counts.refusal else ""
    return (
        f"{counts.rejected:,} rejected by the template{refusal}, {counts.unanswered:,} without an answer, "
        f"{counts.too_long:,} too long, {counts.special_tokens:,} with the text of a special token"
    )


def answers_of(label: str, counts: ChatCounts) -> str:
    """How much of a source's conversations the loss counts, as a line."""
    cut = f"; {counts.cut:,} cut short by {counts.cut_tokens:,} tokens" if counts.cut else ""
    share = counts.answer_tokens / max(counts.tokens, 1)
    return (
        f"{label}: the loss counts {counts.answer_tokens:,} of {counts.tokens:,} tokens ({share:.0%}), the answers; "
        f"dropped: {_left_out(counts)}{cut}"
    )
