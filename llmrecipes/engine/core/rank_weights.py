"""Weights and gradients of a rank as slices of the model's global tensors, and its weights in a checkpoint.

megatron-core's sharded state dict, which is also used to reshard checkpoints, tells which part a rank holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel

from llmrecipes.engine.base import Slice
from llmrecipes.engine.core.checkpoint.slices import EXTRA_STATE, is_extra_state
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.core.model.init import slice_of
from llmrecipes.faults.numerics import named_gradients


def weight_slices(modules: Sequence[RecipeModel]) -> list[Slice]:
    """Copies of this rank's parameters, and of buffers that training changes, in model order."""
    return [part for module in modules for value in _stored(module) for part in _slices(value)]


def gradient_slices(modules: Sequence[RecipeModel], chunks: Sequence[DistributedDataParallel]) -> list[Slice]:
    """Copies of the reduced gradients of this rank's parameters, in model order.

    A collective of the data-parallel group. With the distributed optimizer each rank has only its own part of every
    bucket reduced; here the parts are gathered, into memory that the optimizer does not read.
    """
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for bucket in buffer.buckets:
                    _gather(bucket.grad_data, buffer.data_parallel_group)
    return [
        part
        for module in modules
        for value in _stored(module)
        if isinstance(value.data, torch.nn.Parameter) and value.data.requires_grad
        for part in _slices(replace(value, data=value.data.main_grad))  # type: ignore[attr-defined]
    ]


def named_tensors(modules: Sequence[RecipeModel]) -> list[tuple[str, torch.Tensor]]:
    """This rank's parameters, then their gradients as `<name>.grad`, by their names in the whole model."""
    pairs = [pair for module in modules for pair in _as_in_the_whole_model(module)]
    return sorted(pairs, key=lambda pair: pair[0].endswith(".grad"))


def _as_in_the_whole_model(module: RecipeModel) -> Iterator[tuple[str, torch.Tensor]]:
    numbers = [layer.layer_number - 1 for layer in module.decoder.layers]
    for name, tensor in named_gradients(module):
        local = re.match(r"decoder\.layers\.(\d+)(.*)", name)
        yield f"decoder.layers.{numbers[int(local[1])]}{local[2]}" if local else name, tensor


def model_state(modules: Sequence[RecipeModel]) -> dict[str, Any]:
    """Sharded state dict of this rank's weights, or only its adapters, by chunk; the names inside are global."""
    return {f"model{number}": state for number, state in enumerate(saved_states(modules))}


def load_model(modules: Sequence[RecipeModel], loaded: Mapping[str, Any]) -> None:
    """Copy weights loaded for `model_state` into the chunks.

    Raises:
        RuntimeError: a weight is missing.
    """
    for number, module in enumerate(modules):
        missing, unexpected = module.load_state_dict(loaded[f"model{number}"], strict=False)
        needed = set(module.saved_state())
        if wrong := [*unexpected, *(name for name in missing if name in needed and not name.endswith(EXTRA_STATE))]:
            raise RuntimeError(f"the loaded weights do not fit the model: {', '.join(wrong)}")


def saved_states(modules: Sequence[RecipeModel]) -> list[dict[str, Any]]:
    """Sharded state dict of what a checkpoint has of each module."""
    return [
        {name: value for name, value in module.saved_state().items() if not is_extra_state(value)} for module in modules
    ]


def _stored(module: RecipeModel) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    for value in nested_values(module.sharded_state()):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data.is_floating_point():
            yield value


def _slices(value: ShardedTensor | ShardedTensorFactory) -> Iterator[Slice]:
    # The two halves of a gated MLP are one parameter, but two parts of the global tensor.
    parts: list[Any] = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
    for part in parts:
        tensor = part.data.detach().to("cpu", torch.float32, copy=True).view(part.local_shape)
        yield slice_of(part, tensor)


def _gather(buffer: torch.Tensor, group: Any) -> None:
    parts = list(buffer.view(-1).chunk(group.size()))
    dist.all_gather(parts, parts[group.rank()].clone(), group=group)
