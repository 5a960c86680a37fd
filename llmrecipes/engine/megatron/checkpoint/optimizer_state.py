"""The optimizer's state in a checkpoint: by parameter, in the same form for every layout and either optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

FORMAT = "fully_reshardable"
"""megatron-core's name for state by parameter, not by buffer."""


def sharded_optimizer_state(
    optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool = False
) -> dict[str, Any]:
    """Master weights and moments of every parameter, the number of updates, and the loss scale.

    Names and shapes are those of megatron-core's distributed optimizer in its `fully_reshardable` format. If its
    data-parallel group has more than one rank, megatron-core gathers them. Otherwise each parameter's state is already
    complete, and is referenced in place: megatron-core would copy all of it five times and run the garbage collector,
    which takes longer than everything else that blocks the training loop.

    With expert parallelism there are two optimizers, one of them only for experts; without it, there is one.

    Args:
        optimizer: megatron-core optimizer.
        model_state: the model's sharded state dict, whose tensors are the parameters themselves.
        metadata: for megatron-core's `sharded_state_dict`.
        loading: whether the result is for loading.

    Returns:
        A sharded state dict that shares memory with the optimizer: take a snapshot before the next step.
    """
    placements = {
        value.data: value
        for value in nested_values(model_state)
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }
    states: dict[int, Any] = {}
    for number, part in enumerate(_parts(optimizer)):
        if isinstance(part, DistributedOptimizer) and (loading or part.data_parallel_group.size() > 1):
            states[number] = part.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)["param_state"]
        else:
            states[number] = {
                index: _placed(placements[parameter], tensors)
                for index, (parameter, tensors) in enumerate(_whole_tensors(part))
            }
    scalers = [scaler.state_dict() for scaler in _scalers(optimizer)]
    return {"param_state": states, "step": _updates(optimizer), "grad_scaler": scalers[0] if scalers else None}


def load_optimizer_state(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Copy the state loaded for `sharded_optimizer_state` into the optimizer.

    Parameter groups are the current ones, because those of the layout that saved may differ; their learning rate and
    weight decay come from the schedule.
    """
    for number, part in enumerate(_parts(optimizer)):
        states = loaded["param_state"].get(number, {})  # megatron-core drops the empty ones of a stage without experts
        if isinstance(part, DistributedOptimizer):
            now = part.state_dict()
            for group in now["optimizer"]["param_groups"]:
                group["step"] = loaded["step"]
            part.load_state_dict({**now, "param_state": states, "param_state_sharding_type": FORMAT})
        else:
            for index, (_, tensors) in enumerate(_whole_tensors(part)):
                for name, tensor in tensors.items():
                    tensor.copy_(states[index][name])
            _set_updates(part.optimizer, loaded["step"])
    for scaler in _scalers(optimizer):
        scaler.load_state_dict(loaded["grad_scaler"])


def _parts(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]  # a stage may have no parameters of a kind


def _scalers(optimizer: Any) -> list[Any]:
    scalers = [getattr(part, "grad_scaler", None) for part in _parts(optimizer)]
    return [scaler for scaler in scalers if scaler is not None]


def _whole_tensors(part: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Parameters of an optimizer that has all state of each, and that state by megatron-core's names."""
    if isinstance(part, DistributedOptimizer):
        for parameter in (parameter for buffer in part.buffers for parameter in buffer.param_index_map):
            tensors = part._get_main_param_and_optimizer_states(parameter)
            yield parameter, {name: tensor.detach() for name, tensor in tensors.items() if name != "step"}
        return
    for parameter, main in _main_parameters(part):
        tensors = {"param": main.detach(), **part.optimizer.state[main]}
        yield parameter, {name: tensor for name, tensor in tensors.items() if name != "step"}


def _main_parameters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        yield from ((parameter, parameter) for parameter in part.get_parameters())
        return
    halves, wholes = chain(*part.float16_groups), chain(*part.fp32_from_float16_groups)
    yield from zip(halves, wholes, strict=True)
    yield from ((parameter, parameter) for parameter in chain(*part.fp32_from_fp32_groups))


def _placed(placement: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: _placed_like(placement, f"optimizer.state.{name}.{placement.key}", tensor)
        for name, tensor in tensors.items()
    }


def _placed_like(placement: Any, key: str, tensor: torch.Tensor) -> Any:
    changes: dict[str, Any] = {"key": key, "data": tensor.view(placement.data.shape)}
    if isinstance(placement, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(placement, **changes)


def _updates(optimizer: Any) -> int:
    """Updates so far: torch counts them per parameter, TransformerEngine and Apex per group."""
    inner = [part.optimizer for part in _parts(optimizer)]
    of_parameters = (float(state["step"]) for each in inner for state in each.state.values() if "step" in state)
    of_groups = (group["step"] for each in inner for group in each.param_groups if "step" in group)
    return int(next(chain(of_parameters, of_groups), 0))


def _set_updates(inner: torch.optim.Optimizer, updates: int) -> None:
    counts = [state["step"] for state in inner.state.values() if "step" in state]
    for count in counts:
        count.fill_(updates)
    if not counts:
        for group in inner.param_groups:
            group["step"] = updates
