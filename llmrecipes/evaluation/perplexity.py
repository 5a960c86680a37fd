"""Perplexity and bits per byte of documents."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

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
    each: Callable[[float, int], None] = lambda _nats, _tokens: None,
) -> EvaluationResult:
    """Score every token of every document, each document by itself after what precedes a document in training.

    The end token after a document is not scored. With L the sum of the tokens' negative log-probabilities in nats:
    loss = L / tokens, perplexity = e^loss, bits per byte = L / (ln 2 × bytes); the last is comparable between
    tokenizers (arXiv 2101.00027, section 3.1), the others are not.

    Args:
        lead: the model.
        name: name of the data.
        texts: documents; read once.
        length: tokens that are read at once.
        stride: 1 to `length`; see `windows`.
        text_bytes: size in bytes of all documents; None: counted.
        count: number of documents, if it is known, to show progress.
        each: receives L and the tokens of each document, in order.

    Raises:
        UserError: there is no document.
    """
    documents = tokens = total_bytes = 0

    def nats() -> Iterator[float]:
        nonlocal documents, tokens, total_bytes
        for text, value in document_nats(lead, texts, length=length, stride=stride):
            documents = documents + 1
            tokens = tokens + len(text.tokens)
            total_bytes = total_bytes + text.bytes
            each(value, len(text.tokens))
            yield value

    lead.begin(count)
    total = math.fsum(nats())
    if not tokens:
        raise UserError(f"{name!r} has no tokens", where="--data", rule="an evaluation needs at least one document")
    size = total_bytes if text_bytes is None else text_bytes
    loss = total / tokens
    metrics = {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": total / math.log(2) / size if size else math.nan,
    }
    settings = {"documents": documents, "tokens": tokens, "bytes": size, "window": length, "stride": stride}
    return EvaluationResult(name, metrics, settings)


def document_nats(
    lead: RankZeroScorer, texts: Iterable[Text], *, length: int, stride: int
) -> Iterator[tuple[Text, float]]:
    """L of each document, in order; what is waiting is the documents of the rows that are scored together.

    The arguments are those of `perplexity`.
    """
    waiting: deque[tuple[Text, int]] = deque()
    start = lead.tokenizer.start

    def rows() -> Iterator[tuple[list[int], int]]:
        for text in texts:
            beyond = len(text.tokens) + len(start) - 1 - length
            waiting.append((text, 1 + max(0, -(-beyond // stride)) if text.tokens else 0))
            yield from windows([*start, *text.tokens], length, stride, len(start))
            lead.count(1)

    parts: list[float] = []
    for row in lead.score(rows()):
        while not waiting[0][1]:
            yield waiting.popleft()[0], 0.0
        parts.append(-math.fsum(row.logprobs))
        if len(parts) == waiting[0][1]:
            yield waiting.popleft()[0], math.fsum(parts)
            parts = []
    yield from ((text, 0.0) for text, _ in waiting)


def windows(tokens: Sequence[int], length: int, stride: int, given: int = 1) -> Iterator[tuple[list[int], int]]:
    """Rows that together score each token of a document, but those given, exactly once.

    The first row scores as many tokens as fit. Each further one scores the next `stride`, after as many earlier tokens
    as fit: a token there is predicted from at least `length` - `stride` + 1 others. With a stride of `length` the rows
    are those of lm-evaluation-harness's `loglikelihood_rolling`.

    Args:
        tokens: tokens of the document, after `given` ones that are only read.
        length: tokens that the model can read at once.
        stride: 1 to `length`.
        given: tokens at the beginning, 1 to `length`.

    Yields:
        A row of 2 to `length` + 1 tokens, and how many of its last ones it scores.
    """
    end = given  # tokens[:end] are read or scored
    size = length + 1 - given
    while end < len(tokens):
        scored = min(size, len(tokens) - end)
        end += scored
        yield list(tokens[max(0, end - length - 1) : end]), scored
        size = stride
