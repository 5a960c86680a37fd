"""Which part of which global tensors each parameter of a rank is, also where ZeRO has emptied the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from llmrecipes.engine.deepspeed.boxes import Box, boxes
from llmrecipes.engine.megatron.model.gpt import RecipeGPTModel


@dataclass(frozen=True)
class Part:
    """A part of a parameter that belongs to one global tensor: the two halves of a gated MLP are two."""

    start: int
    """Index of its first element in the flattened parameter."""
    shard: ShardedTensor
    """Name, shape and offset in the global tensor; without data."""

    @property
    def numel(self) -> int:
        return prod(self.shard.local_shape)


@dataclass(frozen=True)
class Placement:
    """A parameter and its parts, in the order of the flattened parameter."""

    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def shards(self, prefix: str, start: int, values: torch.Tensor, *, exclusive: bool) -> list[ShardedTensor]:
        """A range of the flattened parameter, or of state of its shape, as shards of the global tensors.

        Args:
            prefix: in front of the tensors' names.
            start: index of the range in the flattened parameter.
            values: [n] the range; the shards are views of it.
            exclusive: no other data-parallel rank has this range.
        """
        found = []
        stop = start + values.numel()
        for part in self.parts:
            inside = range(max(start, part.start), min(stop, part.start + part.numel))
            for box in boxes(part.shard.local_shape, inside.start - part.start, inside.stop - part.start):
                first = part.start + box.start - start
                found.append(_shard(part.shard, prefix, box, values[first : first + prod(box.shape)], exclusive))
        return found


def placements(module: RecipeGPTModel) -> list[Placement]:
    """All parameters of a module, in model order.

    megatron-core's sharded state dict tells the place of each, but asks the tensors for their shapes.
    """
    found: dict[torch.nn.Parameter, Placement] = {}
    with _with_shapes(module):
        for value in nested_values(module.sharded_state()):
            if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.nn.Parameter):
                found[value.data] = Placement(value.data, tuple(value.data.shape), tuple(_parts(value)))
    return list(found.values())


def other_state(module: RecipeGPTModel) -> list[ShardedTensor | ShardedObject]:
    """What a module's sharded state dict has besides parameters: buffers that training changes, layers' own objects."""
    with _with_shapes(module):
        return [
            value
            for value in nested_values(module.sharded_state())
            if isinstance(value, ShardedTensor | ShardedObject) and not isinstance(value.data, torch.nn.Parameter)
        ]


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


def _parts(value: ShardedTensor | ShardedTensorFactory) -> Iterator[Part]:
    parts: list[ShardedTensor] = (
        list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
    )
    start = 0
    for part in parts:
        # Rows in order: what megatron-core's factories for gated MLPs do.
        yield Part(start, replace(part, data=None))
        start += prod(part.local_shape)
    if start != value.data.numel():
        raise RuntimeError(f"{value.key} has {value.data.numel()} elements, and its parts have {start}")


def _shard(whole: ShardedTensor, prefix: str, box: Box, values: torch.Tensor, exclusive: bool) -> ShardedTensor:
    depth = whole.prepend_axis_num
    offset = [a + b for a, b in zip(whole.global_offset[depth:], box.offset, strict=True)]
    # All dimensions are explicit, because torch's planner takes offset and shape of an irregular shard as they are.
    shape = (*(1 for _ in range(depth)), *box.shape)
    replica = whole.replica_id
    if exclusive:
        replica = (*replica[:-1], 0) if isinstance(replica, tuple) else 0
    return replace(
        whole,
        key=prefix + whole.key,
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_offset=(*whole.global_offset[:depth], *offset),
        prepend_axis_num=0,
        axis_fragmentations=None,
        replica_id=replica,
    )
