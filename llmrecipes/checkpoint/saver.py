"""Saving in the background."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from llmrecipes.checkpoint.format import CheckpointFormat, StateDict
from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.ranks import Ranks
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.checkpoint.writer import SaveFailed, write_checkpoint
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
        most_recent_k, keep_interval: see `CheckpointStore.prune`.

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
    ) -> None:
        self._store, self._group, self._files, self._async = store, group, files, async_save
        self._keep = (most_recent_k, keep_interval)
        self._rank = group.rank
        self._token = claim(store, group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_on_same_device())
        self._running: tuple[int, Future[SaveReport]] | None = None
        self._finished: list[SaveReport] = []
        self._saves = 0

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
        reports, self._finished = self._finished, []
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
        future, self._running = self._running[1], None
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
        if self._rank == 0:
            self._prune()
        return SaveReport(info.step, time.monotonic() - started, path)

    def _prune(self) -> None:
        try:
            self._store.prune(*self._keep)
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
