"""Ranks whose own work takes longer than that of others with the same work.

The step takes the same time on all ranks, so a slow one shows only in the time that it does not wait for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

REPORTS = 2
"""Reports in a row in which a rank is slow before it is a straggler; a single one may be chance."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than those with the same work."""

    rank: int
    factor: float
    """Its own time divided by the usual one."""
    seconds: float
    """Its own time of a step."""
    usual: float
    """Median of the others'."""


def slowness(own: Floats, work: Sequence[float]) -> Floats:
    """Own time of each rank divided by the median of its peers': the other ranks of its pipeline stage.

    A stage of a single rank has none. It is compared with all others, by the time for a unit of work.

    Args:
        own: [ranks] seconds, in Megatron's order: stages are farthest apart.
        work: work of each pipeline stage, in any unit.
    """
    stages = own.reshape(len(work), -1)
    if stages.shape[1] == 1:
        stages = (own / np.asarray(work)).reshape(1, -1)
    if stages.shape[1] == 1:
        return np.ones_like(own)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.vstack([stage / _median_of_others(stage) for stage in stages]).reshape(-1)
    return np.where(np.isfinite(factors), factors, 1.0)


def _median_of_others(values: Floats) -> Floats:
    """For each value, the median of the others; sorts once, for 16,384 of them."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    places = np.empty(len(values), np.int64)
    places[order] = np.arange(len(values))
    rest = len(values) - 1
    low = (rest - 1) // 2
    high = rest // 2
    # A value at or before an index moves what comes behind it one place forward.
    return (ordered[low + (places <= low)] + ordered[high + (places <= high)]) / 2


class StragglerWatch:
    """Judges reports.

    Args:
        threshold: speed of a rank, as part of its peers', below which it is slow.
        work: work of each pipeline stage; see `slowness`.
    """

    def __init__(self, threshold: float, work: Sequence[float]) -> None:
        self._limit, self._work = 1 / threshold, tuple(work)
        self._slow: dict[int, int] = {}
        self._reported: set[int] = set()

    def add(self, own: Floats) -> tuple[Floats, list[Straggler]]:
        """Slowness of all ranks, and those that have become stragglers with this report; each once.

        Args:
            own: [ranks] seconds of a step.
        """
        factors = slowness(own, self._work)
        # Work of different stages is not known to better than some ten percent.
        alone = len(own) == len(self._work)
        limit = self._limit**2 if alone and len(own) > 1 else self._limit
        slow = {int(rank) for rank in np.flatnonzero(factors > limit)}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        new = [rank for rank, count in sorted(self._slow.items()) if count >= REPORTS and rank not in self._reported]
        self._reported.update(new)
        return factors, [
            Straggler(rank, float(factors[rank]), float(own[rank]), float(own[rank] / factors[rank])) for rank in new
        ]

    def slow_for(self, reports: int) -> list[int]:
        """Ranks that were slow in so many reports in a row, to the last one."""
        return sorted(rank for rank, count in self._slow.items() if count >= max(reports, REPORTS))
