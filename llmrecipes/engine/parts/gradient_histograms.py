"""Histograms of gradients and weights with bins that are the same for all ranks: by sign and power of two.

The power is the exponent of a number in fp32, so a value is in one bin by its bits, and counts of ranks add up exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

LOW, HIGH = -48, 8
"""Exponents of the smallest and the largest magnitudes with a bin: 2^LOW up to 2^(LOW + 1), … Smaller ones count as
zero, larger ones as the largest."""
_SIDE = HIGH - LOW + 1
BINS = 2 * _SIDE + 1
"""Negative ones from the largest magnitude to the smallest, zero, positive ones."""
_MOST = 1 << 24
"""Values that are counted at once: fp32 counts no further exactly."""


def count(row: torch.Tensor, values: torch.Tensor) -> None:
    """Add values of any shape and type to a row of counts [BINS] in fp64; the host does not wait."""
    for part in values.detach().flatten().split(_MOST):
        bits = part.float().view(torch.int32)
        place = ((bits >> 23) & 255).sub_(126 + LOW).clamp_(0, _SIDE)
        signed = torch.where(bits < 0, -place, place).float()
        with _in_any_order():
            row += torch.histc(signed, BINS, -_SIDE - 0.5, _SIDE + 0.5)


@contextmanager
def _in_any_order() -> Iterator[None]:
    """A block in which torch does not refuse `histc` on CUDA: sums of so few ones are the same in any order."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def histogram(counts: list[float]) -> Mapping[str, Any] | None:
    """A row of counts as values of JSON; None: there are none.

    Returns:
        `negative` and `positive`: counts by magnitude, from 2^`low` up to 2^(`low` + 1) first; `zero`: of smaller ones.
    """
    negative = counts[:_SIDE][::-1]
    zero = counts[_SIDE]
    positive = counts[_SIDE + 1 :]
    used = [place for place in range(_SIDE) if negative[place] or positive[place]]
    if not used:
        return {"low": LOW, "negative": [], "zero": int(zero), "positive": []} if zero else None
    first, last = used[0], used[-1] + 1
    sides = {"negative": negative, "positive": positive}
    return {"low": LOW + first, "zero": int(zero)} | {
        name: [int(count) for count in side[first:last]] for name, side in sides.items()
    }
