"""Copies of a run's checkpoints in an object store (`checkpoint.copy_to`), uploaded while the run goes on."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, cast

from llmrecipes.checkpoint.manifest import InvalidCheckpoint, read_manifest
from llmrecipes.checkpoint.rank_groups import own_share
from llmrecipes.checkpoint.remote import RemoteCheckpoints
from llmrecipes.checkpoint.saver import LONGEST_SAVE
from llmrecipes.errors import UserError
from llmrecipes.runfiles import RECIPE
from llmrecipes.tracking.events import Note
from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.train.remote_copies import BESIDE
from llmrecipes.train.spec import RunSpec

logger = logging.getLogger(__name__)

LONGEST_LAST_COPY = 0.75 * LONGEST_SAVE.total_seconds()
"""Seconds that the end of a run waits for its last copy; the other ranks wait for the first a little longer."""
LONGEST_AFTER_STOP = 30.0
"""Seconds that a rank that stops waits for a copy: a scheduler that has asked it to stop kills it soon."""


class Copies(Observer):
    """The copies of a run, one at a time: each rank uploads its share of the files, in a thread of its own.

    A checkpoint that is saved while an earlier one is still being copied is left out; the last one of a run never is.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._recipe = spec.recipe
        self._run = spec.run
        self._url = str(spec.recipe.checkpoint.copy_to)
        self._thread: threading.Thread | None = None
        self._gives_up = threading.Event()
        self._notes: SimpleQueue[Note] = SimpleQueue()
        self._copied = -1
        self._went_back_to: int | None = None
        self._left_out: list[int] = []
        self._has_begun = False

    @classmethod
    def wanted(cls, spec: RunSpec) -> bool:
        """With `checkpoint.copy_to`."""
        return spec.recipe.checkpoint.copy_to is not None

    def begin(self) -> None:
        """Show that the store can be written, and copy what an earlier start has not; a collective of all ranks.

        Raises:
            UserError: on every rank: it cannot be written, and the run has no step to lose.
        """
        if self._has_begun:
            return
        self._has_begun = True
        looked = self._first_look() if self.loop.world.is_first else None
        answer = cast("UserError | int | None", self.joined.group.broadcast(looked))
        if isinstance(answer, UserError):
            raise answer
        if answer is not None:
            self.take(answer)

    def saved(self, step: int) -> bool:
        """Whether the checkpoint is copied now."""
        if self._thread is not None and self._thread.is_alive():
            if step < self._recipe.train.train_iters:  # that of the last step is copied at the end
                logger.warning("step %d is not copied: an earlier copy has not ended", step)
                self._left_out.append(step)
            return False
        self.joined.store.copying.add(step)
        return True

    def take(self, step: int) -> None:
        """Begin to upload this rank's share; does not wait."""
        self._gives_up = threading.Event()
        self._thread = threading.Thread(target=self._copy, args=(step, self._gives_up), name="copies", daemon=True)
        self._thread.start()

    def after_step(self, done: StepDone) -> None:
        """Report what has ended."""
        self._tell()

    def rewind(self) -> None:
        """Delete the copies of later steps than the one that the run goes back to."""
        self._end()
        if self.loop.world.is_first:
            self._went_back_to = max((entry.step for entry in self.joined.store.entries()), default=0)
            self._copied = min(self._copied, self._went_back_to)
            try:
                self._delete_later(RemoteCheckpoints(self._url, self._run.name))
            except UserError as error:
                self._notes.put(_failed(self._went_back_to, f"copies of later steps are deleted later: {error}"))

    def end(self) -> None:
        """Of a run that is stopped, begin to copy the last checkpoint; a collective of all ranks."""
        self._copy_last(only_if=self.loop.stop.requested)

    def finish(self) -> None:
        """Copy the last checkpoint of a run, and wait for that; a collective of all ranks, which leave together."""
        self._copy_last(only_if=True)
        if self.loop.world.is_first:
            self._wait()
            self._tell()
        self.joined.group.broadcast(None)

    def close(self) -> None:
        """Leave the rest to the next start."""
        self._end()

    def _copy_last(self, *, only_if: bool) -> None:
        self.loop.saver.wait()  # whose thread uses the group too
        step = self.loop.progress.step
        is_missing = False
        if self.loop.world.is_first and only_if:
            self._wait()
            is_missing = self._copied < step and self.joined.store.valid(step, full=False) and self.saved(step)
        if self.joined.group.broadcast(is_missing):
            logger.info("waiting for the copy of step %d", step)
            self.take(step)

    def _first_look(self) -> UserError | int | None:
        """On the first rank: what keeps the run from starting, or a step whose copy is missing."""
        store = self.joined.store
        own = max((entry.step for entry in store.entries()), default=0)
        try:
            remote = RemoteCheckpoints(self._url, self._run.name)
            remote.put_beside(self._run.path / RECIPE)
            if self._spec.from_best:
                self._went_back_to = own
                self._delete_later(remote)
            copies = remote.copies()
        except UserError as error:
            if not own or self._spec.from_best:
                return error
            self._notes.put(_failed(own, str(error)))
            return None
        if own == 0 or own in copies:
            self._copied = own
            return None
        store.copying.add(own)
        return own

    def _copy(self, step: int, gives_up: threading.Event) -> None:
        """Upload this rank's share; on the first rank, then announce the copy and delete older ones."""
        group = self.joined.group
        began = time.monotonic()
        try:
            checkpoint = self.joined.store.path(step)
            manifest = read_manifest(checkpoint)
            remote = RemoteCheckpoints(self._url, self._run.name)
            if group.rank == 0:
                self._delete_later(remote)
            remote.upload(checkpoint, own_share(manifest.files, group.rank, group.size))
            if group.rank != 0:
                return
            for name in BESIDE:
                self._upload_as_it_is(remote, name)
            remote.announce(checkpoint, gives_up.is_set)
            if gives_up.is_set():  # the run went back meanwhile
                remote.delete_after(step - 1)
                return
            self._copied = step
            self._notes.put(self._copied_note(step, remote.url, time.monotonic() - began, manifest.size))
            keep = self._recipe.checkpoint
            remote.prune(keep.most_recent_k, keep.keep_interval, keep_best=keep.keep_best, before=step)
        except (UserError, OSError, InvalidCheckpoint) as error:
            if group.rank == 0:
                self._notes.put(_failed(step, str(error)))
            else:
                logger.error("ALARM: rank %d has not copied its share of step %d: %s", group.rank, step, error)
        finally:
            self.joined.store.copying.discard(step)

    def _copied_note(self, step: int, url: str, seconds: float, size: int) -> Note:
        details: dict[str, Any] = {"url": url, "seconds": round(seconds, 3), "bytes": size}
        if self._left_out:
            details["left_out"] = self._left_out
            self._left_out = []
        return Note(step=step, event="checkpoint_copied", details=details)

    def _upload_as_it_is(self, remote: RemoteCheckpoints, name: str) -> None:
        """Upload a file of the run as it is now: it grows meanwhile."""
        snapshot = self._run.logs / "copied" / name
        if (self._run.path / name).exists():
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._run.path / name, snapshot)
            remote.put_beside(snapshot)

    def _delete_later(self, remote: RemoteCheckpoints) -> None:
        """Delete the copies of what the run has gone back from, if that is still to be done."""
        if (step := self._went_back_to) is not None:
            remote.delete_after(step)
            self._went_back_to = None

    def _tell(self) -> None:
        with suppress(Empty):
            while True:
                self.loop.tracker.note(self._notes.get_nowait())

    def _wait(self) -> None:
        """Wait for a copy that is written; only a little if the run is asked to stop."""
        until = time.monotonic() + LONGEST_LAST_COPY / 2
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            if self.loop.stop.requested:
                until = min(until, time.monotonic() + LONGEST_AFTER_STOP)
            self._thread.join(0.2)

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join(LONGEST_AFTER_STOP)
            self._gives_up.set()


def _failed(step: int, error: str) -> Note:
    logger.error("ALARM: the checkpoint of step %d was not copied: %s; training continues", step, error)
    return Note(step=step, event="copy_failed", details={"error": error}, alarm=True)
