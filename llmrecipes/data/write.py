"""Files of a prepared folder: `.bin`, `.idx` and document digests of each source and split, and the held-out texts."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmrecipes.console import duration
from llmrecipes.data import heldout, sources
from llmrecipes.data.chat import Conversations
from llmrecipes.data.corpus import Batch, Document, Limits, Tally, batches
from llmrecipes.data.encode import Encoded
from llmrecipes.data.manifest import ChatCounts, Counts, HeldOut, SourceFiles, SourceRecord, stem
from llmrecipes.data.pool import EncoderSpec, encode_all
from llmrecipes.data.split import SPLITS, Split, SplitRule
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import MIB

_REPORT_SECONDS = 5.0


def write(
    folder: Path,
    every: tuple[Source, ...],
    rule: SplitRule,
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
    tallies, limits = [Tally() for _ in every], Limits()
    tokens = [0 for _ in every]
    talks = [ChatCounts() for _ in every] if chat else []
    with ExitStack() as stack:
        parts: dict[tuple[int, Split], _Part] = {}
        texts: dict[Split, _Text] = {}
        started = reported = time.monotonic()
        sizes = [0 for _ in every]
        reading = batches(every, rule, tallies, chat, limits)
        counted = [Tally() for _ in every]
        for batch, encoded in stack.enter_context(closing(encode_all(reading, spec, workers))):
            number = batch.source
            if number in limits.full:
                limits.beyond |= {document.digest for document in batch.documents}
                continue
            room = None if (most := every[number].max_tokens) is None else most - tokens[number]
            added, rest = _add(batch, encoded, room, folder, spec.dtype, parts, texts, stack)
            tokens[number] += added
            sizes[number] += batch.size - sum(len(document.text) for document in rest)
            if batch.tally is not None:
                counted[number] = replace(batch.tally, read=batch.tally.read - len(rest))
            if isinstance(encoded, Conversations):
                talks[number] = _counted(talks[number], encoded, added)
            if most is not None and tokens[number] >= most:
                limits.full.add(number)
                limits.beyond |= {document.digest for document in rest}
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                log(_progress(every, number, sizes, tokens, reported - started))
        for number in limits.full:
            tallies[number] = counted[number]
        records = [_record(n, source, tallies[n], parts, talks) for n, source in enumerate(every)]
        for n, record in enumerate(records):
            log(_summary(record) + (f"; read up to max_tokens {every[n].max_tokens:,}" if n in limits.full else ""))
            if talks:
                log(_answers(record.label, talks[n]))
        for part in parts.values():
            part.finish()
    held_out: dict[Split, HeldOut] = {
        split: HeldOut(bytes=t.bytes, gzip_bytes=t.file.stat().st_size) for split, t in texts.items()
    }
    return records, held_out, talks


class _Part:
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
            bytes=self.counts.bytes + len(document.text),
        )

    def finish(self) -> None:
        self._builder.finalize(self._idx)


class _Text:
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


def _add(
    batch: Batch,
    encoded: Encoded,
    room: int | None,
    folder: Path,
    dtype: str,
    parts: dict[tuple[int, Split], _Part],
    texts: dict[Split, _Text],
    stack: ExitStack,
) -> tuple[int, list[Document]]:
    """Write documents until `room` tokens are reached; the number of tokens, and the documents behind them."""
    ids = np.frombuffer(encoded.ids, dtype)
    talks = isinstance(encoded, Conversations)
    answers = encoded.answers if isinstance(encoded, Conversations) else b""
    start = 0
    for place, (document, length) in enumerate(zip(batch.documents, encoded.lengths, strict=True)):
        if room is not None and start >= room:
            return start, batch.documents[place:]
        if not length:
            continue
        key = (batch.source, document.split)
        if key not in parts:
            parts[key] = _Part(folder / stem(*key), dtype, stack, answers=talks)
        parts[key].add(document, ids[start : start + length], answers[start : start + length])
        start += length
        if document.split != "train" and not talks:
            if document.split not in texts:
                texts[document.split] = _Text(folder / heldout.name(document.split), stack)
            texts[document.split].add(document.text)
    return start, []


def _counted(counts: ChatCounts, encoded: Conversations, added: int) -> ChatCounts:
    answers = np.frombuffer(encoded.answers, np.uint8)[:added]
    more = {**encoded.tally, "tokens": len(answers), "answer_tokens": int(answers.sum())}
    update: dict[str, object] = {name: getattr(counts, name) + value for name, value in more.items()}
    return counts.model_copy(update={**update, "refusal": counts.refusal or encoded.refusal})


def _record(
    number: int, source: Source, tally: Tally, parts: dict[tuple[int, Split], _Part], talks: list[ChatCounts]
) -> SourceRecord:
    where = f"data.sources[{number}]"
    kept = {split: parts[number, split].counts if (number, split) in parts else Counts() for split in SPLITS}
    if not any(counts.documents for counts in kept.values()):
        if talks and talks[number].dropped:
            raise UserError(
                f"source {sources.label(source)!r} has no conversation to learn from: {_left_out(talks[number])}",
                where=where,
                rule="a conversation has an answer within data.chat.max_length, and the template accepts it",
                fix="look at the rows and the template, or raise max_length (at most model.seq_length + 1)",
            )
        raise UserError(
            f"source {sources.label(source)!r} has no documents: {_dropped(tally)} of {tally.read}",
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
    listing = sources.listing(source)
    return SourceRecord(
        label=sources.label(source),
        read=tally.read,
        empty=tally.empty,
        undecodable=tally.undecodable,
        duplicates=tally.duplicates,
        splits=kept,
        files=SourceFiles(files=listing.files, bytes=listing.bytes, sha256=listing.sha256) if listing else None,
    )


def _dropped(tally: Tally | SourceRecord) -> str:
    return f"{tally.duplicates:,} duplicate, {tally.empty:,} empty, {tally.undecodable:,} not UTF-8"


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
