"""What people look at in a prepared folder: single documents with what the loss sees, and figures of all of them."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes import untrusted
from llmrecipes.data.folder.documents import TokenFile, text_ids, token_files
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.data.preparation.write import SAMPLES
from llmrecipes.data.sources import sources
from llmrecipes.data.steps.split import SPLITS, Split
from llmrecipes.data.tokens.infilling import ORDERS, order_of, restored
from llmrecipes.errors import UserError
from llmrecipes.packages import find_spec
from llmrecipes.recipe.schema import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownToken:
    """A token of a document.

    Args:
        text: text of the id by itself; of an incomplete character U+FFFD.
        loss: whether its prediction counts for the loss.
        end: it ends the document.
    """

    id: int
    text: str
    loss: bool
    end: bool


@dataclass(frozen=True)
class ShownDocument:
    """A document as it is in the token files.

    Args:
        fim: how it was rearranged for fill-in-the-middle, one of `infilling.ORDERS`; None: it was not.
    """

    source: str
    split: Split
    number: int
    text: str
    tokens: list[ShownToken]
    fim: str | None = None


def random_documents(prepared: Prepared, split: Split, count: int, seed: int) -> Iterator[ShownDocument]:
    """Documents of a split, each with the same probability, in their order.

    Args:
        prepared: the opened folder.
        split: split of the documents.
        count: number of documents; all of them if there are fewer.
        seed: seed of the choice.

    Raises:
        UserError: the split is empty.
    """
    total = prepared.manifest.counts(split).documents
    if not total:
        raise UserError(f"split {split} is empty", where="--split", rule="the split must have documents")
    chosen = sorted(random.Random(seed).sample(range(total), min(count, total)))
    tokenizer = prepared.tokenizer()
    record = prepared.manifest.tokenizer
    labels = [source.label for source in prepared.manifest.sources if source.splits[split].documents]
    first = 0
    for label, tokens in zip(labels, token_files(prepared, split), strict=True):
        for place in [place for place in chosen if first <= place < first + len(tokens)]:
            number = place - first
            ids = [int(token) for token in tokens[number]]
            counted = _counted(prepared, tokens, number)
            shown = [
                ShownToken(token, _text(tokenizer.backend, token), loss, token == record.eod)
                for token, loss in zip(ids, counted, strict=True)
            ]
            text = str(tokenizer.backend.decode(ids, skip_special_tokens=False))
            order = order_of(text_ids(ids, record.eod, record.prefix or ()), record.fim)
            yield ShownDocument(label, split, number, text, shown, order)
        first += len(tokens)


def runs(prepared: Prepared, tokens: Iterable[ShownToken]) -> list[tuple[bool, str]]:
    """Text of adjacent tokens that count for the loss, or that do not, each with whether they do."""
    backend = prepared.tokenizer().backend
    return [
        (loss, str(backend.decode([token.id for token in group], skip_special_tokens=False)))
        for loss, group in groupby(tokens, key=lambda token: token.loss)
    ]


def _text(backend: object, token: int) -> str:
    return str(backend.decode([token], skip_special_tokens=False))  # type: ignore[attr-defined]


def _counted(prepared: Prepared, tokens: IndexedDataset, number: int) -> list[bool]:
    """Which tokens of a document the loss counts: of a conversation those of answers, else all."""
    lengths = tokens.sequence_lengths
    if prepared.manifest.chat is None:
        return [True] * int(lengths[number])
    answers = TokenFile(Path(f"{tokens.path_prefix}.answers"))
    start = int(lengths[:number].sum(dtype=np.int64))
    return [value == 1 for value in answers.read(np.uint8, int(lengths[number]), start)]


def _rearranged(changed: Mapping[str, int]) -> list[str]:
    return [order for order in ORDERS if order in changed]


@dataclass(frozen=True)
class LengthBin:
    """Documents by their tokens: those from `least` to less than twice as many."""

    least: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class DroppedBy:
    """What a step did to a source: documents dropped, of which by each rule; kept ones that it changed; an example."""

    step: str
    dropped: int
    rules: dict[str, int]
    changed: int
    example: str | None


@dataclass(frozen=True)
class SourceStats:
    """A source: documents read and kept, tokens, bytes of text, what was dropped."""

    label: str
    read: int
    documents: int
    tokens: int
    bytes: int
    dropped: list[DroppedBy]

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text a token, end tokens included; None of a source that has only tokens."""
        return self.bytes / self.tokens if self.tokens and self.bytes else None


@dataclass(frozen=True)
class Languages:
    """Languages of evenly spaced documents of all splits: documents by code, the most frequent first."""

    documents: int
    by_code: dict[str, int]


