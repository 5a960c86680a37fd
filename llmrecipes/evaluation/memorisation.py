"""What a model repeats of its training data word for word."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from llmrecipes.data.documents import token_files, token_stream, without_end
from llmrecipes.data.prepared import Prepared
from llmrecipes.data.split import Split
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.evaluation.lead import Lead
from llmrecipes.evaluation.repetition import ngrams
from llmrecipes.evaluation.result import Result

GREEDY = Sampling(temperature=0.0, top_k=0)
NGRAM = 13
"""Tokens of an n-gram that is looked up in the training data; GPT-3's had 13 words (arXiv 2005.14165, appendix C)."""
BASE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that the hash of an n-gram is a bijection in each of its tokens."""


def memorisation(
    lead: Lead, prepared: Prepared, *, prefix: int, length: int, samples: int, seed: int, heldout: Split = "valid"
) -> Result:
    """Give the model pieces of training documents, and compare its greedy continuation with the document's own.

    A piece is extractable if the next `length` tokens are all reproduced from `prefix` tokens of context (definition
    3.1 of arXiv 2202.07646, which takes 50 and 50). Pieces of held-out documents, which the model has not seen, are the
    baseline: what is reproduced there is predictable, not memorised.

    The n-grams of the continuations of held-out pieces are looked up in the training data, and beside them those of the
    held-out documents themselves: text shares n-grams with other text by chance and by quotation.

    Memory: the n-grams that are looked up, about 120 bytes each. The training tokens are read once, in pieces.

    Args:
        lead: the model.
        prepared: the run's data.
        prefix: tokens of context.
        length: tokens to reproduce.
        samples: pieces of each split.
        seed: of the choice of documents, and of the places in them.
        heldout: split of the baseline.

    Raises:
        UserError: a split has no document that is long enough.
    """
    metrics: dict[str, float] = {}
    counts: dict[str, int] = {}
    new: dict[str, list[list[int]]] = {}
    own: dict[str, list[list[int]]] = {}
    for name, split in (("train", "train"), ("heldout", heldout)):
        pieces = draw_pieces(prepared, split, prefix + length, samples, seed)  # type: ignore[arg-type]
        own[name] = [piece[prefix:] for piece in pieces]
        new[name] = lead.extend([piece[:prefix] for piece in pieces], [length] * len(pieces), GREEDY)
        agreeing = [same_beginning(one, other) for one, other in zip(new[name], own[name], strict=True)]
        counts[name] = len(pieces)
        metrics[f"{name}_extractable"] = sum(each == length for each in agreeing) / len(pieces)
        metrics[f"{name}_agreeing_tokens"] = sum(agreeing) / len(pieces)
    n = min(NGRAM, length)
    asked = {"generated": new["heldout"], "heldout_text": own["heldout"]}
    wanted = {gram for texts in asked.values() for tokens in texts for gram in ngrams(tokens, n)}
    known = found_in_training(prepared, wanted, n)
    for name, texts in asked.items():
        every = [gram for tokens in texts for gram in ngrams(tokens, n)]
        metrics[f"{name}_in_train_{n}"] = sum(gram in known for gram in every) / len(every) if every else 0.0
    settings = {"pieces": counts, "prefix": prefix, "length": length, "ngram": n, "seed": seed, "heldout": heldout}
    return Result("memorisation", metrics, settings)


def draw_pieces(prepared: Prepared, split: Split, length: int, samples: int, seed: int) -> list[list[int]]:
    """Pieces of different documents of a split, at random places; all documents of a source are equally likely.

    Raises:
        UserError: no document is long enough.
    """
    draw = random.Random(seed)
    places = [
        (file, n) for file in token_files(prepared, split) for n in np.flatnonzero(file.sequence_lengths > length)
    ]
    draw.shuffle(places)
    pieces = []
    for file, number in places[:samples]:
        ids = without_end(file[int(number)], prepared.manifest.tokenizer.eod)
        start = draw.randrange(len(ids) - length + 1)
        pieces.append(ids[start : start + length])
    if not pieces:
        raise UserError(
            f"no document of the split {split} has {length} tokens",
            where="--check memorisation",
            rule="context and continuation are cut from a document",
            fix="smaller --prefix or --length",
        )
    return pieces


def same_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that are equal."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def found_in_training(prepared: Prepared, wanted: Iterable[tuple[int, ...]], n: int) -> set[tuple[int, ...]]:
    """Those of some n-grams that occur in the training documents; one pass over the tokens."""
    grams = {int(value): gram for gram in wanted for value in hashes(np.array(gram), n)}
    keys = np.array(sorted(grams), dtype=np.uint64)
    found: set[tuple[int, ...]] = set()
    if not len(keys):
        return found
    for tokens in token_stream(prepared, "train", overlap=n - 1):
        values = hashes(tokens, n)
        place = np.searchsorted(keys, values).clip(max=len(keys) - 1)
        for start in np.flatnonzero(keys[place] == values):
            gram = tuple(tokens[start : start + n].tolist())
            if grams[int(values[start])] == gram:  # two n-grams may have one hash
                found.add(gram)
    return found


def hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """Polynomial hash modulo 2^64 of each n-gram of a text, [tokens - n + 1]."""
    if len(tokens) < n:
        return np.zeros(0, dtype=np.uint64)
    wide = tokens.astype(np.uint64)
    total = np.zeros(len(tokens) - n + 1, dtype=np.uint64)
    for offset in range(n):
        total = total * BASE + wide[offset : offset + len(total)]
    return total
