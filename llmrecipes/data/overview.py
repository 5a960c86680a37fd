"""What people look at in a prepared folder: single documents with what the loss sees, and figures of all of them."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes import untrusted
from llmrecipes.data.documents import TokenFile, token_files
from llmrecipes.data.prepared import Prepared
from llmrecipes.data.split import SPLITS, Split
from llmrecipes.data.write import SAMPLES
from llmrecipes.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownToken:
    """A token of a document.

    Args:
        text: of the id by itself; of an incomplete character U+FFFD.
        loss: whether its prediction counts for the loss.
        end: it ends the document.
    """

    id: int
    text: str
    loss: bool
    end: bool


@dataclass(frozen=True)
class ShownDocument:
    """A document as it is in the token files."""

    source: str
    split: Split
    number: int
    text: str
    tokens: list[ShownToken]


def random_documents(prepared: Prepared, split: Split, count: int, seed: int) -> Iterator[ShownDocument]:
    """Documents of a split, each with the same probability, in their order.

    Args:
        prepared: the opened folder.
        split: of the documents.
        count: of documents; all of them if there are fewer.
        seed: of the choice.

    Raises:
        UserError: the split is empty.
    """
    total = prepared.manifest.counts(split).documents
    if not total:
        raise UserError(f"the split {split} is empty", where="--split", rule="a split with documents is shown")
    chosen = sorted(random.Random(seed).sample(range(total), min(count, total)))
    tokenizer, eod = prepared.tokenizer(), prepared.manifest.tokenizer.eod
    labels = [source.label for source in prepared.manifest.sources if source.splits[split].documents]
    first = 0
    for label, tokens in zip(labels, token_files(prepared, split), strict=True):
        for place in [place for place in chosen if first <= place < first + len(tokens)]:
            number = place - first
            ids = [int(token) for token in tokens[number]]
            counted = _counted(prepared, tokens, number)
            shown = [
                ShownToken(token, _text(tokenizer.backend, token), loss, token == eod)
                for token, loss in zip(ids, counted, strict=True)
            ]
            yield ShownDocument(
                label, split, number, str(tokenizer.backend.decode(ids, skip_special_tokens=False)), shown
            )
        first += len(tokens)


def _text(backend: object, token: int) -> str:
    return str(backend.decode([token], skip_special_tokens=False))  # type: ignore[attr-defined]


def _counted(prepared: Prepared, tokens: IndexedDataset, number: int) -> list[bool]:
    """Which tokens of a document the loss counts: of a conversation those of answers, else all."""
    lengths = tokens.sequence_lengths
    if prepared.manifest.chat is None:
        return [True] * int(lengths[number])
    answers = TokenFile(Path(f"{tokens.path_prefix}.answers"))
    start = int(lengths[:number].sum(dtype=np.int64))
    return [bool(value) for value in answers.read(np.uint8, int(lengths[number]), start)]


@dataclass(frozen=True)
class Lengths:
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
        """Bytes of text a token, end tokens included."""
        return self.bytes / self.tokens if self.tokens else None


@dataclass(frozen=True)
class DataStats:
    """Figures of a prepared folder."""

    sources: list[SourceStats]
    lengths: list[Lengths]


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
    made = []
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
            for step, count in {**counts, **source.steps}.items()
        ]
        every = source.splits.values()
        documents, tokens, size = (sum(getattr(c, key) for c in every) for key in ("documents", "tokens", "bytes"))
        made.append(SourceStats(source.label, source.read, documents, tokens, size, dropped))
    documents_of, tokens_of = Counter[int](), Counter[int]()
    for split in SPLITS:
        for file in token_files(prepared, split):
            powers = np.frexp(file.sequence_lengths)[1] - 1  # of a length from 2^k on: k
            for power in np.unique(powers):
                members = file.sequence_lengths[powers == power]
                documents_of[int(power)] += len(members)
                tokens_of[int(power)] += int(members.sum(dtype=np.int64))
    return DataStats(
        made, [Lengths(1 << power, documents_of[power], tokens_of[power]) for power in sorted(documents_of)]
    )
