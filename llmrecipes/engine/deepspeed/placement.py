"""Which part of which global tensors each parameter of a rank is, also where ZeRO has emptied the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from llmrecipes.engine.megatron.checkpoint import placement
from llmrecipes.engine.megatron.checkpoint.placement import Placement
from llmrecipes.engine.megatron.model.gpt import RecipeGPTModel


def placements(module: RecipeGPTModel) -> list[Placement]:
    """All parameters of a module, in model order.

    megatron-core's sharded state dict tells the place of each, but asks the tensors for their shapes.
    """
    with _with_shapes(module):
        return placement.placements(module.sharded_state())


def other_state(module: RecipeGPTModel) -> list[ShardedTensor | ShardedObject]:
    """What a module's sharded state dict has besides parameters: buffers that training changes, layers' own objects."""
    with _with_shapes(module):
        return placement.other_state(module.sharded_state())


def full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Shape of a parameter on this rank if ZeRO had not partitioned it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def _with_shapes(module: torch.nn.Module) -> Iterator[None]:
    """A block in which partitioned parameters have their shapes, without memory for their values."""
    partitioned = [each for each in module.parameters() if each.shape != full_shape(each)]
    kept = [each.data for each in partitioned]
    for each in partitioned:
        each.data = each.data.new_zeros(1).expand(full_shape(each))
    try:
        yield
    finally:
        for each, data in zip(partitioned, kept, strict=True):
            each.data = data
