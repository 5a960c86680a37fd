"""Weights that are given, in place of initial values: each rank reads the boxes that it owns, and asks no other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llmrecipes.engine.base import WeightSource
from llmrecipes.engine.megatron.model.init import Piece, global_name, slabs
from llmrecipes.engine.megatron.model.names import unfused

SLAB = 1 << 24
"""Elements that are read at a time: 64 MiB in fp32."""
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)\[(.*)\]")
_EXPERTS = "mlp.experts.experts."


@torch.no_grad()
def fill(wanted: Iterable[Piece], source: WeightSource) -> None:
    """Fill boxes with given values, a slab of one at a time.

    Raises:
        UserError: as `WeightSource.read`.
    """
    for piece in wanted:
        name = whole_name(piece.name)
        for slab in slabs(piece, SLAB):
            slab.into.copy_(source.read(name, tuple(slab.offset), tuple(slab.into.shape)))


def buffers(others: Iterable[Any]) -> Iterator[Piece]:
    """The buffers among what a sharded state dict has besides parameters: the biases of experts."""
    for value in nested_values(list(others)):
        if isinstance(value, ShardedTensor) and value.data.is_floating_point():
            depth = value.prepend_axis_num
            yield Piece(value.data, global_name(value), value.global_shape[depth:], value.global_offset[depth:])


def whole_name(name: str) -> str:
    """Name of a weight in a model that one process holds, of megatron-core's local layers.

    Args:
        name: as `init.global_name`, where layers and experts may be stacked under one key.
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        return name.partition("[")[0]
    place = [each for each in found[3].split(",") if each]
    layer = place.pop(0) if found[1] is None else found[1]
    rest = found[2]
    if rest.startswith(_EXPERTS):
        rest = f"mlp.experts.local_experts.{place.pop(0)}.{rest.removeprefix(_EXPERTS)}"
    return f"decoder.layers.{layer}.{unfused(rest)}"
