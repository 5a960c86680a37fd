"""Loss spikes that stay finite: training continues, but raises an alarm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

WINDOW = 50
"""Losses in the running median."""
FEWEST = 20
"""Losses needed to estimate their variation."""
NATS, FIRST_NATS = 1.0, 3.0
"""Smallest rise that is an alarm (1 nat is e times the perplexity), and the one before `FEWEST` losses."""
DEVIATIONS = 10.0
"""Robust standard deviations below which a rise is the noise of small batches."""
TO_STANDARD_DEVIATION = 1.4826 / math.sqrt(2)
"""Factor from the median absolute difference of two draws of a normal distribution to its standard deviation."""


@dataclass(frozen=True)
class Spike:
    """A loss far above the usual one.

    Args:
        loss: of this step, nats per token.
        usual: lowest median of up to 50 consecutive losses since the start.
        limit: largest loss that is not a spike.
    """

    loss: float
    usual: float
    limit: float


class LossWatch:
    """Raises one alarm when the loss spikes, and another only after it has recovered.

    The limit is the lowest running median so far, plus one nat or ten robust standard deviations of the last losses,
    whichever is more; plus three nats until 20 losses are known. A falling loss, the noise of small batches and a
    warm-up stay below it; a jump and a slow rise do not. The state is reset at every start of a run.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._usual = float("inf")
        self._alarmed = False

    def add(self, loss: float) -> Spike | None:
        """Add the loss of a step; returns a spike at the first one above the limit; never for NaN or infinity."""
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
        # A non-finite loss stops the run elsewhere, and is not reported twice.
        self._alarmed = self._usual + rise < loss < float("inf")
        return Spike(loss, self._usual, self._usual + rise) if self._alarmed else None

    def _deviation(self) -> float:
        """Robust standard deviation of step-to-step changes, so that the slope of the curve does not count."""
        return TO_STANDARD_DEVIATION * statistics.median(abs(later - loss) for loss, later in pairwise(self._losses))
