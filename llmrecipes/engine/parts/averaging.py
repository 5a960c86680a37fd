"""The moving average of the weights (`optimizer.ema_decay`)."""

from __future__ import annotations

from llmrecipes.engine.core import ema
from llmrecipes.engine.parts.base import Part, Step


class Average(Part):
    """Begins with the weights, and averages in those of every update."""

    def __init__(self, step: Step) -> None:
        self._optimizer = step.optimizer
        self._decay = step.plan.recipe.optimizer.ema_decay or 0.0
        ema.start(self._optimizer)

    def after_update(self) -> None:
        ema.update(self._optimizer, self._decay)
