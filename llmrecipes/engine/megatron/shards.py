"""Weights and gradients of a rank as parts of the model's global tensors.

megatron-core's sharded state dict, which is also used to reshard checkpoints, tells which part a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel

from llmrecipes.engine.base import Slice
from llmrecipes.engine.megatron.model.gpt import RecipeGPTModel
from llmrecipes.engine.megatron.model.init import slice_of


def weights(modules: Sequence[RecipeGPTModel]) -> list[Slice]:
    """Copies of this rank's parameters, and of buffers that training changes, in model order."""
    return [shard for module in modules for value in _stored(module) for shard in _shards(value)]


def gradients(modules: Sequence[RecipeGPTModel], chunks: Sequence[DistributedDataParallel]) -> list[Slice]:
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
        shard
        for module in modules
        for value in _stored(module)
        if isinstance(value.data, torch.nn.Parameter) and value.data.requires_grad
        for shard in _shards(replace(value, data=value.data.main_grad))  # type: ignore[attr-defined]
    ]


def _stored(module: RecipeGPTModel) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    for value in nested_values(module.sharded_state()):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data.is_floating_point():
            yield value


def _shards(value: ShardedTensor | ShardedTensorFactory) -> Iterator[Slice]:
    # The two halves of a gated MLP are one parameter, but two parts of the global tensor.
    parts: list[Any] = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
    for part in parts:
        tensor = part.data.detach().to("cpu", torch.float32, copy=True).view(part.local_shape)
        yield slice_of(part, tensor)


def _gather(buffer: torch.Tensor, group: Any) -> None:
    parts = list(buffer.view(-1).chunk(group.size()))
    dist.all_gather(parts, parts[group.rank()].clone(), group=group)
