"""How much of what a model writes repeats what it has just written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.evaluation.lead import Lead
from llmrecipes.evaluation.result import Result
from llmrecipes.evaluation.texts import Text

NGRAM = 4
"""Tokens of an n-gram, as in arXiv 1908.04319."""


def rep(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of a text's n-grams that repeat an earlier one: 1 - unique / all (seq-rep-n of arXiv 1908.04319)."""
    every = ngrams(tokens, n)
    return 1 - len(set(every)) / len(every) if every else 0.0


def distinct(texts: Iterable[Sequence[int]], n: int) -> float:
    """Different n-grams of all texts over all their n-grams (distinct-n of arXiv 1510.03055)."""
    every = [gram for tokens in texts for gram in ngrams(tokens, n)]
    return len(set(every)) / len(every) if every else 0.0


def ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """All n-grams of a text in order; none of a shorter one."""
    return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]


def repetition(
    lead: Lead, texts: Iterable[Text], *, prefix: int, length: int, samples: int, sampling: Sampling
) -> Result:
    """Continue the beginnings of documents, greedily and by sampling, and count repeated n-grams.

    The documents' own continuations, of the same length, are the yardstick: text repeats itself too.

    Args:
        lead: the model.
        texts: documents; those with `prefix` + `length` tokens are used.
        prefix: tokens of a prompt.
        length: tokens of a continuation.
        samples: documents at most.
        sampling: of the sampled continuations.

    Raises:
        UserError: no document is long enough.
    """
    beginnings = documents_of(texts, prefix + length, samples)
    prompts = [tokens[:prefix] for tokens in beginnings]
    limits = [length] * len(prompts)
    greedy = replace(sampling, temperature=0.0)
    written = {
        "greedy": lead.extend(prompts, limits, greedy),
        "sampled": lead.extend(prompts, limits, sampling),
        "text": [tokens[prefix:] for tokens in beginnings],
    }
    metrics = {}
    for kind, found in written.items():
        metrics[f"{kind}_rep_{NGRAM}"] = sum(map(rep, found)) / len(found)
        metrics |= {f"{kind}_distinct_{n}": distinct(found, n) for n in (1, 2)}
    settings = {
        "documents": len(prompts), "prefix": prefix, "length": length, "temperature": sampling.temperature,
        "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": sampling.seed,
    }  # fmt: skip
    decode = lead.tokenizer.decode
    examples = [
        {"prompt": decode(prompt), "greedy": decode(one), "sampled": decode(other)}
        for prompt, one, other in zip(prompts[:3], written["greedy"], written["sampled"], strict=False)
    ]
    return Result("repetition", metrics, settings, examples)


def documents_of(texts: Iterable[Text], length: int, samples: int) -> list[list[int]]:
    """The first tokens of the first documents that have so many.

    Raises:
        UserError: there is none.
    """
    found: list[list[int]] = []
    for text in texts:
        if len(text.tokens) >= length:
            found.append(text.tokens[:length])
            if len(found) == samples:
                break
    if not found:
        raise UserError(
            f"no document has {length} tokens",
            where="--data",
            rule="prompt and continuation are cut from a document",
            fix="smaller --prefix or --length, or other data",
        )
    return found
