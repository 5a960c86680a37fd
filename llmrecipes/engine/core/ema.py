"""An exponential moving average of the weights (arXiv 2411.18704).

After update t, with the master weights w: ema ← decay × ema + (1 - decay) × w, in fp32. It is one more state of the
optimizer beside Adam's moments, so it is sharded, saved and resharded as these are: 4 bytes a parameter, over the
data-parallel ranks with the distributed optimizer, and no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import MegatronOptimizer

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.core.checkpoint.index import Index
from llmrecipes.engine.core.checkpoint.slices import MASTER, OPTIMIZER_STATE, OptimizerSlice
from llmrecipes.errors import UserError

NAME = "ema"
"""Of the state."""
PREFIX = OPTIMIZER_STATE.format(NAME)
"""In front of a weight's name, in a checkpoint."""


@torch.no_grad()
def start(optimizer: MegatronOptimizer) -> None:
    """Begin the average with the present master weights.

    Args:
        optimizer: with allocated state.
    """
    for weight, state in _states(optimizer):
        if NAME in state:
            state[NAME].copy_(weight)
        else:
            state[NAME] = weight.detach().to(torch.float32, copy=True)


@torch.no_grad()
def update(optimizer: MegatronOptimizer, decay: float) -> None:
    """Average in the weights of an update.

    Args:
        optimizer: after its update, with an average that has been started.
        decay: weight of the average so far; 0 < decay < 1.
    """
    pairs = [(state[NAME], weight) for weight, state in _states(optimizer)]
    if pairs:  # a rank may own no part of any weight
        averages, weights = zip(*pairs, strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)


def is_in(index: Index) -> bool:
    """Whether a checkpoint has the average."""
    return any(name.startswith(PREFIX) for name in index.tensors)


def require(index: Index, entry: Entry) -> None:
    """Refuse a checkpoint without the average.

    Raises:
        UserError: it has none.
    """
    if not is_in(index):
        raise UserError(
            "this checkpoint has no moving average of the weights",
            where=str(entry.path),
            rule="a run keeps one from the step on at which optimizer.ema_decay is set",
            fix="leave --ema out, or train on with optimizer.ema_decay=0.999",
        )


def left_out(owned: Sequence[OptimizerSlice]) -> list[OptimizerSlice]:
    """State without the average."""
    return [
        replace(piece, tensors={name: tensor for name, tensor in piece.tensors.items() if name != NAME})
        for piece in owned
    ]


def in_place_of_weights(state: dict[str, Any]) -> dict[str, Any]:
    """A sharded state dict whose parameters are loaded from the average, and buffers from what was saved."""

    def renamed(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.nn.Parameter):
            return replace(value, key=PREFIX + value.key)
        return value

    averaged: dict[str, Any] = dict_list_map_outplace(renamed, state)
    return averaged


def _states(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Master weights of this rank, fp32, and their state."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:  # a stage may have no parameters of a kind
            yield from ((state.get(MASTER, weight), state) for weight, state in part.optimizer.state.items())