@dataclass(frozen=True)
class Domains:
    """Hosts in the column `url` of a source's first rows: rows by host, the most frequent first."""

    source: str
    rows: int
    hosts: int
    by_host: dict[str, int]


@dataclass(frozen=True)
class DataStats:
    """Figures of a prepared folder.

    Args:
        languages: None: the package of the step `language` is not installed, or they were not asked for.
        domains: domains of the sources that have the column and are on this machine.
    """

    sources: list[SourceStats]
    lengths: list[LengthBin]
    languages: Languages | None = None
    domains: list[Domains] = field(default_factory=list)


def stats(prepared: Prepared) -> DataStats:
    """Figures of a folder, from its manifest, the lengths in its indices, and its samples of dropped documents.

    Raises:
        UserError: the samples differ from the manifest.
    """
    examples: dict[tuple[str, str], str] = {}
    if SAMPLES in prepared.manifest.files:
        prepared.check([SAMPLES], logger.info)
        for line in untrusted.read(prepared.path / SAMPLES, root=prepared.path).splitlines():
            sample = json.loads(line)
            examples.setdefault((sample["source"], sample["step"]), sample["text"])
    statistics = []
    for source in prepared.manifest.sources:
        counts = {"empty": source.empty, "undecodable": source.undecodable, "duplicates": source.duplicates}
        dropped = [
            DroppedBy(
                step,
                count,
                {key.partition(".")[2]: value for key, value in source.rules.items() if key.startswith(f"{step}.")},
                source.changed.get(step, 0),
                examples.get((source.label, step)),
            )
            for step, count in {**counts, **source.steps, **dict.fromkeys(_rearranged(source.changed), 0)}.items()
        ]
        of_splits = source.splits.values()
        documents, tokens, size = (sum(getattr(c, key) for c in of_splits) for key in ("documents", "tokens", "bytes"))
        size = size if source.splits["train"].bytes else 0
        statistics.append(SourceStats(source.label, source.read, documents, tokens, size, dropped))
    documents_of, tokens_of = Counter[int](), Counter[int]()
    for split in SPLITS:
        for file in token_files(prepared, split):
            powers = np.frexp(file.sequence_lengths)[1] - 1  # of a length from 2^k on: k
            for power in np.unique(powers):
                members = file.sequence_lengths[powers == power]
                documents_of[int(power)] += len(members)
                tokens_of[int(power)] += int(members.sum(dtype=np.int64))
    return DataStats(
        statistics, [LengthBin(1 << power, documents_of[power], tokens_of[power]) for power in sorted(documents_of)]
    )


LANGUAGE_SAMPLE, LANGUAGE_CHARACTERS = 500, 2000
"""Documents whose language is detected, and characters of each."""
URL_KEY = "url"
URL_ROWS = 100_000
MOST_HOSTS = 20


def languages(prepared: Prepared) -> Languages | None:
    """Detect the language of some documents, from their tokens, by the model of the step `language`."""
    if find_spec("py3langid") is None:
        return None
    from llmrecipes.data.steps.quality import classifier_of_languages

    classify = classifier_of_languages()
    tokenizer = prepared.tokenizer()
    record = prepared.manifest.tokenizer
    total = sum(prepared.manifest.counts(split).documents for split in SPLITS)
    stride = max(1, total // LANGUAGE_SAMPLE)
    order = 0
    codes = Counter[str]()
    for split in SPLITS:
        for file in token_files(prepared, split):
            for number in range(-order % stride, len(file), stride):
                # No character has more than four tokens: `LANGUAGE_CHARACTERS` are in these.
                ids = text_ids(file[number], record.eod, record.prefix or ())
                tokens = restored(ids, record.fim)[: 4 * LANGUAGE_CHARACTERS]
                codes[classify(tokenizer.decode(tokens)[:LANGUAGE_CHARACTERS])[0]] += 1
            order += len(file)
    return Languages(sum(codes.values()), dict(codes.most_common()))


def domains(recipe_sources: Iterable[Source]) -> list[Domains]:
    """Count hosts in the first rows of sources that have a column `url`; sources elsewhere are left out."""
    by_source = []
    for source in recipe_sources:
        if source.type not in ("jsonl", "parquet"):
            continue
        hosts, rows = Counter[str](), 0
        try:
            for url in islice(sources.documents(source.model_copy(update={"text_key": URL_KEY})), URL_ROWS):
                rows += 1
                hosts[_host(url or "")] += 1
        except UserError:
            if not rows:
                continue  # no such column, or the source is not on this machine
        hosts.pop("", None)
        if hosts:
            by_source.append(Domains(sources.label(source), rows, len(hosts), dict(hosts.most_common(MOST_HOSTS))))
    return by_source


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").removeprefix("www.")
    except ValueError:
        return ""
