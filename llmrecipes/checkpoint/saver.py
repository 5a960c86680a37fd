"""Saving in the background: from a snapshot on every rank to one published directory.

Writing runs in the saver's thread and communicates over its own groups, so that its collectives do not mix with those
of training. Each step of it ends with an agreement: either all ranks continue or all ranks stop with the same message,
and no rank waits for one that has failed. What is sent does not depend on the size of the state: a rank tells the first
one which files it has written and where in them each part of a tensor is.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.state_format import CheckpointFormat, StateDict, Written
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.errors import UserError

logger = logging.getLogger(__name__)

LONGEST_SAVE = timedelta(hours=2)
"""Timeout of a rank that waits for another rank's files."""


def saver_group() -> Ranks:
    """All ranks, for the saver's thread; a collective of all ranks."""
    return Ranks(LONGEST_SAVE)


@dataclass(frozen=True)
class SaveReport:
    """How a save ended."""

    step: int
    seconds: float
    """From the call of `save` to the end, mostly in the background."""
    path: Path | None
    """The published checkpoint; None if it failed."""
    error: str | None = None
    """Why it failed."""


class AsyncSaver:
    """Writes snapshots in one background thread per rank; every rank makes the same calls in the same order.

    The loop's thread only copies tensors to host buffers. Translation, planning, writing, hashing, publishing and
    retention happen in the background thread, whose collectives use their own gloo groups.

    Args:
        store: the run's checkpoints; rank 0 claims it.
        group: see `saver_group`.
        files: the engine's format.
        async_save: whether `save` returns before the files are written.
        most_recent_k, keep_interval, keep_best: see `CheckpointStore.prune`.
        saved: told the step of each published checkpoint by the background thread of rank 0, before `prune`; what it
            returns is that of `shared`.
        shared: called on every rank with the step, and what `saved` has returned on rank 0; before `prune`.

    Raises:
        UserError: on every rank, if rank 0 cannot claim the store.
    """

    def __init__(
        self,
        store: CheckpointStore,
        group: Ranks,
        files: CheckpointFormat,
        *,
        async_save: bool = True,
        most_recent_k: int = 2,
        keep_interval: int | None = None,
        keep_best: bool = False,
        saved: Callable[[int], object] | None = None,
        shared: Callable[[int, Any], None] | None = None,
    ) -> None:
        self._store = store
        self._group = group
        self._files = files
        self._async = async_save
        self._prune_store = partial(store.prune, most_recent_k, keep_interval, keep_best=keep_best)
        self._saved = saved
        self._shared = shared
        self._rank = group.rank
        self._token = claim(store, group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_on_same_device())
        self._running: tuple[int, Future[SaveReport]] | None = None
        self._reserved: Future[None] | None = None
        self._finished: list[SaveReport] = []
        self._saves = 0

    def reserve(self, state: StateDict) -> None:
        """Start to allocate the memory for snapshots of states like this one; the first `save` waits for it.

        Errors are those of `save`, which tries again.
        """
        if (allocate := self._files.reserve(state)) is not None:
            self._reserved = self._thread.submit(allocate)

    def save(self, state: StateDict, info: CheckpointInfo) -> None:
        """Take a snapshot and start to write it.

        After this returns the caller may modify every tensor in place: the checkpoint has the values of the call.
        Waits first for a save that is still running.

        Args:
            state: in the form that the format writes.
            info: step, progress, layout and recipe, for the manifest.
        """
        if self._running is not None and not self._running[1].done():
            logger.warning("step %d waits for the checkpoint of step %d to be written", info.step, self._running[0])
        self._collect(block=True)
        started = time.monotonic()
        if self._reserved is not None:
            wait([self._reserved])
            self._reserved = None
        taken = self._files.snapshot(state)
        temporary = self._store.temporary_path(info.step, f"{self._token}-{self._saves}")
        self._saves += 1
        self._running = info.step, self._thread.submit(self._write, taken, temporary, info, started)
        if not self._async:
            self._collect(block=True)

    def poll(self) -> list[SaveReport]:
        """Saves that have finished since the last call.

        It does not communicate, so ranks may report the same save at different steps.

        Raises:
            RuntimeError: a save failed for a reason other than the disk: a bug.
        """
        self._collect(block=False)
        reports = self._finished
        self._finished = []
        return reports

    def wait(self) -> list[SaveReport]:
        """Wait for the running save, then `poll`."""
        self._collect(block=True)
        return self.poll()

    def close(self) -> None:
        """Wait for the running save and release the store.

        Raises:
            RuntimeError: as `poll`.
        """
        try:
            self._collect(block=True)
        finally:
            self._thread.shutdown()
            self._store.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._running is not None and not self._running[1].done():
            logger.warning("waiting for the checkpoint of step %d, which is being written", self._running[0])
        try:
            self.close()
        except RuntimeError:
            if error is None:
                raise
            logger.exception("while the run was already failing with %s", type(error).__name__)

    def _collect(self, *, block: bool) -> None:
        if self._running is None or not (block or self._running[1].done()):
            return
        future = self._running[1]
        self._running = None
        self._finished.append(future.result())

    def _write(self, state: StateDict, temporary: Path, info: CheckpointInfo, started: float) -> SaveReport:
        try:
            path = write_checkpoint(state, temporary, info, self._store, self._group, self._files)
        except SaveFailed as failure:
            if not failure.storage:
                raise RuntimeError(f"the checkpoint of step {info.step} could not be written: {failure}") from failure
            if self._rank == 0:
                logger.error(
                    "ALARM: the checkpoint of step %d was not saved (%s); training continues; earlier checkpoints are "
                    "untouched",
                    info.step,
                    failure,
                )
            return SaveReport(info.step, time.monotonic() - started, None, str(failure))
        answer = self._saved(info.step) if self._saved is not None and self._rank == 0 else None
        if self._shared is not None:
            self._shared(info.step, self._group.broadcast(answer))
        if self._rank == 0:
            self.prune()
        return SaveReport(info.step, time.monotonic() - started, path)

    def prune(self) -> None:
        """Delete old checkpoints, on rank 0; done after each save, and only while none is being written."""
        try:
            self._prune_store()
        except OSError as problem:
            logger.warning("old checkpoints could not be deleted: %s", problem)


def _on_same_device() -> Callable[[], None]:
    """What makes the GPU of this thread that of another; a new thread's is the first of the node, on every rank."""
    if not torch.cuda.is_available():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def claim(store: CheckpointStore, group: Ranks) -> str:
    """Claim the store on rank 0, if it is not claimed yet; a collective of all ranks.

    Returns:
        A token for the names of temporary directories, the same on all ranks.

    Raises:
        UserError: on every rank, if rank 0 cannot claim it.
    """
    answer: str | tuple[str, str, str] | None = None
    if group.rank == 0:
        try:
            store.claim()
            answer = secrets.token_hex(4)
        except UserError as error:
            answer = (error.what, error.where, error.fix)
    shared = group.broadcast(answer)
    if isinstance(shared, str):
        return shared
    what, where, fix = shared
    raise UserError(what, where=where, fix=fix)


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
        files.finish(temporary, [part.index for part in written])
        known = {name: record for part in written for name, record in part.files.items()}
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


def _agree(ranks: Ranks, value: T | _Failure, then: Callable[[list[T]], None] | None = None) -> None:
    """Return on all ranks if all have succeeded, and `then` on the first of them with all results; else raise."""
    results = ranks.gather(value)
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
