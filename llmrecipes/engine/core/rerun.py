"""What computing a step changes before its update, so that the same step can be computed again.

Gradients are zeroed at the start of a step anyway. Besides them, a pass draws random numbers (dropout, jitter of
routers), balances the bias of experts, and in fp16 counts overflows for the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from llmrecipes.engine.base import Batch, StepResult
from llmrecipes.engine.core.random_states import random_states, set_random_states

_EXPERT_BIAS = "expert_bias"


class RerunState:
    """The state before a step; kept on the device, so that taking it does not wait for it.

    Args:
        modules: this rank's parts of the model.
        optimizer: with the loss scale of fp16.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        self._random = random_states()
        biases = [
            buffer
            for module in modules
            for name, buffer in module.named_buffers()
            if name.rpartition(".")[2] == _EXPERT_BIAS
        ]
        self._biases = [(bias, bias.clone()) for bias in biases]
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        scalers = [scaler for part in parts if (scaler := getattr(part, "grad_scaler", None)) is not None]
        self._scalers = [
            (scaler, {name: _copy(value) for name, value in scaler.state_dict().items()}) for scaler in scalers
        ]

    def restore(self) -> None:
        """Set the state as it was."""
        set_random_states(self._random)
        self.restore_expert_bias()
        for scaler, state in self._scalers:
            scaler.load_state_dict(state)

    def restore_expert_bias(self) -> None:
        """Set only the bias of experts: an update that is not made leaves it as it was."""
        for bias, value in self._biases:
            bias.copy_(value)


def kept(batches: Iterator[Batch], used: list[Batch]) -> Iterator[Batch]:
    """The batches, of which those that are read are appended to `used`."""
    for batch in batches:
        used.append(batch)
        yield batch


def announced(batches: list[Batch], announce: Callable[[], None]) -> Iterator[Batch]:
    """The batches of a step that is computed again; `announce` is called before each."""
    for batch in batches:
        announce()
        yield batch


def is_finite(loss: float, norm: float | None) -> bool:
    """Whether the loss of a step is finite, and the norm of its gradients, which is None if they overflowed."""
    return math.isfinite(loss) and norm is not None and math.isfinite(norm)


def is_update(result: StepResult) -> bool:
    """Whether a step has changed the weights."""
    return not result.rejected and not result.skipped and is_finite(result.loss, result.grad_norm)


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
