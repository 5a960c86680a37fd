"""Non-finite numbers, and where they first appeared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from llmrecipes.errors import ExitCode, UserError


@dataclass(frozen=True)
class BadParameter:
    """The first tensor, in model order, with non-finite values."""

    name: str
    kind: Literal["nan", "inf"]
    """`nan` if it has any; else `inf`."""
    count: int
    """Elements that are NaN or infinite."""
    size: int
    """Elements in all."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind} among {self.count} of {self.size} elements)"


class NonFinite(UserError):
    """A loss or a gradient norm that is NaN or infinite; running again would fail the same way.

    Args:
        step: optimizer step in which it occurred.
        rank: global rank on which it occurred.
        quantity: `loss` or `gradient norm`.
        value: the value.
        first_bad: first non-finite gradient or parameter on this rank, if any.
    """

    def __init__(self, *, step: int, rank: int, quantity: str, value: float, first_bad: BadParameter | None) -> None:
        self.step, self.rank, self.quantity, self.value, self.first_bad = step, rank, quantity, value, first_bad
        where = f"first bad parameter: {first_bad}" if first_bad else "all parameters and gradients on it are finite"
        super().__init__(
            f"{quantity} is {value}; {where}",
            where=f"step {step}, rank {rank}",
            rule="training stops at the first loss or gradient norm that is not finite",
            fix="lower optimizer.lr, lengthen scheduler.lr_warmup_iters, set optimizer.clip_grad: 1.0, or use "
            "train.precision: bf16 or fp32; the newest checkpoint predates this",
            code=ExitCode.STOP,
        )


def first_bad_parameter(tensors: Iterable[tuple[str, torch.Tensor]]) -> BadParameter | None:
    """The first tensor with a NaN or an infinity, or None.

    Args:
        tensors: (name, tensor) in the order in which to look.
    """
    for name, tensor in tensors:
        values = tensor.detach()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            kind: Literal["nan", "inf"] = "nan" if bool(torch.isnan(values).any()) else "inf"
            return BadParameter(name, kind, bad, values.numel())
    return None


def named_gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then their gradients as `<name>.grad` (megatron-core's DDP keeps them in `main_grad`)."""
    parameters = list(model.named_parameters())
    yield from parameters
    for name, parameter in parameters:
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            yield f"{name}.grad", gradient
