"""Writing a snapshot from all ranks into one published directory.

Everything here runs in the saver's thread and talks to the other ranks over a group of its own, so that no collective
mixes with those of training. Each step ends with an agreement: either all ranks continue or all ranks stop with the
same message, and no rank waits for one that has failed.
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


def write_checkpoint(
    taken: StateDict,
    temporary: Path,
    info: CheckpointInfo,
    store: CheckpointStore,
    group: dist.ProcessGroup,
    files: CheckpointFormat,
) -> Path:
    """Write this rank's part and, on rank 0, publish the whole.

    Args:
        taken: snapshot of the state (it is consumed).
        temporary: directory that all ranks name alike; rank 0 makes it.
        info: what the manifest says besides the files.
        store: where rank 0 publishes.
        group: gloo group of all ranks, used by this thread alone.
        files: the engine's format.

    Returns:
        The published directory.

    Raises:
        SaveFailed: on all ranks, after rank 0 has removed the temporary directory.
    """
    rank = dist.get_rank(group)
    try:
        # Only rank 0 may see a full disk here, so the others must know before they wait for its plan.
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
    if (cause := os_error(error)) is not None:
        where = f" ({cause.filename})" if cause.filename else ""
        return _Trouble(f"{cause.strerror or cause}{where}", storage=True)
    return _Trouble(f"{type(error).__name__}: {error}", storage=False)


def os_error(error: BaseException) -> OSError | None:
    """The OSError that an exception is or came from; None where the disk is not at fault."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause
