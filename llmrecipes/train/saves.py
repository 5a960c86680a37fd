"""The checkpoints of a training loop: what is saved, which saves have failed, and when that ends the run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import SaveReport
from llmrecipes.data.folder.prepared import ORDER
from llmrecipes.engine.base import Progress
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.tracking.events import Note

if TYPE_CHECKING:
    from llmrecipes.train.loop import Loop

logger = logging.getLogger(__name__)


class Saves:
    """Saves the state, reports how that ended, and ends a run that cannot save.

    Every failed save is an alarm. A run whose disk stays full would train on for nothing: after
    `checkpoint.max_failed_saves` failures in a row it ends. Until then the state is in memory, and space that is freed
    in the meantime is used by the next save.

    Args:
        loop: has the state, the saver, and the monitored loss for the manifests.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._plan = loop.plan
        self._saver = loop.saver
        self._failed: dict[int, str] = {}
        """Steps whose save has failed since the last one that has not, and why."""
        self._waited: dict[int, float] = {}
        """Seconds that the loop was blocked by a save that is still being written, by step."""

    def reserve(self, progress: Progress) -> None:
        """Allocate memory for saves in the background; after a step, which has made the optimizer's state."""
        self._saver.reserve(self._loop.engine.state(progress))

    def save(self, progress: Progress) -> None:
        """Save the state of a step; if failures before this one make it the last attempt, wait until it is written.

        A collective of all ranks. Those in front of this save have ended on every rank, so all decide alike.

        Raises:
            UserError: see `require`.
        """
        self._start(progress)
        self.poll()
        earlier = sum(step < progress.step for step in self._failed)
        if earlier >= self._plan.recipe.checkpoint.max_failed_saves - 1:
            self.require(progress, "checkpoint.max_failed_saves")

    def require(self, progress: Progress, where: str = "") -> None:
        """Wait for the save of a step; if it fails, try once more, because the state is lost when the run ends.

        Args:
            progress: as the last `save`.
            where: the key that makes this the last attempt; empty: the run ends anyway.

        Raises:
            UserError: both attempts have failed; with `ExitCode.STOP`.
        """
        self._report(self._saver.wait())
        if progress.step in self._failed:
            logger.warning("writing the checkpoint of step %d again before the run ends", progress.step)
            self._start(progress)
            self._report(self._saver.wait())
        if progress.step not in self._failed:
            return
        first = min(self._failed)
        since = "" if first == progress.step else f", as all since step {first}"
        raise UserError(
            f"the checkpoint of step {progress.step} could not be written{since}: {self._failed[progress.step]}",
            where=where,
            rule="the final checkpoint must be written before a run ends; a run stops after "
            f"checkpoint.max_failed_saves={self._plan.recipe.checkpoint.max_failed_saves} failures in a row",
            fix="free some disk space, then run the same command with the same --run-id",
            code=ExitCode.STOP,
        )

    @property
    def writing(self) -> bool:
        """Whether a save had not ended at the last `poll`."""
        return bool(self._waited)

    def settle(self) -> None:
        """Wait for a save that is being written, and report it."""
        self._report(self._saver.wait())

    def poll(self) -> None:
        """Report the saves that have ended; does not wait."""
        self._report(self._saver.poll())

    def _start(self, progress: Progress) -> None:
        started = time.perf_counter()
        self._saver.save(self._loop.engine.state(progress), self._info(progress))
        self._waited[progress.step] = time.perf_counter() - started

    def save_locally(self, progress: Progress) -> None:
        """Save the state of a step on this node, if it is due."""
        local = self._loop.local
        if local is not None and progress.step % local.interval == 0:
            self._loop.observers.beat("save")
            local.save(progress, self._info(progress))

    def _info(self, progress: Progress) -> CheckpointInfo:
        return CheckpointInfo(
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            layout=self._plan.layout.as_dict(),
            recipe_hash=self._loop.recipe_hash,
            engine=self._loop.engine.name,
            recipe=self._plan.run_recipe.model_dump(mode="json"),
            monitored=self._loop.monitored,
            sample_order=ORDER,
        )

    def _report(self, reports: list[SaveReport]) -> None:
        for report in reports:
            waited = self._waited.pop(report.step)
            if report.path is None:
                self._failed[report.step] = report.error or "unknown"
                note = Note(step=report.step, event="save_failed", details={"error": report.error}, alarm=True)
            else:
                self._failed.clear()
                self._loop.observers.written(report.seconds)
                details = {
                    "path": str(report.path),
                    "seconds": round(report.seconds, 3),
                    "loop_waited": round(waited, 4),
                }
                note = Note(step=report.step, event="checkpoint_saved", details=details)
            self._loop.tracker.note(note)
