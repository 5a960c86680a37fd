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

from llmrecipes.engine.core.checkpoint.index import AVERAGE
from llmrecipes.engine.core.checkpoint.slices import MASTER, OptimizerSlice

NAME = "ema"
"""Of the state."""


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
            return replace(value, key=AVERAGE + value.key)
        return value

    averaged: dict[str, Any] = dict_list_map_outplace(renamed, state)
    return averaged


def _states(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Master weights of this rank, fp32, and their state."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:  # a stage may have no parameters of a kind
            yield from ((state.get(MASTER, weight), state) for weight, state in part.optimizer.state.items())
