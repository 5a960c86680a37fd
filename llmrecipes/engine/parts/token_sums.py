"""Sums over the tokens of a micro-batch, which travel with the loss; also by source of the blend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmrecipes.engine.core.accuracy import TokenAccuracy
from llmrecipes.plan.derive import Plan


class SourceLosses:
    """Training loss by source (`tracking.loss_by_source`). Implements `engine.meters.SourceMeter`.

    Args:
        sources: how many there are.
        copies: ranks that have the same losses.
    """

    def __init__(self, sources: int, copies: int) -> None:
        self._sources, self._copies = sources, copies
        self.size = 2 * sources
        self._sums = [0.0] * self.size

    @classmethod
    def of(cls, plan: Plan) -> SourceLosses | None:
        """That of a recipe, if it wants one."""
        if not plan.recipe.tracking.loss_by_source:
            return None
        return cls(len(plan.recipe.data.sources), plan.layout.tensor_model_parallel_size)

    def start(self) -> None:
        self._sums = [0.0] * self.size

    def take(self) -> tuple[float, ...]:
        return tuple(self._sums)

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


def sum_over_tokens(
    mask: torch.Tensor, accuracy: TokenAccuracy, sources: SourceLosses | None, ids: torch.Tensor | None,
    losses: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Summed loss, token count, and what is reported of a micro-batch: both, tokens predicted right, and sums by
    source. megatron-core divides by the count of the global batch."""
    counted = losses.float() * mask
    total, tokens = counted.sum(), mask.sum()
    report = torch.stack([total.detach().double(), tokens.double(), accuracy.right(mask)])
    if sources is not None:
        report = torch.cat([report, sources.by_source(counted.detach(), mask, ids)])
    return total, tokens.to(torch.int), {"loss": report}
