"""What of the documents of shards is written, in their order, and what the output says about their sources."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from llmrecipes.data.folder.data_manifest import ChatCounts, Counts, SourceFiles, SourceRecord
from llmrecipes.data.folder.prepared import HeldOutSplit
from llmrecipes.data.preparation.corpus import EncoderSpec, Tally, Worked, encode_again
from llmrecipes.data.sources import sources
from llmrecipes.data.sources.file_parts import parts_of
from llmrecipes.data.steps.split import SPLITS, Split, digest
from llmrecipes.data.steps.steps import (
    CUT_PIECES,
    DUPLICATES,
    EMPTY,
    UNDECODABLE,
    UNREADABLE,
    Cut,
    Document,
    Dropped,
    StepSpec,
)
from llmrecipes.data.tokens.chat import REJECTED, Conversations
from llmrecipes.data.tokens.infilling import ORDERS
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Source
from llmrecipes.units import MIB

SAMPLES = "dropped.jsonl"
"""File of samples of what the steps dropped."""
_SAMPLES = 20
"""Kept of a step."""


MEMBER_BYTES = 64 * MIB
"""Text of a member of a gzip file: members are compressed independently of each other."""


class TextToWrite:
    """The text of a held-out split, compressed with `gzip -9` as the items of `join` do, where it is not all theirs."""

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


class SplitFile(Protocol):
    """Where the kept documents of one split of one source go."""

    def add(self, document: Document, length: int, ids: np.ndarray, answers: bytes) -> None:
        """The next one, of `length` tokens; `ids` is empty if the batch came without."""
        ...


class Judge(Protocol):
    """Says whether a document is kept."""

    def add(self, document: Document) -> Dropped | Cut | None:
        """None if it is; called for every document in the order in which they were read."""
        ...


class DocumentSink:
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
        part: Callable[[int, Split], SplitFile],
        text: Callable[[HeldOutSplit, bytes], None],
    ) -> None:
        self.samples = DroppedSamples(spec.steps)
        self._parts: dict[tuple[int, Split], SplitFile] = {}
        self._spec = spec
        self._seen = seen
        self._part = part
        self._text = text

    def add(self, worked: Worked, room: int | None, tally: Tally) -> _Added:
        """Write the documents of a batch until there are `room` tokens; those behind them count as not read."""
        encoded = worked.encoded
        added = _Added()
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
            place = number
            chosen = slice(start, start + length)
            number = number + 1
            start = start + length
            judged = self._seen.add(outcome)
            kept = outcome
            its_ids = ids[chosen]
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


class DroppedSamples:
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
    """Counts of a batch: tokens, and the dropped, cut and counted parts of conversations."""

    tokens: int = 0
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
