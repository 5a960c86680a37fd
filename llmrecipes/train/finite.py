"""Stopping at a loss or gradient that is not finite, on all ranks alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from llmrecipes.engine.megatron.engine import MegatronEngine, StepResult
from llmrecipes.engine.megatron.model.gpt import RecipeGPTModel
from llmrecipes.engine.megatron.world import World
from llmrecipes.faults.numerics import BadParameter, NonFinite, first_bad_parameter, named_gradients

_Finding = tuple[int, bool, BadParameter | None]
"""Rank, whether its own loss is bad, and the first bad tensor it has."""


def require_finite(step: int, result: StepResult, engine: MegatronEngine, world: World) -> None:
    """Raise on every rank if the step's loss or gradient norm is not finite.

    The reduced numbers are the same on all ranks, so all of them come to the same decision; only then do they compare
    notes about which rank it began on.

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
    bad = first_bad_parameter(_named(engine))
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
    # A bad weight is where it began. Gradients are summed over ranks, so a bad one is bad everywhere; a bad loss tells
    # whose batch it was.
    rank, loss_is_bad, bad = finding
    return bad is None or bad.name.endswith(".grad"), not loss_is_bad, bad is None, rank


def _named(engine: MegatronEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters of this rank, then all gradients, with layers as the whole model counts them."""
    found = [pair for module in engine.modules for pair in _as_in_the_whole_model(module)]
    yield from sorted(found, key=lambda pair: pair[0].endswith(".grad"))


def _as_in_the_whole_model(module: RecipeGPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    numbers = [layer.layer_number - 1 for layer in module.decoder.layers]
    for name, tensor in named_gradients(module):
        local = re.match(r"decoder\.layers\.(\d+)(.*)", name)
        yield f"decoder.layers.{numbers[int(local[1])]}{local[2]}" if local else name, tensor
