"""Writing a snapshot from all ranks into one published directory.

Everything here runs in the saver's thread and communicates over its own group, so that its collectives do not mix with
those of training. Each step ends with an agreement: either all ranks continue or all ranks stop with the same message,
and no rank waits for one that has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from llmrecipes.checkpoint.format import CheckpointFormat, StateDict
from llmrecipes.checkpoint.manifest import CheckpointInfo, FileRecord
from llmrecipes.checkpoint.store import CheckpointStore, Entry

T = TypeVar("T")


class SaveFailed(Exception):
    """A save has failed; the message is the same on every rank.

    Args:
        reason: the rank, and its error.
        storage: whether it is a disk error; anything else is a bug.
    """

    def __init__(self, reason: str, *, storage: bool) -> None:
        super().__init__(reason)
        self.storage = storage


@dataclass(frozen=True)
class _Failure:
    """An exception in a form that can be sent to every rank."""

    text: str
    storage: bool


def write_checkpoint(
    taken: StateDict,
    temporary: Path,
    info: CheckpointInfo,
    store: CheckpointStore,
    group: dist.ProcessGroup,
    files: CheckpointFormat,
) -> Path:
    """Write this rank's part and, on rank 0, publish the checkpoint.

    Args:
        taken: snapshot of the state (it is consumed).
        temporary: directory, the same on all ranks; rank 0 creates it.
        info: the other contents of the manifest.
        store: where rank 0 publishes.
        group: gloo group of all ranks, used only by this thread.
        files: the engine's format.

    Returns:
        The published directory.

    Raises:
        SaveFailed: on all ranks, after rank 0 has removed the temporary directory.
    """
    rank = dist.get_rank(group)
    try:
        # A full disk may only show on rank 0 here, so the others must learn of it before they wait for its plan.
        prepared = _together(group, lambda: files.prepare(taken, temporary, rank))
        shared = _share(group, lambda: files.write(prepared, temporary, group))
        known = {name: record for records in shared for name, record in records.items()}
        _together(group, lambda: _publish(temporary, info, store, known, files) if rank == 0 else None)
    except SaveFailed:
        if rank == 0:
            store.discard(temporary)
        raise
    return store.path(info.step)


def _publish(
    temporary: Path,
    info: CheckpointInfo,
    store: CheckpointStore,
    known: dict[str, FileRecord],
    files: CheckpointFormat,
) -> Entry:
    files.finish(temporary)
    return store.publish(temporary, info, versions=files.versions(), known=known)


def _together(group: dist.ProcessGroup, step: Callable[[], T]) -> T:
    """Run a step on all ranks; returns this rank's result, once all have succeeded."""
    results: list[T] = []
    _share(group, lambda: results.append(step()))
    return results[0]


def _share(group: dist.ProcessGroup, step: Callable[[], T]) -> list[T]:
    """Run a step on all ranks; returns all results, by rank."""
    result: T | _Failure
    try:
        result = step()
    except Exception as error:
        result = _failure(error)
    results: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, result, group=group)
    if failures := {rank: item for rank, item in enumerate(results) if isinstance(item, _Failure)}:
        raise _save_failed(failures)
    return results


def _save_failed(failures: dict[int, _Failure]) -> SaveFailed:
    reason = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in sorted(failures.items()))
    return SaveFailed(reason, storage=all(failure.storage for failure in failures.values()))


def _failure(error: BaseException) -> _Failure:
    if (cause := os_error(error)) is not None:
        where = f" ({cause.filename})" if cause.filename else ""
        return _Failure(f"{cause.strerror or cause}{where}", storage=True)
    return _Failure(f"{type(error).__name__}: {error}", storage=False)


def os_error(error: BaseException) -> OSError | None:
    """The OSError that an exception is or was caused by; None if it is not a disk error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause
