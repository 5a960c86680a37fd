"""Loading a checkpoint into the current layout.

A rank reads the parts that overlap with its own, without asking other ranks. megatron-core's `dist_checkpointing.load`
would compare every part of a rank with every stored one, read torch's pickled `.metadata` and unpickle byte items; here
everything is read as plain data, so loading a checkpoint never runs code.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.utils import _create_file_view

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.core.checkpoint.index import Index, as_index
from llmrecipes.engine.core.checkpoint.reading import load_plain, open_inside, read_index, require_tensor, unfit
from llmrecipes.errors import UserError

logger = logging.getLogger(__name__)

_SHOWN = 8
_COMMON_FILE = "common.pt"
"""File in which megatron-core before 0.19 stores everything that is not sharded."""
COMMON_OBJECT = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""The same in megatron-core 0.19."""


def load(entry: Entry, state: dict[str, Any], index: Index | None = None) -> dict[str, Any]:
    """Read what this rank needs of a checkpoint, without communication.

    Args:
        entry: a checkpoint, of `CheckpointStore.latest_valid` on rank 0.
        state: sharded state dict of the current model and optimizer, in any parallel layout; it is read into its
            tensors.
        index: of `read_index`, if it was called before.

    Returns:
        The loaded state dict: the structure of `state` without what is empty, and other saved values.

    Raises:
        UserError: the checkpoint has a different architecture (with the tensors that differ), or is not plain data.
    """
    index = index or read_index(entry)
    if differences := tensor_differences(index, state):
        hidden = len(differences) - _SHOWN
        lines = differences[:_SHOWN] + ([f"and {hidden} more"] if hidden > 0 else [])
        raise UserError(
            "this checkpoint has a different architecture:\n    " + "\n    ".join(lines),
            where=str(entry.path),
            rule="every tensor must have the same name and global shape in checkpoint and model",
            fix="use the recipe it was trained with (recipe.yaml in the run directory), or another run id",
        )
    if entry.manifest.format == 1 and dist.get_rank() == 0:
        logger.info(
            "%s was written by an older version: its manifest has no checksum of itself and its index is a pickle, "
            "which is read as data only; checkpoints saved from now on have neither",
            entry.path,
        )
    return _filled(state, _read_common(entry, index), lambda sharded: _read_sharded(entry, index, sharded))


