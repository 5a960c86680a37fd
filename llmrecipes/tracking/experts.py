"""Expert balance: when it is measured, and as scalar metrics for tools that draw curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmrecipes.recipe.schema import Recipe

STEPS_BETWEEN = 10
"""Steps between measurements, which compute every router's probabilities once more and sum counts over all ranks."""
MOST_CURVES = 16
"""Up to this many experts of a layer get a curve each; with more, only minimum and maximum are drawn."""


def is_measured(step: int, recipe: Recipe) -> bool:
    """Whether the balance is measured in a step: in every tenth, in the first and in the last.

    With a `train.log_interval` only steps that are logged count: every tenth is then the next multiple of it.
    """
    shown, last = recipe.train.log_interval, recipe.train.train_iters
    every = -(-STEPS_BETWEEN // shown) * shown
    return step % every == 0 or step in (shown, last)


def expert_metrics(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics by name: `moe/imbalance_max`, `moe/dropped`, `moe/layer_01/entropy`, `moe/layer_01/expert_00/tokens` …

    Args:
        layers: `LayerBalance` of each layer with experts, as metrics.jsonl has it; may be empty.
    """
    if not layers:
        return {}
    metrics = {
        "moe/imbalance_max": max(_number(layer["imbalance"]) for layer in layers),
        "moe/dropped": math.fsum(layer["dropped"] for layer in layers),
    }
    for layer in layers:
        name = f"moe/layer_{layer['layer']:02d}"
        metrics |= {f"{name}/{key}": _number(layer[key]) for key in ("imbalance", "dropped", "entropy", "z_loss")}
        tokens = layer["tokens_per_expert"]
        if len(tokens) <= MOST_CURVES:
            metrics |= {f"{name}/expert_{number:02d}/tokens": float(count) for number, count in enumerate(tokens)}
        else:
            metrics |= {f"{name}/tokens_min": float(min(tokens)), f"{name}/tokens_max": float(max(tokens))}
    return metrics


def _number(value: float | str) -> float:
    # JSON has no NaN: metrics.jsonl has its name instead.
    return float(value)
