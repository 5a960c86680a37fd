"""Perplexity and bits per byte of documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from llmrecipes.errors import UserError
from llmrecipes.evaluation.lead import RankZeroScorer
from llmrecipes.evaluation.request import EvaluationResult
from llmrecipes.evaluation.texts import Text


def perplexity(
    lead: RankZeroScorer,
    name: str,
    texts: Iterable[Text],
    *,
    length: int,
    stride: int,
    text_bytes: int | None = None,
    count: int | None = None,
) -> EvaluationResult:
    """Score every token of every document, each document by itself after an end-of-document token.

    The end token after a document is not scored. With L the sum of the tokens' negative log-probabilities in nats:
    loss = L / tokens, perplexity = e^loss, bits per byte = L / (ln 2 × bytes); the last is comparable between
    tokenizers (arXiv 2101.00027, section 3.1), the others are not.

    Args:
        lead: the model.
        name: of the data.
        texts: documents; read once.
        length: tokens that are read at once.
        stride: 1 to `length`; see `windows`.
        text_bytes: of all documents; None: counted.
        count: of documents, if it is known, to show progress.

    Raises:
        UserError: there is no document.
    """
    eod = lead.tokenizer.eod
    documents = tokens = total_bytes = 0

    def rows() -> Iterator[tuple[list[int], int]]:
        nonlocal documents, tokens, total_bytes
        for text in texts:
            documents, tokens, total_bytes = documents + 1, tokens + len(text.tokens), total_bytes + text.bytes
            yield from windows([eod, *text.tokens], length, stride)
            lead.count(1)

    lead.begin(count)
    nats = math.fsum(value for row in lead.score(rows()) for value in row.logprobs)
    if not tokens:
        raise UserError(f"{name!r} has no tokens", where="--data", rule="an evaluation has at least one document")
    size = total_bytes if text_bytes is None else text_bytes
    loss = -nats / tokens
    metrics = {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": -nats / math.log(2) / size if size else math.nan,
    }
    settings = {"documents": documents, "tokens": tokens, "bytes": size, "window": length, "stride": stride}
    return EvaluationResult(name, metrics, settings)


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Rows that together score each token of a document, but the first, exactly once.

    The first row scores up to `length` tokens. Each further one scores the next `stride`, after as many earlier tokens
    as fit: a token there is predicted from at least `length` - `stride` + 1 others. With a stride of `length` the rows
    are those of lm-evaluation-harness's `loglikelihood_rolling`.

    Args:
        tokens: of the document, after one that is only read.
        length: tokens that the model can read at once.
        stride: 1 to `length`.

    Yields:
        A row of 2 to `length` + 1 tokens, and how many of its last ones it scores.
    """
    end = 1  # tokens[:end] are read or scored
    size = length
    while end < len(tokens):
        scored = min(size, len(tokens) - end)
        end += scored
        yield list(tokens[max(0, end - length - 1) : end]), scored
        size = stride
