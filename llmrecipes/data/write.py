"""Files of a prepared folder: `.bin`, `.idx` and document digests of each source and split, and the held-out texts."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmrecipes.console import duration
from llmrecipes.data import sources
from llmrecipes.data.chat import REJECTED, Conversations
from llmrecipes.data.corpus import EncoderSpec, Tally, Worked, batches, encode_all
from llmrecipes.data.manifest import ChatCounts, Counts, HeldOut, SourceFiles, SourceRecord, stem
from llmrecipes.data.prepared import held_out_name
from llmrecipes.data.split import SPLITS, Split, digest
from llmrecipes.data.steps import DUPLICATES, EMPTY, UNDECODABLE, Document, Dropped, Seen, StepSpec
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import MIB

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
) -> tuple[list[SourceRecord], dict[Split, HeldOut], list[ChatCounts]]:
    """Read, tokenize and write all sources; the files do not depend on the number of workers.

    Returns:
        A record of each source, the held-out texts (none of conversations), and counts of each source's conversations.

    Raises:
        UserError: a source that cannot be read, or that keeps nothing for training.
    """
    tallies = [Tally() for _ in every]
    talks = [ChatCounts() for _ in every] if chat else []
    tokens, sizes = [0 for _ in every], [0 for _ in every]
    full: set[int] = set()
    with ExitStack() as stack:
        output = _Output(folder, spec, stack)
        started = reported = time.monotonic()
        reading = batches(every, chat, full)
        for worked in stack.enter_context(closing(encode_all(reading, spec, workers))):
            number = worked.source
            if number in full:
                continue
            most = every[number].max_tokens
            room = None if most is None else most - tokens[number]
            added = output.add(worked, room, tallies[number])
            tokens[number] += added.tokens
            sizes[number] += added.size
            if talks:
                talks[number] = added.talks_with(talks[number])
            if most is not None and tokens[number] >= most:
                full.add(number)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                log(_progress(every, number, sizes, tokens, reported - started))
        reasons = spec.steps.reasons
        records = [_record(n, source, tallies[n], reasons, output.parts, talks) for n, source in enumerate(every)]
        for n, record in enumerate(records):
            log(_summary(record) + (f"; read up to max_tokens {every[n].max_tokens:,}" if n in full else ""))
            if talks:
                log(_answers(record.label, talks[n]))
        for part in output.parts.values():
            part.finish()
        texts = output.texts
    output.samples.write(folder / SAMPLES, [sources.label(source) for source in every])
    held_out: dict[Split, HeldOut] = {
        split: HeldOut(bytes=t.bytes, gzip_bytes=t.file.stat().st_size) for split, t in texts.items()
    }
    return records, held_out, talks


class _WrittenPart:
    """The open files of one split of one source."""

    def __init__(self, prefix: Path, dtype: str, stack: ExitStack, *, answers: bool) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._idx = f"{prefix}.idx"
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
        stack.callback(self._builder.data_file.close)
        self._digests = stack.enter_context(prefix.with_suffix(".sha256").open("wb"))
        self._answers = stack.enter_context(prefix.with_suffix(".answers").open("wb")) if answers else None
        self.counts = Counts()

    def add(self, document: Document, ids: np.ndarray, answers: bytes) -> None:
        self._builder.add_document(ids, [len(ids)])
        self._digests.write(document.digest)
        if self._answers is not None:
            self._answers.write(answers)
        self.counts = Counts(
            documents=self.counts.documents + 1,
            tokens=self.counts.tokens + len(ids),
            bytes=self.counts.bytes + document.size,
        )

    def finish(self) -> None:
        self._builder.finalize(self._idx)


class _TextToWrite:
    """The text of a held-out split, compressed with `gzip -9` for comparison with the model's bits per byte."""

    def __init__(self, file: Path, stack: ExitStack) -> None:
        self.file, self.bytes = file, 0
        raw = stack.enter_context(file.open("wb"))
        self._stream = stack.enter_context(gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0))

    def add(self, text: bytes) -> None:
        self._stream.write(text)
        self.bytes += len(text)


def _progress(every: tuple[Source, ...], number: int, sizes: list[int], tokens: list[int], seconds: float) -> str:
    done = sum(sizes)
    rate = done / seconds
    line = f"{done / MIB:,.0f} MiB tokenized, {rate / MIB:.1f} MiB/s; at {sources.label(every[number])}"
    left = 0.0
    for source, size, count in zip(every[number:], sizes[number:], tokens[number:], strict=True):
        expected = sources.text_bytes(source, size / count if count else None)
        if expected is None:
            return line
        left += max(0.0, expected - size)
    return f"{line}; about {duration(left / rate)} left"


