"""What a model's bits per byte of held-out text are compared with: what saw as little, and what saw more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from llmrecipes.data.dataset import build
from llmrecipes.data.ngram import MAX_VOCAB, Ids, KneserNey
from llmrecipes.data.prepared import (
    Prepared,
    bytes_per_token,
    deflate_bits_per_byte,
    drawn_samples,
    gzip_bits_per_byte,
    held_out_text,
)
from llmrecipes.data.split import Split
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe

COUNTED_TOKENS = 1 << 22
"""Training tokens whose n-grams are counted, at most: two seconds and 300 MB on one core."""
SCORED_TOKENS = 1 << 18
"""Held-out tokens that an n-gram model predicts, at most."""
COMPRESSED_BYTES = 1 << 20
"""Held-out text that is compressed window by window, at most."""
GZIP_WINDOW = 1 << 15


@dataclass(frozen=True)
class Yardstick:
    """Something that predicts or compresses the held-out text."""

    name: str
    bits_per_byte: float


def cheap(recipe: Recipe, prepared: Prepared, bits_per_byte: Callable[[float], float]) -> list[Yardstick]:
    """What costs nothing at any size: guessing, and gzip of at most `COMPRESSED_BYTES`.

    Args:
        recipe: gives the model's window.
        prepared: its prepared data, with a validation split.
        bits_per_byte: turns a loss in nats per token into bits per byte.
    """
    length = recipe.model.seq_length
    window = round(length * bytes_per_token(prepared, "valid", length))
    guess = bits_per_byte(math.log(prepared.manifest.tokenizer.vocab_size))
    found = [Yardstick("guessing: every token equally likely", guess)]
    if window < GZIP_WINDOW:
        text = held_out_text(prepared, "valid", COMPRESSED_BYTES)
        name = f"gzip -9 of pieces as long as the model's window, {window:,} bytes"
        found.append(Yardstick(name, deflate_bits_per_byte(text, window)))
    whole = gzip_bits_per_byte(prepared, "valid")
    return [*found, Yardstick("gzip -9 of the whole text, which looks back 32 KiB", whole)]


def counting(recipe: Recipe, prepared: Prepared, bits_per_byte: Callable[[float], float]) -> list[Yardstick]:
    """N-gram models of the sequences that the finished run was trained on, on those that it was evaluated on.

    Reads at most `COUNTED_TOKENS`, the first ones, and says so.

    Args:
        recipe, prepared, bits_per_byte: as `cheap`.

    Raises:
        UserError: the vocabulary is too large or the sequence too short for trigrams; or, as OSError, data that was
            there a moment ago cannot be read.
    """
    vocab = prepared.manifest.tokenizer.vocab_size
    if vocab > MAX_VOCAB[3] or recipe.model.seq_length < 2:
        raise UserError(
            f"{vocab:,} token ids, sequences of {recipe.model.seq_length}",
            rule=f"trigrams are counted for at most {MAX_VOCAB[3]:,} ids, in sequences of at least 2 tokens",
        )
    seen = _rows(recipe, prepared, "train", COUNTED_TOKENS)
    held_out = _rows(recipe, prepared, "valid", SCORED_TOKENS)
    length = recipe.model.seq_length
    every = "the same" if len(seen) == drawn_samples(recipe, "train") else "the first"
    tokens = f"{every} {len(seen) * length:,} training tokens"
    names = {1: f"how often each token occurs in {tokens}", 3: f"trigrams of {tokens}"}
    return [
        Yardstick(name, bits_per_byte(float(-np.log(KneserNey(seen, vocab, order).probabilities(held_out)).mean())))
        for order, name in names.items()
    ]


def table(model: Yardstick, others: list[Yardstick]) -> Iterator[str]:
    """Lines from the worst to the best, the model marked: what is above it, it has learnt to do better."""
    for row in sorted([model, *others], key=lambda row: -row.bits_per_byte):
        yield f"{'>' if row is model else ' '} {row.bits_per_byte:6.3f}  {row.name}"


def _rows(recipe: Recipe, prepared: Prepared, split: Split, tokens: int) -> Ids:
    """[samples, seq_length + 1]: the run's first samples of a split, in their order, of at most so many tokens."""
    dataset = build(recipe, prepared, split)
    if dataset is None:
        raise ValueError(f"no {split} split")
    samples = min(drawn_samples(recipe, split), max(1, tokens // recipe.model.seq_length))
    rows = np.empty((samples, recipe.model.seq_length + 1), np.int64)
    for number in range(samples):
        sample = dataset[number]
        rows[number, :-1], rows[number, -1] = sample["tokens"], sample["labels"][-1]
    return rows
