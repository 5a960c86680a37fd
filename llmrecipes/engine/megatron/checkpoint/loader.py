"""Loading a checkpoint into the current layout.

The steps are those of megatron-core's `dist_checkpointing.load`, which reads torch's pickled `.metadata` and unpickles
byte items; here the index is JSON and everything else is read as plain data.
"""

from __future__ import annotations

import io
import logging
import pickle
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint import LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from llmrecipes.checkpoint.safety import load_plain, open_inside, unsafe
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.megatron.checkpoint.index import INDEX_NAME, Document, Index, build, parse
from llmrecipes.engine.megatron.checkpoint.pickled_index import read as read_pickled
from llmrecipes.errors import UserError

logger = logging.getLogger(__name__)

_SHOWN = 8
_PICKLED_INDEX = ".metadata"
_COMMON_FILE = "common.pt"
"""File in which megatron-core 0.16 stores everything that is not sharded."""
_COMMON_OBJECT = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""The same in megatron-core 0.19."""


def load(entry: Entry, state: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint; a collective of all ranks.

    Args:
        entry: a checkpoint, as found by `CheckpointStore.latest_valid` on rank 0.
        state: sharded state dict of the current model and optimizer, in any parallel layout.

    Returns:
        The loaded state dict: the structure of `state`, and other saved values.

    Raises:
        UserError: the checkpoint has a different architecture (with the tensors that differ), or is not plain data.
    """
    index = read_index(entry)
    if differences := tensor_differences(index.metadata, state):
        hidden = len(differences) - _SHOWN
        lines = differences[:_SHOWN] + ([f"and {hidden} more"] if hidden > 0 else [])
        raise UserError(
            "this checkpoint has a different architecture:\n    " + "\n    ".join(lines),
            where=str(entry.path),
            rule="every tensor has the same name and global shape in the checkpoint and in the model",
            fix="use the recipe it was trained with (recipe.yaml in the run directory), or another run id",
        )
    if entry.manifest.format == 1 and dist.get_rank() == 0:
        logger.info(
            "%s was written by an older version: its manifest does not protect itself and its index is a pickle, "
            "which is read as data only; checkpoints saved from now on have neither",
            entry.path,
        )
    loaded = _read_common(entry, index)
    frame, local, factories = load_preprocess(state)
    merge(loaded, local)
    sharded = extract_sharded_base(frame)[0]
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(loaded, _read_sharded(entry, index, sharded))
    whole: dict[str, Any] = apply_factory_merges(loaded, factories)
    return whole


def read_index(entry: Entry) -> Index:
    """Read and check the index of a checkpoint.

    Raises:
        UserError: it is missing, not plain data, or inconsistent with the files.
    """
    name = _PICKLED_INDEX if entry.manifest.format == 1 else INDEX_NAME
    path = entry.path / name
    if name not in entry.manifest.files:
        raise _unfit(path, "it has no index")
    with open_inside(entry.path, name) as stream:
        if name == _PICKLED_INDEX:
            found = _unpickled(stream, path)
        else:
            try:
                found = parse(stream.read())
            except ValueError as problem:
                raise _unfit(path, str(problem)) from problem
    try:
        return build(found, entry.manifest.files)
    except ValueError as problem:
        raise _unfit(path, str(problem)) from problem


def tensor_differences(metadata: Metadata, state: dict[str, Any]) -> list[str]:
    """Tensors that a model needs but a checkpoint does not have, one line per tensor, sorted.

    Args:
        metadata: the checkpoint's index.
        state: sharded state dict of the model; not modified.
    """
    stored = metadata.state_dict_metadata
    found = set()
    for value in nested_values(load_preprocess(state)[0]):
        if isinstance(value, ShardedObject) and not isinstance(stored.get(value.unique_key), BytesStorageMetadata):
            found.add(f"{value.unique_key}: not in the checkpoint")
        if not isinstance(value, ShardedTensor):
            continue
        here = stored.get(value.key)
        if not isinstance(here, TensorStorageMetadata):
            found.add(f"{value.key}: not in the checkpoint")
        elif tuple(here.size) != tuple(value.global_shape) and not value.allow_shape_mismatch:
            found.add(f"{value.key}: {list(here.size)} in the checkpoint, {list(value.global_shape)} in the model")
    return sorted(found)


