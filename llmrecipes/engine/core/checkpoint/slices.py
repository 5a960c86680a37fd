"""Which part of which global tensors a rank has: parameters, or any flat range of them, as slices of named tensors.

Optimizers that split their state cut flat buffers wherever a parameter begins or ends. Stored as slices of global
tensors, such ranges need no other rank to be written, and any other layout can read them: a range of a tensor of n
dimensions is at most 2n - 1 slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from llmrecipes.engine.core.checkpoint.index import OPTIMIZER_STATE

EXTRA_STATE = "_extra_state"
"""End of the names of what layers keep besides tensors."""
MASTER = "master_param"
"""TransformerEngine's name of a master weight in the optimizer's state, where the optimizer's parameter is the model's
weight: with `optimizer.use_precision_aware_optimizer`."""


@dataclass(frozen=True)
class ParameterSlice:
    """A slice of a global tensor in a parameter: the two halves of a gated MLP are two."""

    start: int
    """Index of its first element in the flattened parameter."""
    shard: ShardedTensor
    """Name, shape and offset in the global tensor; without data."""

    @property
    def numel(self) -> int:
        return prod(self.shard.local_shape)


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter and its slices, in the order of the flattened parameter."""

    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    slices: tuple[ParameterSlice, ...]

    def shards(self, prefix: str, start: int, values: torch.Tensor, *, exclusive: bool) -> list[ShardedTensor]:
        """A range of the flattened parameter, or of state of its shape, as shards of the global tensors.

        Args:
            prefix: in front of the tensors' names.
            start: index of the range in the flattened parameter.
            values: [n] the range; the shards are views of it.
            exclusive: no other data-parallel rank has this range.
        """
        shards = []
        stop = start + values.numel()
        for part in self.slices:
            inside = range(max(start, part.start), min(stop, part.start + part.numel))
            for flat in flat_slices(part.shard.local_shape, inside.start - part.start, inside.stop - part.start):
                first = part.start + flat.start - start
                shards.append(_shard(part.shard, prefix, flat, values[first : first + prod(flat.shape)], exclusive))
        return shards


@dataclass(frozen=True)
class OptimizerSlice:
    """State of a range of a parameter."""

    sharded: ShardedParameter
    start: int
    tensors: dict[str, torch.Tensor]
    """`param` (the fp32 master weights), `exp_avg`, `exp_avg_sq` or what another optimizer keeps (`momentum_buffer`),
    and `ema` if it is kept, each [n]; writing to them changes the state."""

    def copy(self) -> OptimizerSlice:
        """A copy that shares no memory."""
        return replace(self, tensors={name: tensor.clone() for name, tensor in self.tensors.items()})

    def weight_shards(self, *, exclusive: bool) -> list[ShardedTensor]:
        """Weights of the range as shards; `exclusive` as in `ShardedParameter.shards`."""
        size = next(iter(self.tensors.values())).numel()
        values = self.sharded.parameter.detach().view(-1)[self.start : self.start + size]
        return self.sharded.shards("", self.start, values, exclusive=exclusive)

    def optimizer_shards(self, *, exclusive: bool) -> dict[str, list[ShardedTensor]]:
        """The state as shards, by its names; `exclusive` as in `ShardedParameter.shards`."""
        return {
            name: self.sharded.shards(OPTIMIZER_STATE.format(name), self.start, values, exclusive=exclusive)
            for name, values in self.tensors.items()
        }


def sharded_parameters(state: dict[str, Any]) -> list[ShardedParameter]:
    """Parameters of a sharded state dict, in its order."""
    parameters: dict[torch.nn.Parameter, ShardedParameter] = {}
    for value in nested_values(state):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.nn.Parameter):
            parameters[value.data] = ShardedParameter(value.data, tuple(value.data.shape), tuple(_slices(value)))
    return list(parameters.values())


def other_state(state: dict[str, Any]) -> list[ShardedTensor | ShardedObject]:
    """What a sharded state dict has besides parameters: buffers that training changes, layers' own objects."""
    return [
        value
        for value in nested_values(state)
        if isinstance(value, ShardedTensor | ShardedObject)
        and not isinstance(value.data, torch.nn.Parameter)
        and not is_extra_state(value)
    ]


def is_extra_state(value: Any) -> bool:
    """Whether it is what TransformerEngine's layers keep for fp8: empty here, and unknown to local layers."""
    return isinstance(value, ShardedObject) and value.key.endswith(EXTRA_STATE)


def _slices(value: ShardedTensor | ShardedTensorFactory) -> Iterator[ParameterSlice]:
    parts: list[ShardedTensor] = (
        list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
    )
    start = 0
    for part in parts:
        # Rows in order: what megatron-core's factories for gated MLPs do.
        yield ParameterSlice(start, replace(part, data=None))
        start += prod(part.local_shape)
    if start != value.data.numel():
        raise RuntimeError(f"{value.key} has {value.data.numel()} elements, and its parts have {start}")


def _shard(whole: ShardedTensor, prefix: str, flat: FlatSlice, values: torch.Tensor, exclusive: bool) -> ShardedTensor:
    depth = whole.prepend_axis_num
    offset = [a + b for a, b in zip(whole.global_offset[depth:], flat.offset, strict=True)]
    # All dimensions are explicit, because torch's planner takes offset and shape of an irregular shard as they are.
    shape = (*(1 for _ in range(depth)), *flat.shape)
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


class FlatSlice(NamedTuple):
    """A slice of a tensor whose elements are one after the other in the flattened tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    """Index of its first element in the flattened tensor."""


def flat_slices(shape: tuple[int, ...], start: int, stop: int) -> Iterator[FlatSlice]:
    """Boxes that together are the elements [start, stop) of a row-major tensor, in order.

    Args:
        shape: of the tensor.
        start: first element; 0 ≤ start.
        stop: after the last element; stop ≤ product of the shape.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield FlatSlice((start,) if shape else (), (stop - start,) if shape else (), start)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows in between
    if first > last:
        yield from _in_row(shape, first - 1, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield FlatSlice((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[FlatSlice]:
    before = index * prod(shape[1:])
    for flat in flat_slices(shape[1:], start - before, stop - before):
        yield FlatSlice((index, *flat.offset), (1, *flat.shape), flat.start + before)
