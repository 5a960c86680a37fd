"""The optimizer's state for a checkpoint, without megatron-core's copies where nothing has to be gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

FORMAT = "fully_reshardable"
"""Optimizer state by parameter, not by buffer: the format that every layout can read."""


def sharded_optimizer_state(optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """`optimizer.sharded_state_dict` for saving.

    megatron-core copies all state five times and collects garbage to make the `fully_reshardable` format, which takes
    longer than everything else the training loop waits for. On a data-parallel group of one rank each parameter's
    state is whole already, and this refers to it in place: same names, shapes and values. Elsewhere megatron-core's own
    method answers.

    Args:
        optimizer: megatron-core optimizer.
        model_state: the model's sharded state dict, whose tensors are the parameters themselves.
        metadata: as megatron-core's method takes it.

    Returns:
        A sharded state dict that shares memory with the optimizer: take a snapshot before the next step.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    part = parts[0]
    whole = len(parts) == 1 and isinstance(part, DistributedOptimizer) and part.data_parallel_group.size() == 1
    if not whole or metadata.get("distrib_optim_sharding_type") != FORMAT:
        state: dict[str, Any] = optimizer.sharded_state_dict(model_state, is_loading=False, metadata=metadata)
        return state
    placements = {
        value.data: value
        for value in nested_values(model_state)
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }
    parameters = (parameter for buffer in part.buffers for parameter in buffer.param_index_map)
    by_parameter = {
        index: _state_of(part, parameter, placements[parameter]) for index, parameter in enumerate(parameters)
    }
    return {**part.state_dict(), "param_state": by_parameter, "param_state_sharding_type": FORMAT}


def _state_of(part: Any, parameter: Any, placement: Any) -> dict[str, Any]:
    tensors = part._get_main_param_and_optimizer_states(parameter)
    return {
        name: _placed_like(placement, f"optimizer.state.{name}.{placement.key}", tensor.detach())
        for name, tensor in tensors.items()
        if name != "step"  # is kept by parameter group
    }


def _placed_like(placement: Any, key: str, tensor: Any) -> Any:
    changes = {"key": key, "data": tensor.view(placement.data.shape)}
    if isinstance(placement, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(placement, **changes)
