"""When Python collects garbage while a run trains."""

from __future__ import annotations

import gc

from llmrecipes.recipe.speedups.features import value
from llmrecipes.train.observers.base import Observer, StepDone


class GarbageCollection(Observer):
    """Collects as `layout.manual_gc` says.

    All objects of a stage's start live to its end: they are excluded, also from the collections that megatron-core runs
    at each save.
    """

    def begin(self) -> None:
        """After all that lives as long as the stage is made."""
        features = self.loop.plan.features
        self._interval = value(features, "manual_gc_interval") if value(features, "manual_gc") else None
        gc.collect()
        gc.freeze()
        if gc.isenabled():
            self.stack.callback(gc.enable)
        self.stack.callback(gc.unfreeze)
        if self._interval is not None:
            gc.disable()

    def after_step(self, done: StepDone) -> None:
        """Collect, if it is due."""
        if self._interval is not None and done.progress.step % self._interval == 0:
            gc.collect()
