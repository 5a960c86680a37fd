"""Writing a snapshot from all ranks into one published directory.

Everything here runs in the saver's thread and talks to the other ranks over a group of its own, so that no collective
mixes with those of training. Each step ends with an agreement: either all ranks go on or all ranks stop with the same
message, and no rank waits for one that has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
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

from llmrecipes.checkpoint.manifest import CheckpointInfo, FileRecord, digest
from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.engine.megatron.checkpoint.index import INDEX_NAME, encode

T = TypeVar("T")

BACKEND = "torch_dist"


class SaveFailed(Exception):
    """A save that did not happen, with the same message on every rank.

    Args:
        reason: which rank, and why.
        storage: whether the disk is at fault; anything else is a defect of the program.
    """

    def __init__(self, reason: str, *, storage: bool) -> None:
        super().__init__(reason)
        self.storage = storage


@dataclass(frozen=True)
class _Trouble:
    """An exception in a form that every rank can read."""

    text: str
    storage: bool


def library_versions() -> dict[str, str]:
    """Versions that decide whether the files can be read again."""
    return {"megatron-core": version("megatron-core"), "torch": version("torch")}


def write_checkpoint(
    state: dict[str, Any], temporary: Path, info: CheckpointInfo, store: CheckpointStore, group: dist.ProcessGroup
) -> Path:
    """Write this rank's part and, on rank 0, publish the whole.

    Args:
        state: snapshot of the sharded state dict (it is consumed).
        temporary: directory that all ranks name alike; rank 0 makes it.
        info: what the manifest says besides the files.
        store: where rank 0 publishes.
        group: gloo group of all ranks, used by this thread alone.

    Returns:
        The published directory.

    Raises:
        SaveFailed: on all ranks, after rank 0 has removed the temporary directory.
    """
    rank = dist.get_rank(group)
    try:
        # Only rank 0 may see a full disk here, so the others must hear of it before they wait for its plan.
        translated = _together(group, lambda: _translate(state, temporary, rank))
        writer = _Writer(temporary)
        shared = _share(group, lambda: _write_shards(translated, writer, temporary, group))
        known = {name: record for records in shared for name, record in records.items()}
        _together(group, lambda: _publish(temporary, info, store, known, writer.metadata))
    except SaveFailed:
        if rank == 0:
            store.discard(temporary)
        raise
    return store.path(info.step)


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


def _translate(state: dict[str, Any], temporary: Path, rank: int) -> dict[str, Any]:
    if rank == 0:
        temporary.mkdir(parents=True)
    strategy = _Translation()
    # validate_access_integrity needs the default group; the saver has validated the structure in the loop's thread.
    dist_checkpointing.save(
        state, str(temporary), sharded_strategy=strategy, validate_access_integrity=False, async_sharded_save=True
    )
    if rank == 0:
        save_config(CheckpointingConfig(BACKEND, 1), str(temporary))
    return strategy.translated


class _Writer(dcp.FileSystemWriter):
    """torch's writer, which keeps a disk's failure for later instead of raising it.

    torch's zip code answers a failed write with a RuntimeError about positions; the OSError is only in its context,
    which is lost on the way to the other ranks, and torch logs the whole traceback.
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
        self.failure = _os_error(error)
        if self.failure is None:
            raise error


def _write_shards(
    translated: dict[str, Any], writer: _Writer, temporary: Path, group: dist.ProcessGroup
) -> dict[str, FileRecord]:
    """Write this rank's files (all ranks together); their records."""
    planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_replicated_tensors=False)
    try:
        dcp.save(translated, storage_writer=writer, planner=planner, process_group=group)
    except dcp.CheckpointException as problem:
        raise RuntimeError(str(problem)) from problem
    if writer.failure is not None:
        raise writer.failure
    return {path.name: digest(path) for path in temporary.glob(f"__{dist.get_rank(group)}_*.distcp")}


def _publish(
    temporary: Path,
    info: CheckpointInfo,
    store: CheckpointStore,
    known: dict[str, FileRecord],
    metadata: Metadata | None,
) -> Entry | None:
    """On rank 0, which has the metadata; nothing on the others."""
    if metadata is None:
        return None
    (temporary / INDEX_NAME).write_bytes(encode(metadata))
    return store.publish(temporary, info, versions=library_versions(), known=known)


def _together(group: dist.ProcessGroup, step: Callable[[], T]) -> T:
    """Do a step on all ranks; this rank's result, once all have succeeded."""
    results: list[T] = []
    _share(group, lambda: results.append(step()))
    return results[0]


def _share(group: dist.ProcessGroup, step: Callable[[], T]) -> list[T]:
    """Do a step on all ranks; everyone's results, by rank."""
    answer: T | _Trouble
    try:
        answer = step()
    except Exception as error:
        answer = _trouble(error)
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, answer, group=group)
    if troubles := {rank: item for rank, item in enumerate(answers) if isinstance(item, _Trouble)}:
        raise _failure(troubles)
    return answers


def _failure(troubles: dict[int, _Trouble]) -> SaveFailed:
    reason = "; ".join(f"rank {rank}: {trouble.text}" for rank, trouble in sorted(troubles.items()))
    return SaveFailed(reason, storage=all(trouble.storage for trouble in troubles.values()))


def _trouble(error: BaseException) -> _Trouble:
    if (cause := _os_error(error)) is not None:
        where = f" ({cause.filename})" if cause.filename else ""
        return _Trouble(f"{cause.strerror or cause}{where}", storage=True)
    return _Trouble(f"{type(error).__name__}: {error}", storage=False)


def _os_error(error: BaseException) -> OSError | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause
