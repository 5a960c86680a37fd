"""An n-gram model as a baseline: what counting learns from the same tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_VOCAB = {1: 2**62, 2: 2**31, 3: 2**21}
"""Largest vocabulary for each order: an n-gram is kept as one 64-bit number."""


class KneserNey:
    """Interpolated Kneser-Ney with one discount for each order (Chen and Goodman 1998, section 2.7).

    Each order discounts its counts and gives the discounted mass to the order below; below the highest order, a
    token counts once for each different token before it. The lowest order is interpolated with a uniform one.

    Args:
        rows: [samples, length] token ids. N-grams do not cross rows.
        vocab_size: ids are below it.
        order: tokens of an n-gram: 1 to 3.

    Raises:
        ValueError: order or vocabulary too large, or no row as long as the order.
    """

    def __init__(self, rows: Ids, vocab_size: int, order: int = 3) -> None:
        if vocab_size > MAX_VOCAB.get(order, 0) or not rows.size or rows.shape[1] < order:
            raise ValueError(f"order {order}, vocabulary {vocab_size}, rows {rows.shape}")
        self._vocab = vocab_size
        self._orders: list[_Order] = []  # from unigrams up
        grams, counts = np.unique(_grams(rows, vocab_size, order), return_counts=True)
        for n in range(order, 0, -1):
            self._orders.insert(0, _Order.of(grams, counts, vocab_size))
            grams, counts = np.unique(grams % vocab_size ** (n - 1), return_counts=True)

    def probabilities(self, rows: Ids) -> Floats:
        """Probability of every token but the first of each row.

        Args:
            rows: [samples, length] token ids.

        Returns:
            [samples, length - 1]; a token near the beginning of its row has a shorter context.
        """
        chances = np.full((rows.shape[0], rows.shape[1] - 1), 1.0 / self._vocab)
        for n, order in enumerate(self._orders, 1):
            first = max(0, n - 2)  # the first token with n - 1 others before it
            grams = _grams(rows if n > 1 else rows[:, 1:], self._vocab, n)
            chances[:, first:] = order.interpolate(grams, chances[:, first:], self._vocab)
        return chances


@dataclass(frozen=True)
class _Order:
    """N-grams of one length, sorted, and their contexts."""

    grams: Ids
    shares: Floats
    """For each n-gram: its discounted count over the count of its context."""
    contexts: Ids
    left: Floats
    """For each context: the probability mass left to the order below."""

    @classmethod
    def of(cls, grams: Ids, counts: Ids, vocab: int) -> _Order:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # If none occurs exactly once the estimate is 0, and an unseen token would have probability 0.
        discount = once / (once + 2 * twice) if once else 0.5
        contexts, starts, kinds = np.unique(grams // vocab, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, starts)
        return cls(grams, (counts - discount) / np.repeat(totals, kinds), contexts, discount * kinds / totals)

    def interpolate(self, grams: Ids, below: Floats, vocab: int) -> Floats:
        """Probability of each n-gram's last token, from that of the order below; the same where the context is new."""
        share = _look_up(self.grams, self.shares, grams, 0.0)
        left = _look_up(self.contexts, self.left, grams // vocab, 1.0)
        return share + left * below


def _grams(rows: Ids, vocab: int, n: int) -> Ids:
    """[samples, length - n + 1]: each n-gram as a number to the base of the vocabulary."""
    length = rows.shape[1] - n + 1
    parts = (rows[:, k : k + length].astype(np.int64) * vocab ** (n - 1 - k) for k in range(n))
    *_, grams = itertools.accumulate(parts)
    return grams


def _look_up(keys: Ids, values: Floats, wanted: Ids, otherwise: float) -> Floats:
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], otherwise)
