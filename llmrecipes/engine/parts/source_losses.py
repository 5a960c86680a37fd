"""Sums of the training loss by source of the blend, which travel with the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from llmrecipes.engine.base import Batch, Progress
from llmrecipes.engine.parts.base import Agreed, Part, Step
from llmrecipes.recipe.sections.source import source_names
from llmrecipes.tracking.events import is_measured


class SourceLosses(Part):
    """Training loss by source (`tracking.loss_by_source`).

    The sums that a report has are of the steps since the last one, and a checkpoint has them: a resumed run reports
    what an uninterrupted one does. A step whose sums are not finite does not count.
    """

    def __init__(self, step: Step) -> None:
        self._recipe = step.plan.recipe
        self._sources = len(self._recipe.data.sources)
        self._copies = step.plan.layout.tensor_model_parallel_size
        self.size = 2 * self._sources
        self._sums = [0.0] * self.size
        self._unreported: tuple[float, ...] = ()

    def start(self) -> None:
        self._sums = [0.0] * self.size

    def take(self) -> tuple[float, ...]:
        """Sums over the global batches since `start`: loss of each source in nats, then tokens of each."""
        return tuple(self._sums)

    def counted(self, batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        mask = batch["loss_mask"]
        return self.by_source(losses.detach().float() * mask, mask, batch.get("source"))

    def read(self, own: list[float], local: list[float], agreed: Agreed) -> None:
        self.add(own)

    def fields(self, before: Progress) -> dict[str, Any]:
        sums = self.take()
        earlier = before.source_sums
        if not all(map(math.isfinite, sums)):
            sums = (0.0,) * len(sums)
        if len(earlier) == len(sums):
            sums = tuple(map(sum, zip(earlier, sums, strict=True)))
        due = is_measured(before.step + 1, self._recipe)
        self._unreported = () if due else sums
        if not due:
            return {}
        names = source_names(self._recipe.data.sources)
        by_name = zip(names, sums[: len(names)], sums[len(names) :], strict=True)
        return {"source_loss": {name: loss / tokens for name, loss, tokens in by_name if tokens} or None}

    def progress(self) -> dict[str, Any]:
        return {"source_sums": self._unreported}

    def by_source(self, losses: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """[2 × sources] in fp64: summed loss of each source, then its tokens.

        Nothing is added atomically, so the sums are the same bit for bit in every run.

        Args:
            losses: [b, s], 0 where the mask is.
            mask: [b, s].
            ids: [b], number of the source of each sample; None: of held-out text.
        """
        if ids is None:
            return losses.new_zeros(self.size, dtype=torch.float64)
        rows = torch.stack([losses.sum(1), mask.sum(1)]).double()[:, None]
        belongs = ids == torch.arange(self._sources, device=ids.device)[:, None]
        return torch.where(belongs, rows, 0.0).sum(-1).flatten()

    def add(self, sums: Sequence[float]) -> None:
        """Count what `by_source` gave, summed over all ranks."""
        self._sums = [before + value / self._copies for before, value in zip(self._sums, sums, strict=True)]
