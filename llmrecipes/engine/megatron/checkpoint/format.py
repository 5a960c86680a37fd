"""megatron-core sharded state dicts in torch.distributed.checkpoint files."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmrecipes.checkpoint.format import StateDict
from llmrecipes.checkpoint.manifest import FileRecord, digest
from llmrecipes.checkpoint.writer import os_error
from llmrecipes.engine.megatron.checkpoint.index import INDEX_NAME, encode
from llmrecipes.engine.megatron.checkpoint.snapshot import Staging
from llmrecipes.nested import leaves

BACKEND = "torch_dist"


class ShardedFormat:
    """One saver's format: sharded state dicts, whose other leaves are plain data (numbers, strings, lists, tensors)."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._checked = False
        self._metadata: Metadata | None = None

    def snapshot(self, state: StateDict) -> StateDict:
        """See `CheckpointFormat`; the factories of the state are applied in place."""
        taken = self._staging.take(state)
        if not self._checked:
            # The structure does not change within a run, so one check of it is enough.
            save_preprocess(dict_list_map_outplace(lambda value: value, taken), True)
            require_plain(taken)
            self._checked = True
        return taken

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> dict[str, Any]:
        """See `CheckpointFormat`; the result is torch.distributed.checkpoint's plan and data."""
        if rank == 0:
            directory.mkdir(parents=True)
        strategy = _Translation()
        # validate_access_integrity needs the default group; `snapshot` has validated the structure already.
        dist_checkpointing.save(
            taken, str(directory), sharded_strategy=strategy, validate_access_integrity=False, async_sharded_save=True
        )
        if rank == 0:
            save_config(CheckpointingConfig(BACKEND, 1), str(directory))
        return strategy.translated

    def planned_bytes(self, prepared: dict[str, Any]) -> int:
        """See `CheckpointFormat`."""
        planner = _planner()
        planner.set_up_planner(prepared, None, dist.get_rank() == 0)
        parts = [item.tensor_data for item in planner.create_local_plan().items if item.tensor_data is not None]
        return sum(prod(part.chunk.sizes) * part.properties.dtype.itemsize for part in parts)

    def write(self, prepared: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> dict[str, FileRecord]:
        """See `CheckpointFormat`."""
        writer = _Writer(directory)
        planner = _planner()
        try:
            dcp.save(prepared, storage_writer=writer, planner=planner, process_group=group)
        except dcp.CheckpointException as problem:
            raise RuntimeError(str(problem)) from problem
        if writer.failure is not None:
            raise writer.failure
        self._metadata = writer.metadata
        return {path.name: digest(path) for path in directory.glob(f"__{dist.get_rank(group)}_*.distcp")}

    def finish(self, directory: Path) -> None:
        """See `CheckpointFormat`."""
        if self._metadata is None:
            raise RuntimeError("torch gave rank 0 no metadata of what was written")
        (directory / INDEX_NAME).write_bytes(encode(self._metadata))
        self._metadata = None

    def versions(self) -> dict[str, str]:
        """See `CheckpointFormat`."""
        return {"megatron-core": version("megatron-core"), "torch": version("torch")}


def _planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_replicated_tensors=False)


class _Translation(TorchDistSaveShardedStrategy):
    """A save strategy that only keeps what it was asked to write, in torch.distributed.checkpoint's terms.

    megatron-core's own strategy would write through forked (0.16) or spawned helper processes and plan on the default
    group; torch's writer does neither, and reads and writes the same format.
    """

    def __init__(self) -> None:
        super().__init__(BACKEND, 1)
        self.translated: dict[str, Any] = {}

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> AsyncRequest:
        shards, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self.translated = mcore_to_pyt_state_dict(shards, False)
        return AsyncRequest(None, (), [])


class _Writer(dcp.FileSystemWriter):
    """torch's writer, which stores a disk error for later instead of raising it.

    torch's zip code raises a RuntimeError about positions for a failed write; the OSError is only in its context, which
    is lost on the way to the other ranks, and torch logs the full traceback.
    """

    failure: OSError | None = None
    metadata: Metadata | None = None
    """What was written; on rank 0 alone."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            self._keep(error)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
            self.metadata = metadata
        except OSError as error:
            self._keep(error)

    def _keep(self, error: Exception) -> None:
        self.failure = os_error(error)
        if self.failure is None:
            raise error


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
