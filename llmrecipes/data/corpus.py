"""The documents that are kept: not empty, valid Unicode, and no duplicates of earlier ones in any source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llmrecipes.data import sources
from llmrecipes.data.rows import contents
from llmrecipes.data.split import Split, SplitRule, digest
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import MIB

_BATCH_BYTES = MIB
SAMPLE_BYTES = 64 << 20
"""Maximum text to train a tokenizer on: twice as much changes little in a vocabulary and doubles the time."""


@dataclass(frozen=True)
class Document:
    """A document that is kept: UTF-8 text, its SHA-256, its split."""

    text: bytes
    digest: bytes
    split: Split


@dataclass
class Tally:
    """What was read from a source and what was dropped."""

    read: int = 0
    empty: int = 0
    undecodable: int = 0
    duplicates: int = 0


@dataclass
class Batch:
    """Documents of one source, about 1 MiB: the unit of work of a worker process.

    Args:
        source: its number.
        tally: of the source, at the last of these documents.
        last: the source has `max_tokens`, and these are its last documents, if any: nothing is read before they have
            been written, because only the writer knows which documents the next sources may repeat.
    """

    source: int
    documents: list[Document] = field(default_factory=list)
    size: int = 0
    tally: Tally | None = None
    last: bool = False

    def add(self, document: Document) -> None:
        """Append a document."""
        self.documents.append(document)
        self.size += len(document.text)

    def texts(self) -> list[bytes]:
        """The documents' texts."""
        return [document.text for document in self.documents]


@dataclass
class Limits:
    """What the writer of tokens tells the reader of sources.

    Args:
        full: sources that have reached their `max_tokens`.
        beyond: digests of documents that were read after that, and are not kept.
    """

    full: set[int] = field(default_factory=set)
    beyond: set[bytes] = field(default_factory=set)


def keep(
    source: Source, rule: SplitRule, seen: set[bytes], tally: Tally, chat: Chat | None = None
) -> Iterator[Document]:
    """A source's documents except the dropped ones.

    Args:
        source: to read.
        rule: assigns the split.
        seen: digests of documents kept so far, of all sources; grows.
        tally: counts what is read and dropped.
        chat: the documents are conversations.
    """
    for text in sources.documents(source, chat):
        tally.read += 1
        if text is None:
            tally.undecodable += 1
        elif not text or text.isspace():
            tally.empty += 1
        else:
            data = text.encode()
            name = digest(data)
            if name in seen:
                tally.duplicates += 1
            else:
                seen.add(name)
                yield Document(data, name, rule.of(name))


def batches(
    every: tuple[Source, ...],
    rule: SplitRule,
    tallies: list[Tally],
    chat: Chat | None = None,
    limits: Limits | None = None,
) -> Iterator[Batch]:
    """All kept documents, source by source; a source that is full is read no further."""
    limits = limits or Limits()
    seen: set[bytes] = set()
    for number, source in enumerate(every):
        batch = Batch(number)
        for document in keep(source, rule, seen, tallies[number], chat):
            if number in limits.full:
                limits.beyond |= {document.digest, *(each.digest for each in batch.documents)}
                batch = Batch(number)
                break
            batch.add(document)
            if batch.size >= _BATCH_BYTES:
                batch.tally = replace(tallies[number])
                yield batch
                batch = Batch(number)
        if batch.documents or source.max_tokens is not None:
            batch.tally, batch.last = replace(tallies[number]), source.max_tokens is not None
            yield batch
        seen -= limits.beyond
        limits.beyond.clear()


def training_sample(
    every: tuple[Source, ...], rule: SplitRule, limit: int = SAMPLE_BYTES, chat: Chat | None = None
) -> list[str]:
    """Texts of the train split to train a tokenizer on: the first ones of each source, sharing `limit` bytes evenly."""
    seen: set[bytes] = set()
    sample: list[str] = []
    for source in every:
        room = limit // len(every)
        for document in keep(source, rule, seen, Tally(), chat):
            if document.split == "train":
                sample += [document.text.decode()] if chat is None else contents(document.text)
                room -= len(document.text)
            if room <= 0:
                break
    return sample
