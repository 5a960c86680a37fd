"""The step `balance`: how often each source is drawn from, from its tokens, with a temperature and a limit."""

from __future__ import annotations

from collections.abc import Sequence

from llmrecipes.errors import UserError


def balanced(
    tokens: Sequence[int], factors: Sequence[float], drawn: int, *, temperature: float, max_epochs: float
) -> list[float]:
    """Shares of the sources in training samples.

    They are in proportion to factor × tokens^(1/temperature), as in mBERT, XLM-R and mT5 (Conneau et al. 2020, arXiv
    1911.02116, section 3.1: alpha is 1/temperature). A source that would be repeated more than `max_epochs` times has
    the share that repeats it as often, and the others divide the rest in their proportion.

    Args:
        tokens: tokens of the training split of each source.
        factors: factors of each source: its `weight`.
        drawn: tokens of the run.
        temperature: 1: in proportion to the tokens; the higher, the more equal.
        max_epochs: most passes over a source.

    Returns:
        Shares with the sum 1.

    Raises:
        UserError: all sources together have fewer tokens than the run draws in so many passes.
    """
    most = [max_epochs * count / drawn for count in tokens]
    if sum(most) < 1:
        raise UserError(
            f"the run draws {drawn:,} tokens from {sum(tokens):,} training tokens: {drawn / sum(tokens):.3g} passes",
            where="data.steps[].max_epochs",
            rule=f"no source may be repeated more than max_epochs={max_epochs:g} times",
            fix="raise max_epochs, lower train.train_iters, or add sources",
        )
    wanted = [factor * count ** (1 / temperature) for count, factor in zip(tokens, factors, strict=True)]
    shares = [0.0] * len(tokens)
    free = list(range(len(tokens)))
    while True:  # each round fixes a source or ends
        rest = max(0.0, 1 - sum(shares[n] for n in range(len(tokens)) if n not in free))
        whole = sum(wanted[n] for n in free)
        for n in free:
            shares[n] = rest * wanted[n] / whole
        over = [n for n in free if shares[n] > most[n]]
        if not over:
            return shares
        for n in over:
            shares[n] = most[n]
        free = [n for n in free if n not in over]
        if not free:
            return [share / sum(shares) for share in shares]
