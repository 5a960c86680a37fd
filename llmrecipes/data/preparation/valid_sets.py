"""Held-out sets of `data.valid_sources`: their tokens, and the step that keeps their documents out of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from llmrecipes.data.folder.data_manifest import Counts, valid_stem
from llmrecipes.data.preparation.corpus import EncoderSpec
from llmrecipes.data.sources import sources
from llmrecipes.data.steps.copies import Duplicates, NearDuplicates
from llmrecipes.data.steps.split import digest
from llmrecipes.data.steps.steps import Step
from llmrecipes.data.tokens.encode import Encode, encoder
from llmrecipes.data.tokens.infilling import cut, encode_cut, fim_rate
from llmrecipes.errors import UserError
from llmrecipes.recipe.sections.source import AnyValidSource, make_valid_source

_BATCH = 256  # documents that are tokenized at once


def excluding(sets: list[dict[str, Any]], near: dict[str, Any] | None) -> Step:
    """Drop documents of held-out sets, counted by the set's label.

    They are equal but for case, digits, punctuation, accents and white space or, with the settings of a step
    `near_duplicates`, near-copies. Every process reads the sets.

    Args:
        sets: items of `data.valid_sources`.
        near: settings of `NearDuplicates`.
    """
    equal = Duplicates()
    labels: dict[bytes, str] = {}
    copies = {set_["label"]: NearDuplicates(**near) for set_ in sets} if near else {}
    for set_ in sets:
        source = make_valid_source(**set_)
        for text in () if source.tokenized else _texts(source):
            labels.setdefault(equal.mark(text), set_["label"])
            if near:
                copies[set_["label"]].add(copies[set_["label"]].mark(text))

    def step(texts: list[str]) -> list[str] | str:
        text = "\n".join(texts)
        if label := labels.get(equal.mark(text)):
            return label
        if copies:
            mark = next(iter(copies.values())).mark(text)
            return next((label for label, index in copies.items() if index.similar(mark)), texts)
        return texts

    return step


def write_sets(folder: Path, sets: tuple[AnyValidSource, ...], spec: EncoderSpec, seq_length: int) -> dict[str, Counts]:
    """Tokenize the sets, in this process; documents stay as they are. Sets of tokens are copied.

    Args:
        folder: receives `valid-LABEL.bin` and `.idx`, and `.sha256` with a hash of each document.
        sets: to write.
        spec: how documents are tokenized.
        seq_length: tokens of a sample.

    Returns:
        What was written, by label.

    Raises:
        UserError: a set is shorter than one sequence, or a set of tokens is damaged.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from llmrecipes.data.preparation.token_sets import documents as stored

    content = spec.tokenizer.read_text(encoding="utf-8")
    encode = encoder(content, spec.eod, spec.dtype, by_word=spec.by_word, prefix=spec.prefix)
    written: dict[str, Counts] = {}
    for number, held_out in enumerate(sets):
        prefix = folder / valid_stem(held_out.label)
        documents = tokens = size = 0
        with ExitStack() as stack:
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(spec.dtype).type)
            stack.callback(builder.data_file.close)
            digests = stack.enter_context(Path(f"{prefix}.sha256").open("wb"))
            read = stored(held_out, spec) if held_out.tokenized else _encoded(held_out, spec, encode)
            for ids, identity, bytes_of_text in read:
                if held_out.max_tokens is not None and tokens >= held_out.max_tokens:
                    break
                builder.add_document(ids, [len(ids)])
                digests.write(identity)
                documents = documents + 1
                tokens = tokens + len(ids)
                size = size + bytes_of_text
            builder.finalize(f"{prefix}.idx")
        if tokens <= seq_length:
            raise UserError(
                f"the held-out set {held_out.label!r} has {tokens:,} tokens",
                where=f"data.valid_sources[{number}]",
                rule=f"one sequence takes {seq_length + 1:,} (model.seq_length + 1)",
                fix="add text to the set, remove it, or lower model.seq_length",
            )
        written[held_out.label] = Counts(documents=documents, tokens=tokens, bytes=size)
    return written


def _encoded(source: AnyValidSource, spec: EncoderSpec, encode: Encode) -> Iterator[tuple[np.ndarray, bytes, int]]:
    """The documents of a set of texts: ids, hash of the text, and its bytes."""
    fim = spec.fim
    for batch in _batches(_texts(source)):
        if fim is not None and (rate := fim_rate(source)):
            cuts = [cut(len(t.decode()), digest(t), rate, fim.spm_rate, fim.seed) for t in batch]
            encoded = encode_cut(batch, cuts, fim.ids, encode, len(spec.prefix))
        else:
            encoded = encode(batch)
        ids = np.frombuffer(encoded.ids, spec.dtype)
        start = 0
        for text, length in zip(batch, encoded.lengths, strict=True):
            yield ids[start : start + length], digest(text), len(text)
            start += length


def bits_per_byte(loss: float, counts: Counts) -> float:
    """A mean loss in nats per token, as bits per byte of the text that has these counts."""
    return loss / math.log(2) * counts.tokens / counts.bytes


def _texts(source: AnyValidSource) -> Iterator[str]:
    for text in sources.documents(source):
        if text and not text.isspace():
            yield text


def _batches(texts: Iterator[str]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for text in texts:
        batch.append(text.encode())
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
