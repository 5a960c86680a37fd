"""Share of the tokens that are predicted right, by what the model counts of its logits."""

from __future__ import annotations

from typing import Any

import torch

from llmrecipes.engine.base import Batch
from llmrecipes.engine.core.token_accuracy import TokenAccuracy
from llmrecipes.engine.parts.base import Agreed, Part, Step
from llmrecipes.tracking.events import is_measured


class Accuracy(Part):
    """Counts the tokens whose label is the likeliest, and all that the loss counts."""

    size, in_evaluations = 2, True

    def __init__(self, step: Step) -> None:
        self._recipe = step.plan.recipe
        self.counter: TokenAccuracy = step.modules[-1].accuracy  # of the one with the loss, on ranks that have it

    @property
    def counting(self) -> bool:  # type: ignore[override]
        return self.counter.counting

    def counts(self, step: int) -> bool:
        return is_measured(step, self._recipe)

    def start(self) -> None:
        self.counter.start()

    def counted(self, batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        mask = batch["loss_mask"]
        return torch.stack([self.counter.right(mask), mask.sum().double()])

    def read(self, own: list[float], local: list[float], agreed: Agreed) -> None:
        self.counter.add(*own)

    def fields(self, before: Any) -> dict[str, Any]:
        return {"token_accuracy": self.counter.take()}
