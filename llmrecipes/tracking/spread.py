"""Minimum, median and maximum of a number over ranks or nodes, and where the extremes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Where = Literal["rank", "node"]
SHOWN = ("min", "median", "max")
"""What trackers get of a spread, and the ranks of the extremes; names of nodes are in metrics.jsonl only."""
_RANKS = ("min_rank", "max_rank")


def spread(values: NDArray[np.float64], where: Where, names: Sequence[str] | None = None) -> dict[str, Any] | None:
    """The spread of [ranks] values; NaN are absent ones. None: there is not one.

    Args:
        where: `rank` or `node`, in the keys of the places.
        names: names of the places; None: their numbers.
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
        for which in (*SHOWN, *_RANKS)
        if which in each
    }
    energy = values.get("energy") or {}
    metrics |= {f"energy/{name}": float(value) for name, value in energy.items() if name != "method"}
    return metrics | _layer_metrics(values.get("layers") or {})


MOST_LAYERS = 32
"""Up to this many layers have a curve each; of more, trackers get least, median and most."""


def _layer_metrics(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """`layers/grad_norm/layer_01/mlp_fc1`, `layers/grad_norm/embedding` …, or `layers/grad_norm/mlp_fc1_max` …"""
    metrics: dict[str, float] = {}
    for measure, kinds in layers.items():
        for kind, value in kinds.items():
            if not isinstance(value, list | tuple):
                metrics[f"layers/{measure}/{kind}"] = float(value)
                continue
            known = {number: float(each) for number, each in enumerate(value, 1) if each is not None}
            if len(value) <= MOST_LAYERS:
                metrics |= {f"layers/{measure}/layer_{number:02d}/{kind}": each for number, each in known.items()}
            else:
                numbers = [*known.values()]
                extremes = min(numbers), float(np.median(numbers)), max(numbers)
                metrics |= {
                    f"layers/{measure}/{kind}_{which}": each for which, each in zip(SHOWN, extremes, strict=True)
                }
    return metrics