def _unpickled(stream: io.BufferedReader, path: Path) -> Document:
    try:
        return read_pickled(stream)
    except (OSError, MemoryError):
        raise
    except Exception as problem:  # malformed bytes raise any kind of exception in pickle
        raise unsafe(path, str(problem) if isinstance(problem, pickle.UnpicklingError) else repr(problem)) from problem


def _read_common(entry: Entry, index: Index) -> dict[str, Any]:
    """Values that are not sharded: the same on every rank."""
    place = index.places.get(MetadataIndex(_COMMON_OBJECT))
    name = _COMMON_FILE if place is None else place.file
    path = entry.path / name
    if place is None and _COMMON_FILE not in entry.manifest.files:
        raise _unfit(entry.path, f"it has neither {_COMMON_FILE} nor {_COMMON_OBJECT}")
    with open_inside(entry.path, name) as stream:
        view = stream if place is None else _create_file_view(stream, place.start, place.length)
        found = load_plain(view, path)
    if place is not None and isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise _unfit(path, f"what is not sharded is a {type(found).__name__}, not a dict")
    return found


def _read_sharded(entry: Entry, index: Index, sharded: dict[str, Any]) -> Any:
    """Tensors and objects of this rank; without communication."""
    values = [value for value in nested_values(sharded) if isinstance(value, ShardedTensor)]
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[value for value in values if not value.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={value.key: value for value in values if value.allow_shape_mismatch},
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    by_key, flat, names = _replace_state_dict_keys_with_sharded_keys(sharded)
    frame: dict[str, Any] = mcore_to_pyt_state_dict(by_key, True)
    planner.set_up_planner(frame, index.metadata, True)
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    _fill(entry, index, plan, planner, frame)
    unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in frame.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat, names)
    _restore_dict_types(loaded, sharded)
    return loaded


def _fill(entry: Entry, index: Index, plan: LoadPlan, planner: MCoreLoadPlanner, frame: dict[str, Any]) -> None:
    """Read every stored part that a plan needs once, in file order, into the state dict."""
    wanted: dict[MetadataIndex, list[ReadItem]] = {}
    for item in plan.items:
        wanted.setdefault(item.storage_index, []).append(item)
    ordered = sorted(wanted, key=lambda key: (index.places[key].file, index.places[key].start))
    for file, keys in groupby(ordered, key=lambda key: index.places[key].file):
        path = entry.path / file
        with open_inside(entry.path, file) as stream:
            for key in keys:
                place = index.places[key]
                value = load_plain(_create_file_view(stream, place.start, place.length), path)
                if place.dtype is None:
                    if not isinstance(value, list):
                        raise _unfit(path, f"{key.fqn!r} is a {type(value).__name__}, not a list")
                    frame[key.fqn] = value
                    continue
                _require_tensor(value, place.dtype, place.shape, key.fqn, path)
                for item in wanted[key]:
                    _copy(value, item, planner)


def _copy(tensor: torch.Tensor, item: ReadItem, planner: MCoreLoadPlanner) -> None:
    ends = (first + length for first, length in zip(item.storage_offsets, item.lengths, strict=True))
    part = tensor[tuple(map(slice, item.storage_offsets, ends))]
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def _require_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...], name: str, path: Path) -> None:
    if not isinstance(value, torch.Tensor):
        raise _unfit(path, f"{name!r} is a {type(value).__name__}, not a tensor")
    if value.dtype != dtype or tuple(value.shape) != shape:
        raise _unfit(path, f"{name!r} is {value.dtype} {list(value.shape)}, the index says {dtype} {list(shape)}")


def _unfit(path: Path, why: str) -> UserError:
    return UserError(
        f"this checkpoint is inconsistent: {why}",
        where=str(path),
        rule="the index describes what is in the files that the manifest lists",
        fix="use another checkpoint: this one was altered, or written by another program",
    )
