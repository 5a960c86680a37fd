"""Minimum, median and maximum of a number over ranks or nodes, and where the extremes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Where = Literal["rank", "node"]
SHOWN = ("min", "median", "max")
"""What trackers get of a spread; metrics.jsonl has the places too."""


def spread(values: NDArray[np.float64], where: Where, names: Sequence[str] | None = None) -> dict[str, Any] | None:
    """The spread of [ranks] values; NaN are absent ones. None: there is not one.

    Args:
        where: `rank` or `node`, in the keys of the places.
        names: of the places; None: their numbers.
    """
    present = np.flatnonzero(~np.isnan(values))
    if not len(present):
        return None
    low, high = (int(present[index]) for index in (values[present].argmin(), values[present].argmax()))
    return {
        "min": float(values[low]),
        "median": float(np.median(values[present])),
        "max": float(values[high]),
        f"min_{where}": low if names is None else names[low],
        f"max_{where}": high if names is None else names[high],
    }


def spread_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name of a step: `ranks/compute_seconds_max`, `nodes/power_watts_median`, `energy/kwh` …

    Args:
        values: a line of metrics.jsonl, or the fields of `StepMetrics`.
    """
    metrics = {
        f"{group}/{name}_{which}": float(each[which])
        for group in ("ranks", "nodes")
        for name, each in (values.get(group) or {}).items()
        for which in SHOWN
    }
    energy = values.get("energy") or {}
    return metrics | {f"energy/{name}": float(value) for name, value in energy.items() if name != "method"}
