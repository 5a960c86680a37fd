"""A loss that explodes and stays finite: training continues, somebody should look."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

WINDOW = 50
"""Losses that the usual one is the median of."""
FEWEST = 20
"""Losses that it takes to know how much they vary."""
NATS, FIRST_NATS = 1.0, 3.0
"""Smallest rise that is an alarm (1 nat is e times the perplexity), and the one before so many losses are known."""
DEVIATIONS = 10.0
"""Robust standard deviations below which a rise is noise of small batches."""
TO_STANDARD_DEVIATION = 1.4826 / math.sqrt(2)
"""Of a normal distribution, from the median of the absolute difference of two draws."""


@dataclass(frozen=True)
class Spike:
    """A loss far above the usual one.

    Args:
        loss: of this step, nats per token.
        usual: lowest median of up to 50 losses in a row since the start.
        limit: what it may be at most.
    """

    loss: float
    usual: float
    limit: float


class LossWatch:
    """Raises an alarm once where the loss leaves its course upwards, and again only after it has come back.

    The limit is the lowest running median so far, plus one nat or ten robust standard deviations of the last losses,
    whichever is more; plus three nats until 20 losses are known. A loss that falls, the noise of small batches and a
    warm-up stay below it; a jump and a slow rise do not. It starts anew with every start of a run.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._usual = float("inf")
        self._alarmed = False

    def add(self, loss: float) -> Spike | None:
        """Take the loss of a step; a spike where it is the first one too high. NaN and infinity are not for here."""
        spike = self._judge(loss)
        if not self._alarmed:  # a spike is not part of what is usual
            self._losses.append(loss)
        return spike

    def _judge(self, loss: float) -> Spike | None:
        if not self._losses:
            return None
        median = statistics.median(self._losses)
        self._usual = min(self._usual, median)
        rise = max(NATS, DEVIATIONS * self._deviation()) if len(self._losses) >= FEWEST else FIRST_NATS
        if self._alarmed:
            self._alarmed = loss > self._usual + rise / 2
            return None
        # Not `<=`: what is not finite stops the run, and is not reported twice.
        self._alarmed = self._usual + rise < loss < float("inf")
        return Spike(loss, self._usual, self._usual + rise) if self._alarmed else None

    def _deviation(self) -> float:
        """Robust standard deviation, from one step to the next, so that the slope of the curve is not part of it."""
        return TO_STANDARD_DEVIATION * statistics.median(abs(later - loss) for loss, later in pairwise(self._losses))
