"""Writing a snapshot from all ranks into one published directory.

Everything here runs in the saver's thread and communicates over its own groups, so that its collectives do not mix with
those of training. Each step ends with an agreement: either all ranks continue or all ranks stop with the same message,
and no rank waits for one that has failed. What is sent does not depend on the size of the state: a rank tells the first
one which files it has written and where in them each part of a tensor is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmrecipes.checkpoint.format import CheckpointFormat, StateDict, Written
from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.ranks import Ranks
from llmrecipes.checkpoint.store import CheckpointStore

T = TypeVar("T")

_SHOWN = 8
"""Ranks that a message names; a full disk fails them all."""


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
    ranks: Ranks,
    files: CheckpointFormat,
) -> Path:
    """Write this rank's part and, on rank 0, publish the checkpoint.

    Args:
        taken: snapshot of the state (it is consumed).
        temporary: directory, the same on all ranks; rank 0 creates it.
        info: the other contents of the manifest.
        store: where rank 0 publishes.
        ranks: all ranks, used only by this thread.
        files: the engine's format.

    Returns:
        The published directory.

    Raises:
        SaveFailed: on all ranks, after rank 0 has removed the temporary directory.
    """

    def publish(written: list[Written]) -> None:
        files.finish(temporary, [each.index for each in written])
        known = {name: record for each in written for name, record in each.files.items()}
        store.publish(temporary, info, versions=files.versions(), known=known)

    try:
        # A full disk may only show on rank 0 here, so the others must learn of it before they use its directory.
        prepared = _attempt(lambda: files.prepare(taken, temporary, ranks.rank))
        _agree(ranks, prepared if isinstance(prepared, _Failure) else None)
        _agree(ranks, _attempt(lambda: files.write(prepared, temporary, ranks.rank)), publish)
    except SaveFailed:
        if ranks.rank == 0:
            store.discard(temporary)
        raise
    return store.path(info.step)


def _agree(ranks: Ranks, own: T | _Failure, then: Callable[[list[T]], None] | None = None) -> None:
    """Return on all ranks if all have succeeded, and `then` on the first of them with all results; else raise."""
    results = ranks.gather(own)
    failures: dict[int, _Failure] | None = None
    if results is not None:
        failures = {rank: item for rank, item in enumerate(results) if isinstance(item, _Failure)}
        if then is not None and not failures:
            done = _attempt(lambda: then([item for item in results if not isinstance(item, _Failure)]))
            failures = {0: done} if isinstance(done, _Failure) else {}
    if failures := ranks.broadcast(failures):
        raise _save_failed(failures)


def _attempt(step: Callable[[], T]) -> T | _Failure:
    try:
        return step()
    except Exception as error:
        return _failure(error)


def _save_failed(failures: dict[int, _Failure]) -> SaveFailed:
    shown = sorted(failures.items())[:_SHOWN]
    reason = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in shown)
    if len(failures) > len(shown):
        reason += f"; and {len(failures) - len(shown)} more ranks"
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