def rehearse(state: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """`load` without reading anything, of a checkpoint that this layout has saved.

    Args:
        state: as `load`.

    Returns:
        The state as loaded, with the values that it has, and the bytes of each part that would be read.
    """
    sizes: list[int] = []

    def present(value: ShardedTensor | ShardedObject) -> Any:
        if isinstance(value, ShardedTensor):
            value.init_data("meta", torch.empty)
            sizes.append(value.data.nbytes)
        return value.data

    return _filled(state, None, lambda sharded: dict_list_map_inplace(present, sharded)), sizes


def _filled(
    state: dict[str, Any], common: dict[str, Any] | None, fill: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """A state dict with what is common to all ranks (None: its own), and what `fill` makes of its shards."""
    frame, local, factories = load_preprocess(state)
    sharded, local_common = extract_sharded_base(frame)
    filled = local_common if common is None else common
    merge(filled, local)
    _replace(filled, fill(sharded))
    whole: dict[str, Any] = apply_factory_merges(filled, factories)
    return whole


def _replace(common: dict[str, Any], sharded: dict[str, Any]) -> None:
    """Put what is sharded into what is not.

    The first rank saved the latter, with empty lists where it had nothing; other ranks and layouts may have something.
    """
    for key, value in sharded.items():
        if isinstance(value, dict) and isinstance(known := common.get(key), dict):
            _replace(known, value)
        else:
            common[key] = value


def tensor_differences(index: Index, state: dict[str, Any]) -> list[str]:
    """Tensors that a model needs but a checkpoint does not have, one line per tensor, sorted.

    Args:
        index: of the checkpoint.
        state: sharded state dict of the model; not modified.
    """
    differences = set()
    for value in nested_values(load_preprocess(state)[0]):
        if isinstance(value, ShardedObject) and value.unique_key not in index.objects:
            differences.add(f"{value.unique_key}: not in the checkpoint")
        if not isinstance(value, ShardedTensor):
            continue
        stored = index.tensors.get(value.key)
        if stored is None:
            differences.add(f"{value.key}: not in the checkpoint")
        elif stored.shape != tuple(value.global_shape) and not value.allow_shape_mismatch:
            shapes = f"{list(stored.shape)} in the checkpoint, {list(value.global_shape)} in the model"
            differences.add(f"{value.key}: {shapes}")
    return sorted(differences)


def _read_common(entry: Entry, index: Index) -> dict[str, Any]:
    """Values that are not sharded: the same on every rank."""
    place = index.objects.get(COMMON_OBJECT)
    name = _COMMON_FILE if place is None else place[0]
    path = entry.path / name
    if place is None and _COMMON_FILE not in entry.manifest.files:
        raise unfit(entry.path, f"it has neither {_COMMON_FILE} nor {COMMON_OBJECT}")
    with open_inside(entry.path, name) as stream:
        view = stream if place is None else _create_file_view(stream, *place[1:])
        common = load_plain(view, path)
    if place is not None and isinstance(common, list) and len(common) == 1:
        common = common[0]
    if not isinstance(common, dict):
        raise unfit(path, f"the common (unsharded) state is a {type(common).__name__}, expected a dict")
    return common


class _SliceRead(NamedTuple):
    """A stored slice that this rank needs elements of, and one of its uses."""

    place: tuple[int, int, int]
    """Number of the file, first byte and bytes."""
    name: str
    shape: tuple[int, ...]
    elements: tuple[slice, ...]
    into: torch.Tensor


def _read_sharded(entry: Entry, index: Index, sharded: dict[str, Any]) -> Any:
    """Tensors and objects of this rank, in place of those of a state dict."""
    parts = [
        part
        for value in nested_values(sharded)
        if isinstance(value, ShardedTensor)
        for part in _slice_reads(entry, index, value)
    ]
    parts.sort(key=lambda part: part.place)
    for number, of_file in groupby(parts, key=lambda part: part.place[0]):
        path = entry.path / index.files[number]
        with open_inside(entry.path, index.files[number]) as stream:
            for place, uses in groupby(of_file, key=lambda part: part.place):
                # Each stored part is read once, and never more than one is in memory.
                value = load_plain(_create_file_view(stream, *place[1:]), path)
                for use in uses:
                    require_tensor(value, index.tensors[use.name].dtype, use.shape, use.name, path)
                    use.into.copy_(value[use.elements])
    seen: Counter[str] = Counter()

    def loaded(value: ShardedTensor | ShardedObject) -> Any:
        if isinstance(value, ShardedTensor):
            return value.data
        stored = _object(entry, index, value.unique_key)
        seen[value.unique_key] += 1
        return stored[min(seen[value.unique_key], len(stored)) - 1]

    return dict_list_map_inplace(loaded, sharded)


def _slice_reads(entry: Entry, index: Index, shard: ShardedTensor) -> Iterator[_SliceRead]:
    """Stored slices that have elements of a shard."""
    stored = index.tensors[shard.key]
    shape = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
    if shard.data is None:
        shard.data = torch.empty(shard.local_shape, dtype=shard.dtype)
    shard.data = shard.data.detach()
    if shard.allow_shape_mismatch:
        shard.data.zero_()
    target = shard.data.view(shape)
    try:
        parts = stored.slices(shard.global_offset, shape)
    except ValueError as problem:
        raise unfit(entry.path, str(problem)) from problem
    low = np.asarray(shard.global_offset, np.int64)
    high = np.asarray(shape, np.int64) + shard.global_offset
    starts = np.maximum(parts.offsets, low)
    ends = np.minimum(parts.offsets + parts.sizes, high)
    for number, place in enumerate(parts.places.tolist()):
        elements, target_index = (
            as_index(starts[number] - origin, ends[number] - origin) for origin in (parts.offsets[number], low)
        )
        yield _SliceRead(tuple(place), shard.key, tuple(parts.sizes[number].tolist()), elements, target[target_index])


def _object(entry: Entry, index: Index, name: str) -> list[Any]:
    file, start, length = index.objects[name]
    with open_inside(entry.path, file) as stream:
        value = load_plain(_create_file_view(stream, start, length), entry.path / file)
    if not isinstance(value, list) or not value:
        raise unfit(entry.path / file, f"{name!r} is a {type(value).__name__}, expected a list of values")
    return value
