"""Passes of a frozen model, in any layout, whose results are written to a disk before a training without the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from llmrecipes.engine.base import Batch, Platform
from llmrecipes.engine.core.model.attention import own_chunks
from llmrecipes.engine.megatron.frozen import FrozenModel
from llmrecipes.engine.megatron.preference import find_answers
from llmrecipes.plan.derive import Plan


class ReferenceLogProbs(FrozenModel):
    """Log-probabilities of answers. Implements `engine.base.Precomputation`."""

    def __init__(self, plan: Plan, platform: Platform) -> None:
        super().__init__(plan, platform, ("tokens", "position_ids", "labels"))

    @property
    def together(self) -> int:
        """Micro-batches of one call of `values`, or a multiple: with pipeline stages several follow each other."""
        stages = self.plan.layout.pipeline_model_parallel_size
        return 1 if stages == 1 else 4 * stages

    @property
    def writes(self) -> bool:
        """Whether this rank, of those that have a sample, has its values and writes them."""
        last = parallel_state.get_pipeline_model_parallel_world_size() - 1
        return (
            parallel_state.get_pipeline_model_parallel_rank() == last
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def values(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """[answers] of each micro-batch, in nats, fp64 in host memory; nothing on ranks before the last stage."""
        self.kept.clear()
        self.passes(batches)
        return [self._sums(losses, batch) for losses, batch in zip(self.kept, batches, strict=False)]

    def _sums(self, losses: torch.Tensor, batch: Batch) -> torch.Tensor:
        answers = find_answers(batch["position_ids"], batch["loss_mask"])
        parts, number = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        own = own_chunks({"answers": answers.of_token, "mask": batch["loss_mask"]}, parts, number)
        device = losses.device
        gained = -losses.double().flatten() * own["mask"].double().flatten().to(device)
        sums = gained.new_zeros(answers.count + 1).index_add(0, own["answers"].flatten().to(device), gained)
        if parts > 1:
            dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        return sums[: answers.count].cpu()
