"""Debugging a run: non-finite values and anomaly mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Engine, StepResult, World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.numerics import BadParameter, NonFinite, first_bad_parameter


@contextmanager
def anomaly_mode(module: torch.nn.Module) -> Iterator[None]:
    """Name the first module whose output, or backward function whose gradient, is not finite.

    Forward hooks check every module's output; autograd's anomaly detection checks the backward pass (NaN only) and
    points to the forward call. Both are slow.

    Raises:
        UserError: inside the block, at the first such output.
    """
    handles = [part.register_forward_hook(_checker(name)) for name, part in module.named_modules() if name]
    try:
        with torch.autograd.set_detect_anomaly(True):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _checker(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
    def check(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise UserError(
                    "the output is not finite",
                    where=name,
                    rule="anomaly mode stops at the first module whose output has a NaN or an infinity",
                    fix="check this module's inputs and weights",
                    code=ExitCode.STOP,
                )

    return check


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
