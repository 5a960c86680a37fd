"""How a document that is longer than the model's window is cut into rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


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
