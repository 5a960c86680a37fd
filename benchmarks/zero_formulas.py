"""What ZeRO should hold and send (arXiv 1910.02054), and a search for the largest size that fits; pure functions.

Ψ parameters, N ranks. Adam in mixed precision holds K = 12 bytes of optimizer state for each parameter: two moments and
an fp32 copy of the weights. In fp32 the weights themselves can be updated, so K = 8; but with ZeRO, DeepSpeed keeps the
copy in fp32 too, so there K = 12 in every precision. (Stages 1 and 2 always clone their partition of the weights. Stage
3 would share it if `tensor.device == self.device`, but compares a `torch.device` with a string: stage3.py of 0.19.8.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

STAGES = (0, 1, 2, 3)


class Bytes(NamedTuple):
    """What a rank holds."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


class Types(NamedTuple):
    """Bytes of a weight and of a gradient."""

    name: str
    weight: int
    gradient: int


FP32 = Types("fp32", 4, 4)
BF16 = Types("bf16", 2, 2)
BF16_FP32_GRADIENTS = Types("bf16, fp32 gradients", 2, 4)
TYPES = (FP32, BF16, BF16_FP32_GRADIENTS)
"""The second is the paper's mixed precision, the third the default of a recipe in bf16."""


def state_bytes(types: Types, stage: int) -> int:
    """K of DeepSpeed at a stage."""
    return 8 if types.weight == 4 and stage == 0 else 12


def held(parameters: int, ranks: int, stage: int, types: Types) -> Bytes:
    """Model states of a rank (figure 1 and section 5 of the paper)."""
    return Bytes(
        types.weight * parameters / (ranks if stage >= 3 else 1),
        types.gradient * parameters / (ranks if stage >= 2 else 1),
        state_bytes(types, stage) * parameters / (ranks if stage >= 1 else 1),
    )


def sent(parameters: int, ranks: int, stage: int, types: Types) -> float:
    """Bytes that a rank sends in a step of one micro-batch (section 7), by ring algorithms.

    Stage 0 all-reduces gradients: 2Ψ. Stages 1 and 2 reduce-scatter them and gather weights after the update: 2Ψ. Stage
    3 reduce-scatters them and gathers weights twice, for the forward and the backward pass: 3Ψ.
    """
    gathers, reductions = {0: (0, 2), 1: (1, 1), 2: (1, 1), 3: (2, 1)}[stage]
    share = (ranks - 1) / ranks
    return share * parameters * (gathers * types.weight + reductions * types.gradient)


def largest(peak: Callable[[int], float | None], limit: float, start: int, each: float) -> int:
    """The largest number from 1 on that fits, or 0: by steps that the peaks suggest, then bisected.

    Args:
        peak: of memory at a number, None where it exceeds the limit; called once for each number.
        limit: of memory.
        start: first try, at least 1.
        each: memory that one more is expected to take; positive.
    """
    below, above, number = 0, 0, start
    while not above or above - below > 1:
        reached = peak(number)
        if reached is None:
            above = number
            number = (below + above) // 2 if below else max(1, number - max(1, number // 16))
        else:
            below = number
            number += max(1, int((limit - reached) / each))
        if above and number >= above:
            number = (below + above) // 2
    return below