class _Output:
    """Writer of documents in the order in which they were read, without duplicates."""

    def __init__(self, folder: Path, spec: EncoderSpec, stack: ExitStack) -> None:
        self.parts: dict[tuple[int, Split], _WrittenPart] = {}
        self.texts: dict[Split, _TextToWrite] = {}
        self.samples = _Samples(spec.steps)
        self._folder, self._dtype, self._stack = folder, spec.dtype, stack
        self._seen = Seen(spec.steps)

    def add(self, worked: Worked, room: int | None, tally: Tally) -> _Added:
        """Write the documents of a batch until there are `room` tokens; those behind them count as not read."""
        encoded, added = worked.encoded, _Added()
        talks = encoded if isinstance(encoded, Conversations) else None
        ids = np.frombuffer(encoded.ids, self._dtype)
        number = start = 0
        for outcome in worked.outcomes:
            if room is not None and added.tokens >= room:
                break
            tally.read += 1
            if isinstance(outcome, Dropped):
                self._drop(worked.source, outcome, tally)
                continue
            length = encoded.lengths[number]
            place, chosen = number, slice(start, start + length)
            number, start = number + 1, start + length
            if dropped := self._seen.add(outcome):
                self._drop(worked.source, dropped, tally)
                continue
            tally.changed.update(outcome.changed)
            answers = b""
            if talks is not None:
                answers = talks.answers[chosen]
                added.conversation(talks.tallies[place], answers, talks.refusal)
            if length:
                added.tokens += length
                added.size += outcome.size
                self._write(worked.source, outcome, ids[chosen], None if talks is None else answers)
        return added

    def _drop(self, source: int, dropped: Dropped, tally: Tally) -> None:
        tally.dropped[dropped.reason] += 1
        if dropped.rule:
            tally.rules[f"{dropped.reason}.{dropped.rule}"] += 1
        self.samples.add(source, dropped)

    def _write(self, source: int, document: Document, ids: np.ndarray, answers: bytes | None) -> None:
        key = (source, document.split)
        if key not in self.parts:
            prefix = self._folder / stem(*key)
            self.parts[key] = _WrittenPart(prefix, self._dtype, self._stack, answers=answers is not None)
        self.parts[key].add(document, ids, answers or b"")
        if document.split != "train" and answers is None:
            if document.split not in self.texts:
                file = self._folder / held_out_name(document.split)
                self.texts[document.split] = _TextToWrite(file, self._stack)
            self.texts[document.split].add(document.text)


class _Samples:
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


def _record(
    number: int,
    source: Source,
    tally: Tally,
    reasons: tuple[str, ...],
    parts: dict[tuple[int, Split], _WrittenPart],
    talks: list[ChatCounts],
) -> SourceRecord:
    where = f"data.sources[{number}]"
    kept = {split: parts[number, split].counts if (number, split) in parts else Counts() for split in SPLITS}
    listing = sources.listing(source)
    record = SourceRecord(
        label=sources.label(source),
        read=tally.read,
        empty=tally.dropped[EMPTY],
        undecodable=tally.dropped[UNDECODABLE],
        duplicates=tally.dropped[DUPLICATES],
        steps={reason: tally.dropped[reason] for reason in reasons},
        rules=dict(sorted(tally.rules.items())),
        changed={name: tally.changed[name] for name in reasons if tally.changed[name]},
        splits=kept,
        files=SourceFiles(files=listing.files, bytes=listing.bytes, sha256=listing.sha256) if listing else None,
    )
    if not any(counts.documents for counts in kept.values()):
        if talks and talks[number].dropped:
            raise UserError(
                f"source {sources.label(source)!r} has no conversation to learn from: {_left_out(talks[number])}",
                where=where,
                rule="a conversation has an answer within data.chat.max_length, and the template accepts it",
                fix="look at the rows and the template, or raise max_length (at most model.seq_length + 1)",
            )
        raise UserError(
            f"source {sources.label(source)!r} has no documents: {_dropped(record)} of {record.read:,}",
            where=where,
            rule="a source has text that no earlier source has",
            fix="point it at other files, or take it out",
        )
    if not kept["train"].documents:
        raise UserError(
            f"none of the documents of source {sources.label(source)!r} falls into the train split",
            where=where,
            rule="the split is drawn by document hash; few documents may all fall outside",
            fix="add documents, or give train a larger share in data.split",
        )
    return record


def _dropped(record: SourceRecord) -> str:
    by_steps = "".join(f", {count:,} by {key}" for key, count in record.steps.items())
    return f"{record.duplicates:,} duplicate, {record.empty:,} empty, {record.undecodable:,} not UTF-8{by_steps}"


def _summary(record: SourceRecord) -> str:
    every = record.splits.values()
    documents, tokens, size = (sum(getattr(c, key) for c in every) for key in ("documents", "tokens", "bytes"))
    splits = ", ".join(f"{split} {counts.tokens:,}" for split, counts in record.splits.items())
    return (
        f"{record.label}: {documents:,} of {record.read:,} documents kept (dropped: {_dropped(record)}), "
        f"{size / MIB:.1f} MiB, {tokens:,} tokens ({splits})"
    )


def _left_out(counts: ChatCounts) -> str:
    refusal = f" ({counts.refusal})" if counts.refusal else ""
    return (
        f"{counts.rejected:,} rejected by the template{refusal}, {counts.unanswered:,} without an answer, "
        f"{counts.too_long:,} too long, {counts.special_tokens:,} with the text of a special token"
    )


def _answers(label: str, counts: ChatCounts) -> str:
    cut = f"; {counts.cut:,} cut short by {counts.cut_tokens:,} tokens" if counts.cut else ""
    share = counts.answer_tokens / max(counts.tokens, 1)
    return (
        f"{label}: the loss counts {counts.answer_tokens:,} of {counts.tokens:,} tokens ({share:.0%}), the answers; "
        f"dropped: {_left_out(counts)}{cut}"
    )
