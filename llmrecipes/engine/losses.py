"""Losses of several batches."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_over_tokens(losses: Sequence[tuple[float, float]]) -> float:
    """Mean loss per token of several batches.

    Args:
        losses: mean loss of each, and the tokens that it counts.
    """
    counts = {tokens for _, tokens in losses}
    if len(counts) == 1:
        return math.fsum(loss for loss, _ in losses) / len(losses)
    return math.fsum(loss * tokens for loss, tokens in losses) / max(math.fsum(tokens for _, tokens in losses), 1.0)
