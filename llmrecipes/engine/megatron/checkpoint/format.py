"""megatron-core sharded state dicts in torch.distributed.checkpoint files."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from llmrecipes.checkpoint.format import StateDict, Written
from llmrecipes.engine.megatron.checkpoint.index import INDEX_NAME, covered
from llmrecipes.engine.megatron.checkpoint.snapshot import Staging
from llmrecipes.engine.megatron.checkpoint.table import Table, boxes_of, decode, encode, merge
from llmrecipes.engine.megatron.checkpoint.torch_index import METADATA_NAME, MOST_PARTS, pickled
from llmrecipes.engine.megatron.checkpoint.writer import write_file
from llmrecipes.io import write_synced
from llmrecipes.nested import leaves

BACKEND = "torch_dist"


@dataclass(frozen=True)
class Prepared:
    """What a rank writes."""

    tensors: list[ShardedTensor]
    objects: dict[str, list[Any]]
    """By name; a rank may have several of one name."""


class ShardedFormat:
    """One saver's format: sharded state dicts, whose other leaves are plain data (numbers, strings, lists, tensors).

    Ranks write their files, and the index of each, without asking each other: torch's and megatron-core's own writers
    plan on one rank what all of them write.

    Args:
        written_by: what the manifest says of the engine besides versions.
    """

    def __init__(self, written_by: Mapping[str, str] | None = None) -> None:
        self._written_by = dict(written_by or {})
        self._staging = Staging()
        self._checked = False

    @property
    def held_bytes(self) -> int:
        """Host memory that this rank keeps for saving: as many bytes as the tensors that it writes."""
        return self._staging.nbytes

    def snapshot(self, state: StateDict) -> StateDict:
        """See `CheckpointFormat`; the factories of the state are applied in place."""
        taken = self._staging.take(state)
        if not self._checked:
            # The structure does not change within a run, so one check of it is enough.
            require_plain(taken)
            self._checked = True
        return taken

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> Prepared:
        """See `CheckpointFormat`."""
        if rank == 0:
            directory.mkdir(parents=True)
        strategy = _Translation()
        # The first rank writes here what is not sharded (megatron-core 0.16). No rank knows what the others write:
        # `finish` checks that it is every element once.
        dist_checkpointing.save(
            taken, str(directory), sharded_strategy=strategy, validate_access_integrity=False, async_sharded_save=True
        )
        if rank == 0:
            save_config(CheckpointingConfig(BACKEND, 1), str(directory))
        tensors: list[ShardedTensor] = []
        objects: dict[str, list[Any]] = {}
        for shard in strategy.shards:
            if isinstance(shard, ShardedTensor):
                tensors.append(shard)
            else:
                objects.setdefault(shard.unique_key, []).append(shard.data)
        return Prepared(tensors, objects)

    def planned_bytes(self, prepared: Prepared) -> int:
        """See `CheckpointFormat`."""
        return sum(shard.data.nbytes for shard in prepared.tensors if shard.data is not None)

    def write(self, prepared: Prepared, directory: Path, rank: int) -> Written:
        """See `CheckpointFormat`."""
        if not prepared.tensors and not prepared.objects:
            return Written({}, b"")
        name = f"__{rank}_0.distcp"
        record, index = write_file(directory / name, prepared.tensors, prepared.objects)
        return Written({name: record}, encode(index))

    def finish(self, directory: Path, indexes: list[bytes]) -> None:
        """See `CheckpointFormat`."""
        index = merge([decode(each) for each in indexes if each])
        require_whole(index)
        write_synced(directory / INDEX_NAME, encode(index))
        if len(index.columns[0]) <= MOST_PARTS:
            write_synced(directory / METADATA_NAME, pickled(index))

    def versions(self) -> dict[str, str]:
        """See `CheckpointFormat`."""
        return {"megatron-core": version("megatron-core"), "torch": version("torch"), **self._written_by}


class _Translation(TorchDistSaveShardedStrategy):
    """A save strategy that only keeps what this rank was asked to write."""

    def __init__(self) -> None:
        super().__init__(BACKEND, 1)
        self.shards: list[ShardedTensor | ShardedObject] = []

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> AsyncRequest:
        self.shards = [shard for shard in nested_values(sharded_state_dict) if is_main_replica(shard.replica_id)]
        return AsyncRequest(None, (), [])


def require_plain(state: dict[str, Any]) -> None:
    """Check before the first save that it can be loaded again.

    Raises:
        TypeError: with the entry that is not plain data.
    """
    for key, value in _saved(state):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as problem:
            raise TypeError(f"{key} of the state dict is not plain data: {problem}") from problem


def _saved(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in leaves(state, enter=lambda _: True):
        if isinstance(value, ShardedObject):
            yield value.key, value.data
        elif not isinstance(value, ShardedTensor | LocalNonpersistentObject):
            yield key, value


def require_whole(index: Table) -> None:
    """Every element of every tensor was written once.

    Raises:
        RuntimeError: it was not: a bug in who writes what.
    """
    for tensor, rows in zip(index.tensors, index.rows, strict=True):
        offsets, sizes = boxes_of([column[rows] for column in index.columns], len(tensor.shape))
        if not covered(tensor.shape, offsets, sizes):
            raise RuntimeError(f"{tensor.name}, {tensor.shape}: elements were not written, or twice")
