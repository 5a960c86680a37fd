"""Step time and memory of a start beside those that were predicted before it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Platform
from llmrecipes.units import GIB


def measured(steady: Sequence[float], platform: Platform, predicted: Mapping[str, Any] | None) -> dict[str, float]:
    """Details of the note `measured`, by the names of metrics; none without a steady step. A collective of all ranks.

    Args:
        steady: seconds of the steps that neither begin the start nor run beside a save.
        platform: platform of this rank, whose peak memory is compared with that of the others.
        predicted: `Forecast.record` of the plan; None: the machine has no coefficients.
    """
    most = torch.tensor(platform.peak_memory(), dtype=torch.int64, device=platform.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if not steady:
        return {}
    values = {
        "measured/step_seconds": statistics.median(steady),
        "measured/steps": float(len(steady)),
        "measured/memory_bytes": float(most.item()),
    }
    if predicted is None:
        return values
    names = ("step_seconds", "compute_seconds", "communication_seconds", "memory_bytes")
    return values | {f"predicted/{name}": float(predicted[name]) for name in names}


def line(values: Mapping[str, float]) -> str:
    """One line for the summary."""
    step, memory = values["measured/step_seconds"], values["measured/memory_bytes"]
    text = f"measured: {step:.4g} s a step (median of {values['measured/steps']:.0f})"
    room = f"at most {memory / GIB:.2f} GiB a rank"
    if "predicted/step_seconds" not in values:
        return f"{text}, {room}"
    time, held = values["predicted/step_seconds"], values["predicted/memory_bytes"]
    return (
        f"{text}, predicted {time:.4g} s ({time / step - 1:+.0%}); "
        f"{room}, predicted {held / GIB:.2f} GiB ({held / memory - 1:+.0%})"
    )
