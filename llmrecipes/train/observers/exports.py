"""Hugging Face folders of a run's checkpoints (`checkpoint.also_export`), written while the run goes on.

A process of its own reads the published checkpoint: the ranks neither wait for it nor give it memory, and what ends it
does not end them. It begins with `models/also_export.py`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from llmrecipes.checkpoint.saver import LONGEST_SAVE
from llmrecipes.tracking.events import Note
from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.train.spec import RunSpec

logger = logging.getLogger(__name__)

MODULE = "llmrecipes.models.also_export"
LOG = "also-export.log"
OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONGEST_EXPORT = 0.75 * LONGEST_SAVE.total_seconds()
"""Seconds that the end of a run waits for its last export; the other ranks wait for the first a little longer."""
SECONDS_BETWEEN_LOOKS = 0.1


class Exports(Observer):
    """The exports of a run, one at a time; on the first rank, the others have nothing to do.

    If checkpoints come faster than they are exported, the newest is next, and those in between are left out. Those
    that wait or are read are held in the store, so that they are not deleted.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._recipe = spec.recipe
        self._run = spec.run
        self._data_dir = spec.data_dir
        self._saved: SimpleQueue[int] = SimpleQueue()
        self._waiting: int | None = None
        self._left_out: list[int] = []
        self._running: tuple[int, subprocess.Popen[str]] | None = None
        self._newest = -1
        self._has_begun = False

    @classmethod
    def wanted(cls, spec: RunSpec) -> bool:
        """With `checkpoint.also_export`."""
        return spec.recipe.checkpoint.also_export is not None

    def begin(self) -> None:
        """Go on with what an earlier start has left."""
        if not self._has_begun and self.loop.world.is_first:
            self.resume()
        self._has_begun = True

    def after_step(self, done: StepDone) -> None:
        """See `poll`."""
        for note in self.poll():
            self.loop.tracker.note(note)

    def rewind(self) -> None:
        """Checkpoints may be withdrawn."""
        self.cancel()

    def finish(self) -> None:
        """Wait for the last export of a run; a collective of all ranks, which leave together."""
        if self.loop.world.is_first:
            for note in self.export_last(self.loop.progress.step):
                self.loop.tracker.note(note)
        self.joined.group.broadcast(None)

    def close(self) -> None:
        """Leave the rest to the next start."""
        if self._has_begun:
            self.cancel()

    def saved(self, step: int) -> bool:
        """A checkpoint was published; called by the saver's thread before older ones are deleted."""
        if step % (self._recipe.checkpoint.also_export_interval or 1) == 0 or step == self._recipe.train.train_iters:
            self.joined.store.held.add(step)
            self._saved.put(step)
        return False

    def resume(self) -> None:
        """The run goes on: the export of its newest checkpoint may have been interrupted."""
        step = self._run.newest_step()
        if step > 0 and not self._run.is_exported(step):
            self.saved(step)

    def poll(self) -> list[Note]:
        """What has ended since the last call; starts the next. Does not wait.

        Called by the thread that lives as long as the rank: the kernel ends a process with the thread that started it.
        """
        notes = self._ended()
        with suppress(Empty):
            while True:
                self._want(self._saved.get_nowait())
        return notes + self._next()

    def export_last(self, step: int) -> list[Note]:
        """Export the checkpoint of the last step of a run, and wait for that, unless the run is asked to stop."""
        notes = self.poll()
        if self._newest < step:
            self._want(step)
        logger.info("waiting for the export of step %d", step)
        until = time.monotonic() + LONGEST_EXPORT
        while self._running is not None or self._waiting is not None:
            if (stop := self.loop.stop.requested) or time.monotonic() > until:
                why = "the run was asked to stop" if stop else f"it took longer than {LONGEST_EXPORT:.0f} s"
                self.cancel()
                return [*notes, _failed(step, why)]
            if self._running is None:
                self.loop.saver.prune()  # what was only held for an export; nothing else writes any more
                notes += self._next()
            else:
                with suppress(subprocess.TimeoutExpired):
                    self._running[1].wait(SECONDS_BETWEEN_LOOKS)
                notes += self._ended()
        return notes

    def cancel(self) -> None:
        """End what is written and forget what waits; the next start of the run begins it again."""
        self._waiting = None
        with suppress(Empty):
            while True:
                self._saved.get_nowait()
        self.joined.store.held.clear()
        if self._running is not None:
            process = self._running[1]
            process.kill()
            process.communicate()
            self._running = None

    def _want(self, step: int) -> None:
        if self._waiting is not None and self._waiting != step:
            logger.warning("step %d is not exported: an earlier export has not ended", self._waiting)
            self._left_out.append(self._waiting)
            self.joined.store.held.discard(self._waiting)
        self.joined.store.held.add(step)
        self._waiting = self._newest = step

    def _next(self) -> list[Note]:
        if self._running is not None or self._waiting is None:
            return []
        step = self._waiting
        self._waiting = None
        environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        arguments = [str(self._run.path), str(step), str(self._data_dir), str(os.getpid())]
        try:
            self._run.logs.mkdir(exist_ok=True)
            with (self._run.logs / LOG).open("ab") as log:
                self._running = (
                    step,
                    subprocess.Popen(
                        [sys.executable, "-m", MODULE, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=environment,
                        text=True,
                        start_new_session=True,  # Ctrl-C is for the ranks, which end it
                    ),
                )
        except OSError as error:
            self.joined.store.held.discard(step)
            return [_failed(step, f"its process could not be started: {error}")]
        return []

    def _ended(self) -> list[Note]:
        if self._running is None or self._running[1].poll() is None:
            return []
        step, process = self._running
        self._running = None
        self.joined.store.held.discard(step)
        said, _ = process.communicate()
        left_out = self._left_out
        self._left_out = []
        more = {"left_out": left_out} if left_out else {}
        if process.returncode == 0:
            return [Note(step=step, event="exported", details=json.loads(said) | more)]
        if not self.joined.store.path(step).is_dir():  # the run went back before it
            return []
        return [_failed(step, _reason(process.returncode, said, self._run.logs / LOG), more)]


def _failed(step: int, error: str, more: dict[str, list[int]] | None = None) -> Note:
    logger.error("ALARM: the checkpoint of step %d was not exported: %s; training continues", step, error)
    return Note(step=step, event="export_failed", details={"error": error} | (more or {}), alarm=True)


def _reason(code: int, said: str, log: Path) -> str:
    with suppress(json.JSONDecodeError, KeyError, TypeError):
        return str(json.loads(said)["error"])
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"its process ended early ({how}); see {log}"
