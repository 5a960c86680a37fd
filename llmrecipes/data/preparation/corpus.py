"""The documents of all sources: in batches, encoded by worker processes; and those that a tokenizer is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from llmrecipes.data.preparation.executor import Executor
from llmrecipes.data.read.curriculum import compression_ratio
from llmrecipes.data.sources import sources
from llmrecipes.data.sources.rows import contents
from llmrecipes.data.steps.kinds import Kinds
from llmrecipes.data.steps.split import Split
from llmrecipes.data.steps.steps import Document, Dropped, Seen, StepSpec, pipeline
from llmrecipes.data.tokens.chat import ChatSpec, chat_encoder
from llmrecipes.data.tokens.encode import Encode, Encoded, encoder
from llmrecipes.data.tokens.infilling import ORDERS, FimSpec, cut, encode_cut
from llmrecipes.data.tokens.pairs import pair_encoder
from llmrecipes.recipe.schema import Chat, Source
from llmrecipes.units import MIB

_BATCH_CHARACTERS = MIB
SAMPLE_BYTES = 64 << 20
"""Maximum text to train a tokenizer on: twice as much changes little in a vocabulary and doubles the time."""


@dataclass
class Tally:
    """Counts of a source: documents read, dropped by reason, by `step.rule`, and changed by step."""

    read: int = 0
    failure: str = ""
    """The first file that could not be read, and why."""
    dropped: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    kinds: Kinds = field(default_factory=Kinds)

    def update(self, more: Tally) -> None:
        """Add the counts of later documents of the source."""
        self.read += more.read
        self.failure = self.failure or more.failure
        self.dropped.update(more.dropped)
        self.rules.update(more.rules)
        self.changed.update(more.changed)
        self.kinds.update(more.kinds)


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


def batches_of(number: int, documents: Iterable[str | None]) -> Iterator[Batch]:
    """These documents of the source with that number."""
    batch = Batch(number)
    for text in documents:
        batch.add(text)
        if batch.size >= _BATCH_CHARACTERS:
            yield batch
            batch = Batch(number)
    if batch.texts:
        yield batch


def training_sample(
    every: tuple[Source, ...],
    spec: StepSpec,
    executor: Executor,
    report: Callable[[int, Source], None],
    chat: Chat | None,
) -> list[str]:
    """Texts of the train split to train a tokenizer on: the first of each source, sharing `SAMPLE_BYTES` evenly.

    Args:
        every: sources to read.
        spec: which of their documents are kept, and how they are changed.
        executor: applies the steps that look at one document.
        report: receives the bytes so far and the source that is read, after each document.
        chat: the documents are conversations.

    Raises:
        UserError: a source cannot be read, or no worker is left.
    """
    seen = Seen(spec)
    sample: list[str] = []
    size = 0
    for number, source in enumerate(every):
        room = SAMPLE_BYTES // len(every)
        documents = sources.documents(source, chat, skip=spec.max_unreadable > 0)
        with closing(_cleaned(batches_of(number, documents), spec, executor)) as batches:
            for outcome in chain.from_iterable(batches):
                document = seen.kept(outcome)
                if document is not None and document.split == "train":
                    sample += [document.text.decode()] if chat is None else contents(document.text)
                    room -= len(document.text)
                    size += len(document.text)
                report(size, source)
                if room <= 0:
                    break
    return sample


def _cleaned(
    batches: Iterable[Batch], spec: StepSpec, executor: Executor
) -> Generator[list[Document | Dropped], None, None]:
    """What becomes of the texts of each batch; without steps, processes would take longer to receive them."""
    pending = iter(batches)
    clean = partial(_outcomes, spec)
    yield from map(clean, islice(pending, _CLEANED_ALONE if spec.steps or spec.comparisons else None))
    with closing(executor.map(clean, pending)) as rest:
        yield from rest


def _outcomes(spec: StepSpec, batch: Batch) -> list[Document | Dropped]:
    run = _pipeline(spec)
    return [run(text) for text in batch.texts]


_CLEANED_ALONE = 4  # batches
_ALONE = 32  # batches, 1 MiB each: processes take longer to start than these to encode


@dataclass(frozen=True)
class EncoderSpec:
    """All a worker process needs to make its steps and its encoder; see `encode.encoder`.

    Args:
        tokenizer: its `tokenizer.json`.
        identity: SHA-256 of that file; a process may later see a different file under the same name.
        prefix: ids put before each document of text.
        steps: what happens to a document before.
        chat: the documents are conversations.
        fim: how documents are rearranged.
        scores: training documents get a score for a curriculum.
    """

    tokenizer: Path
    identity: str
    eod: int
    dtype: str
    by_word: bool
    steps: StepSpec
    chat: ChatSpec | None = None
    fim: FimSpec | None = None
    scores: bool = False
    prefix: tuple[int, ...] = ()

    def scored(self, split: Split) -> bool:
        """Whether the documents of a split have a score."""
        return self.scores and split == "train"


@dataclass(frozen=True)
class Worked:
    """A batch returned by a worker.

    Args:
        source: its number.
        outcomes: of each text that was read, in order: the document, or the reason why it is dropped. The texts
            of training documents are left out.
        encoded: the ids of the documents.
    """

    source: int
    outcomes: list[Document | Dropped]
    encoded: Encoded

    def first(self, count: int) -> Worked:
        """The same of the first texts only. Their ids, and answers, are those in front; the others stay behind them."""
        return replace(self, outcomes=self.outcomes[:count])


def encode_all(batches: Iterable[Batch], spec: EncoderSpec, executor: Executor) -> Generator[Worked, None, None]:
    """Each batch with its ids, in the order of `batches`; the first ones are encoded in this process.

    Raises:
        UserError: no worker is left.
    """
    pending = iter(batches)
    encode = partial(_work, spec)
    yield from map(encode, islice(pending, _ALONE))
    yield from executor.map(encode, pending)


def _work(spec: EncoderSpec, batch: Batch) -> Worked:
    outcomes = [_scored(spec, outcome) for outcome in _outcomes(spec.steps, batch)]
    encoded = _encoded(spec, batch.source, outcomes)
    cuts = spec.steps.cuts
    talks = spec.chat is not None
    for place, outcome in enumerate(outcomes):  # only what is written, or cut, goes back to the process that writes
        if isinstance(outcome, Document) and not cuts and (outcome.split == "train" or talks):
            outcomes[place] = outcome.without_text()
    return Worked(batch.source, outcomes, encoded)


def _scored(spec: EncoderSpec, outcome: Document | Dropped) -> Document | Dropped:
    """The same, with the score of a training document."""
    if isinstance(outcome, Dropped) or not spec.scored(outcome.split):
        return outcome
    return replace(outcome, score=compression_ratio(outcome.text))


def _encoded(spec: EncoderSpec, source: int, outcomes: list[Document | Dropped]) -> Encoded:
    """The ids of the documents; one that is rearranged is replaced by one that says so."""
    if spec.fim is not None and spec.fim.rates[source]:
        return _infilled(spec, spec.fim, source, outcomes)
    return _encoder(spec)([outcome.text for outcome in outcomes if isinstance(outcome, Document)])


def encode_again(spec: EncoderSpec, source: int, document: Document) -> tuple[Document, np.ndarray]:
    """A document of a source whose text has changed since its batch was encoded, and its ids."""
    changed = tuple(name for name in document.changed if name not in ORDERS)
    outcomes = [_scored(spec, replace(document, changed=changed))]
    ids = np.frombuffer(_encoded(spec, source, outcomes).ids, spec.dtype)
    [encoded] = [outcome for outcome in outcomes if isinstance(outcome, Document)]
    return encoded, ids


def _infilled(spec: EncoderSpec, fim: FimSpec, source: int, outcomes: list[Document | Dropped]) -> Encoded:
    """Ids of the documents, of which those of the train split are rearranged at the source's rate; they count as
    changed."""
    texts, cuts = [], []
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, Dropped):
            continue
        where = None
        if outcome.split == "train":
            length = len(outcome.text.decode())
            where = cut(length, outcome.digest, fim.rates[source], fim.spm_rate, fim.seed)
        if where is not None:
            outcomes[place] = replace(outcome, changed=(*outcome.changed, where.order))
        texts.append(outcome.text)
        cuts.append(where)
    return encode_cut(texts, cuts, fim.ids, _encoder(spec), len(spec.prefix))


_pipeline = cache(pipeline)


@cache
def _encoder(spec: EncoderSpec) -> Encode:
    content = spec.tokenizer.read_text(encoding="utf-8")
    if spec.chat is not None and spec.chat.pairs:
        return pair_encoder(content, spec.dtype, spec.eod, spec.chat, spec.prefix)
    if spec.chat is not None:
        return chat_encoder(content, spec.dtype, spec.chat)
    return encoder(content, spec.eod, spec.dtype, by_word=spec.by_word, prefix=spec.prefix)
