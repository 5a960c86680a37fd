"""What is counted in a step, and step time and memory of a start beside those that were predicted before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Engine, Platform, Progress
from llmrecipes.recipe.source import source_names
from llmrecipes.tracking.events import is_measured, is_sampled
from llmrecipes.units import GIB


def start_counting(engine: Engine, step: int) -> Callable[[], dict[str, Any]]:
    """Begin to count what is due in a step (`tracking.events`); all ranks have to.

    Returns:
        Called after the step, its fields of `StepMetrics`. A collective of all ranks with experts.
    """
    if engine.layers is not None and is_sampled(step, engine.recipe):
        engine.layers.start()
    if engine.sources is not None:
        engine.sources.start()
    rewards = engine.rewards
    if rewards is not None:
        rewards.start()
    if not is_measured(step, engine.recipe):
        return dict if rewards is None else lambda: {"rewards": rewards.take()}
    balance, accuracy, hidden = engine.balance, engine.accuracy, engine.hidden
    for meter in (balance, accuracy, hidden):
        if meter is not None:
            meter.start()

    def counted() -> dict[str, Any]:
        fields: dict[str, Any] = {} if accuracy is None else {"token_accuracy": accuracy.take()}
        if rewards is not None:
            fields["rewards"] = rewards.take()
        if hidden is not None:
            fields["hidden_distance"] = hidden.take()
        if balance is not None:
            routed = balance.collect()
            fields |= {"moe_aux_loss": routed.aux_loss, "experts": routed.layers}
        return fields

    return counted


def source_losses(engine: Engine, before: Progress) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Sums by source after the step that follows `before`, for its `Progress`, and that step's field of `StepMetrics`.

    The sums are of the steps since the last report, and a checkpoint has them: a resumed run reports what an
    uninterrupted one does. A step whose sums are not finite does not count.
    """
    if engine.sources is None:
        return (), {}
    sums, earlier = engine.sources.take(), before.source_sums
    if not all(map(math.isfinite, sums)):
        sums = (0.0,) * len(sums)
    if len(earlier) == len(sums):
        sums = tuple(map(sum, zip(earlier, sums, strict=True)))
    if not is_measured(before.step + 1, engine.recipe):
        return sums, {}
    names = source_names(engine.recipe.data.sources)
    by_name = zip(names, sums[: len(names)], sums[len(names) :], strict=True)
    return (), {"source_loss": {name: loss / tokens for name, loss, tokens in by_name if tokens} or None}


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
