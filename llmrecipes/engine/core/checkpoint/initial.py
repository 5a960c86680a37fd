"""A checkpoint of step 0 from existing weights, written slice by slice: no process holds the model.

Weights are stored once, in the recipe's precision: the master weights are other names for the same bytes, and moments
other names for a zero of each shape. So the files are as large as the weights, and are loaded like those of any other
checkpoint, by any layout, optimizer and ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llmrecipes.checkpoint.state_format import Written
from llmrecipes.engine.base import Progress, WeightSource
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.checkpoint.hashed_file import HashedFile
from llmrecipes.engine.core.checkpoint.index import OPTIMIZER_STATE, Described, ObjectRecord, encode, make_table
from llmrecipes.engine.core.checkpoint.slices import other_state, sharded_parameters
from llmrecipes.engine.core.model.config import DTYPES
from llmrecipes.engine.core.model.gpt import construct_without_memory
from llmrecipes.engine.core.model.init import READ_AT_ONCE, global_name, slice_of, split_rows, whole_name
from llmrecipes.engine.core.update import scheduler
from llmrecipes.io import sync
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.rules.optimizer_kinds import state_names
from llmrecipes.recipe.schema import Recipe

FILE = "__0_0.distcp"
OUTSIDE = ("embedding.", "output_layer.")
"""Beginnings of the names of matrices that are not between hidden layers."""
_Row = list[int]


def write(plan: Plan, weights: WeightSource, directory: Path) -> tuple[Written, dict[str, str]]:
    """Write the files of a checkpoint; see `Backend.write_weights`.

    Returns:
        The files, and the versions for the manifest.
    """
    state = construct_without_memory(plan).sharded_state()
    kept = ShardedFormat({"device": "cpu", "layers": "local"})
    prepared = kept.prepare(_common(plan.recipe), directory, 0)
    dtype = DTYPES[plan.recipe.train.precision]
    table = _IndexRows()
    with (directory / FILE).open("wb") as file, ThreadPoolExecutor(1) as thread:
        stream = HashedFile(file, thread)
        zeros: dict[tuple[int, ...], tuple[int, int]] = {}
        for part in _stacked_slices(part.shard for sharded in sharded_parameters(state) for part in sharded.slices):
            values = weights.read(part.name, part.inner, part.size[part.depth :]).to(dtype)
            place = stream.store(values.reshape(part.size))
            table.add("", part, dtype, place)
            table.add("optimizer.state.param.", part, dtype, place)
            if part.size not in zeros:
                zeros[part.size] = stream.store(torch.zeros(1).expand(part.size), views=True)
            of_matrix = len(part.size) - part.depth == 2 and not part.name.startswith(OUTSIDE)
            for name in state_names(plan.recipe.optimizer, of_matrix=of_matrix):
                table.add(OPTIMIZER_STATE.format(name), part, torch.float32, zeros[part.size])
        for shard in other_state(state):
            if isinstance(shard, ShardedTensor) and shard.data.is_floating_point():
                for part in _stacked_slices([shard]):
                    values = weights.read(part.name, part.inner, part.size[part.depth :]).to(shard.data.dtype)
                    table.add("", part, shard.data.dtype, stream.store(values.reshape(part.size)))
        objects = [ObjectRecord(name=name, place=[0, *stream.store(value)]) for name, value in prepared.objects.items()]
    sync(directory / FILE)
    index = encode(make_table([FILE], objects, table.described()))
    kept.finish(directory, [index])
    return Written({FILE: stream.record()}, index), kept.versions()


class _StackedSlice(NamedTuple):
    """Some rows of a tensor in the checkpoint, in which layers and experts are stacked along the first dimensions."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    depth: int
    """Dimensions along which others are stacked."""
    name: str
    """Of the weight by itself."""

    @property
    def inner(self) -> tuple[int, ...]:
        """Offset in the weight by itself."""
        return self.offset[self.depth :]


def _stacked_slices(shards: Iterable[ShardedTensor]) -> Iterator[_StackedSlice]:
    for shard in shards:
        depth = shard.prepend_axis_num
        name = global_name(shard)
        rows = torch.empty(shard.local_shape, device="meta")
        for part in split_rows(slice_of(shard, rows), READ_AT_ONCE):
            offset = (*shard.global_offset[:depth], *part.offset)
            size = (*(1 for _ in range(depth)), *part.tensor.shape)
            yield _StackedSlice(shard.key, tuple(shard.global_shape), offset, size, depth, whole_name(name))


class _IndexRows:
    """Rows of the index, by tensor."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[str, tuple[int, ...], list[_Row]]] = {}

    def add(self, prefix: str, part: _StackedSlice, dtype: torch.dtype, place: tuple[int, int]) -> None:
        kind = str(dtype).removeprefix("torch.")
        row = [0, *place, *chain.from_iterable(zip(part.offset, part.size, strict=True))]
        self._tensors.setdefault(prefix + part.key, (kind, part.shape, []))[2].append(row)

    def described(self) -> Iterator[Described]:
        return ((name, *of) for name, of in self._tensors.items())


def _common(recipe: Recipe) -> dict[str, Any]:
    """What is not sharded in the state of an engine before its first step."""
    scaler = None
    if recipe.train.precision == "fp16":
        train = recipe.train
        scale = torch.tensor([train.initial_loss_scale])
        scaler = {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": train.hysteresis}
    return {
        "optimizer": {"step": 0, "grad_scaler": scaler},
        "scheduler": scheduler(recipe, SimpleNamespace(param_groups=[])).state_dict(),
        "progress": asdict(Progress()),
    }
