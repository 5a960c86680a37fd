"""Stopping all ranks at a non-finite loss or gradient norm."""

from __future__ import annotations

import math

import torch.distributed as dist

from llmrecipes.engine.base import Engine, StepResult, World
from llmrecipes.faults.numerics import BadParameter, NonFinite, first_bad_parameter

_Finding = tuple[int, bool, BadParameter | None]
"""Rank, whether its local loss is bad, and its first bad tensor."""


def require_finite(step: int, result: StepResult, engine: Engine, world: World) -> None:
    """Raise on every rank if the step's loss or gradient norm is not finite.

    The reduced numbers are the same on all ranks, so all of them decide alike; only then do they exchange findings to
    determine the rank where it started.

    Raises:
        NonFinite: naming step, rank, quantity and first bad parameter.
    """
    # fp16 overflow is not an error: the scaler skipped the step, and the loss of a skipped step may be anything.
    if result.skipped:
        return
    loss_is_bad = not math.isfinite(result.loss)
    norm_is_bad = result.grad_norm is not None and not math.isfinite(result.grad_norm)
    if not (loss_is_bad or norm_is_bad):
        return
    bad = first_bad_parameter(engine.named_tensors())
    findings: list[_Finding] = [(0, False, None)] * world.size
    dist.all_gather_object(findings, (world.rank, not math.isfinite(engine.local_loss), bad))
    rank, _, first = min(findings, key=_distance_from_cause)
    raise NonFinite(
        step=step,
        rank=rank,
        quantity="loss" if loss_is_bad else "gradient norm",
        value=result.loss if loss_is_bad else float(result.grad_norm or 0.0),
        first_bad=first,
    )


def _distance_from_cause(finding: _Finding) -> tuple[bool, bool, bool, int]:
    # A bad weight is the most likely cause. Gradients are summed over ranks, so a bad one is bad everywhere; a bad
    # local loss identifies the batch.
    rank, loss_is_bad, bad = finding
    return bad is None or bad.name.endswith(".grad"), not loss_is_bad, bad is None, rank
