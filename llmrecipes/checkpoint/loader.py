"""Loading a checkpoint into the layout of now."""

from __future__ import annotations

from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from llmrecipes.checkpoint.safety import audit
from llmrecipes.checkpoint.store import Entry
from llmrecipes.errors import UserError

_SHOWN = 8


def load(entry: Entry, state: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint; every rank has to call this.

    Args:
        entry: a checkpoint, as `CheckpointStore.latest_valid` found it on rank 0.
        state: sharded state dict of the model and optimizer of now, in any parallel layout.

    Returns:
        The loaded state dict: the structure of `state`, and what was saved beside it.

    Raises:
        UserError: the checkpoint is of another architecture (with the tensors that differ), or is not plain data.
    """
    metadata = audit(entry.path)
    if differences := tensor_differences(metadata, state):
        hidden = len(differences) - _SHOWN
        lines = differences[:_SHOWN] + ([f"and {hidden} more"] if hidden > 0 else [])
        raise UserError(
            "this checkpoint is of another architecture:\n    " + "\n    ".join(lines),
            where=str(entry.path),
            rule="every tensor has the same name and global shape in the checkpoint and in the model",
            fix="use the recipe it was trained with (recipe.yaml in the run directory), or another run id",
        )
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(entry.path))
    return loaded


def tensor_differences(metadata: Metadata, state: dict[str, Any]) -> list[str]:
    """What a model needs and a checkpoint does not have, one line a tensor, sorted.

    Args:
        metadata: the checkpoint's index.
        state: sharded state dict of the model; left as it is.
    """
    stored = metadata.state_dict_metadata
    found = set()
    for value in nested_values(load_preprocess(state)[0]):
        if isinstance(value, ShardedObject) and value.unique_key not in stored:
            found.add(f"{value.unique_key}: not in the checkpoint")
        if not isinstance(value, ShardedTensor):
            continue
        here = stored.get(value.key)
        if not isinstance(here, TensorStorageMetadata):
            found.add(f"{value.key}: not in the checkpoint")
        elif tuple(here.size) != tuple(value.global_shape) and not value.allow_shape_mismatch:
            found.add(f"{value.key}: {list(here.size)} in the checkpoint, {list(value.global_shape)} in the model")
    return sorted(found)
