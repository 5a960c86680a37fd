"""The documents of all sources, in batches for worker processes, and those that a tokenizer is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from llmrecipes.data import sources
from llmrecipes.data.rows import contents
from llmrecipes.data.steps import Document, StepSpec, pipeline
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import MIB

_BATCH_CHARACTERS = MIB
SAMPLE_BYTES = 64 << 20
"""Maximum text to train a tokenizer on: twice as much changes little in a vocabulary and doubles the time."""


@dataclass
class Tally:
    """What was read of a source, and how many documents were dropped for which reason."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class Batch:
    """Documents of one source as they were read, about 1 MiB: the unit of work of a worker process.

    Args:
        source: its number.
        texts: None for one that is not valid Unicode.
    """

    source: int
    texts: list[str | None] = field(default_factory=list)
    size: int = 0

    def add(self, text: str | None) -> None:
        """Append a document."""
        self.texts.append(text)
        self.size += 1 + len(text or "")


def batches(every: tuple[Source, ...], chat: Chat | None = None, full: Collection[int] = ()) -> Iterator[Batch]:
    """All documents, source by source.

    Args:
        every: sources, by number.
        chat: the documents are conversations.
        full: numbers of sources that have reached their `max_tokens` and are read no further; grows meanwhile.
    """
    for number, source in enumerate(every):
        batch = Batch(number)
        for text in sources.documents(source, chat):
            if number in full:
                break
            batch.add(text)
            if batch.size >= _BATCH_CHARACTERS:
                yield batch
                batch = Batch(number)
        if batch.texts and number not in full:
            yield batch


def kept(source: Source, spec: StepSpec, seen: set[bytes], chat: Chat | None = None) -> Iterator[Document]:
    """A source's documents except the dropped ones, in this process.

    Args:
        source: to read.
        spec: the steps.
        seen: digests of documents kept so far, of all sources; grows.
        chat: the documents are conversations.
    """
    run = pipeline(spec)
    for text in sources.documents(source, chat):
        document = run(text)
        if isinstance(document, Document) and document.digest not in seen:
            seen.add(document.digest)
            yield document


def training_sample(
    every: tuple[Source, ...], spec: StepSpec, limit: int = SAMPLE_BYTES, chat: Chat | None = None
) -> list[str]:
    """Texts of the train split to train a tokenizer on: the first ones of each source, sharing `limit` bytes evenly."""
    seen: set[bytes] = set()
    sample: list[str] = []
    for source in every:
        room = limit // len(every)
        for document in kept(source, spec, seen, chat):
            if document.split == "train":
                sample += [document.text.decode()] if chat is None else contents(document.text)
                room -= len(document.text)
            if room <= 0:
                break
    return sample
