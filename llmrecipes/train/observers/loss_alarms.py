"""Notes of steps by their loss: a spike, and fp16 gradients that overflow."""

from __future__ import annotations

import logging
from dataclasses import asdict

from llmrecipes.faults.numerics import LossWatch
from llmrecipes.tracking.events import Note
from llmrecipes.train.observers.base import Observer, StepDone

logger = logging.getLogger(__name__)


class LossAlarms(Observer):
    """Raises an alarm at a spike of the loss. What acts on it is `guard.SpikeGuard`."""

    def begin(self) -> None:
        """Without the losses of another stage."""
        self._watch = LossWatch()

    rewind = begin

    def after_step(self, done: StepDone) -> None:
        """Judge a step."""
        step = done.progress.step
        result = done.result
        if result.skipped:
            details = {"loss_scale": result.loss_scale, "skipped_steps": done.progress.skipped_steps}
            self.loop.tracker.note(Note(step=step, event="overflow_skipped", details=details))
        elif not result.rejected and (spike := self._watch.add(result.loss)):
            if self.loop.world.is_first:
                logger.error(
                    "ALARM: loss %.4f in step %d (usual %.4f, limit %.4f)", spike.loss, step, spike.usual, spike.limit
                )
            self.loop.tracker.note(Note(step=step, event="loss_spike", details=asdict(spike), alarm=True))
