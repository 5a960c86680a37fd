"""Passes of a frozen model, in any layout, whose results are written to a disk before a training without the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from llmrecipes.engine.base import Batch, Platform
from llmrecipes.engine.core.model.attention import own_chunks
from llmrecipes.engine.parts.frozen_passes import FrozenModel
from llmrecipes.engine.parts.preference import find_answers
from llmrecipes.plan.derive import Plan


class Precomputed(FrozenModel):
    """Which ranks pass and write what."""

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


class ReferenceLogProbs(Precomputed):
    """Log-probabilities of answers. Implements `engine.base.Precomputation`."""

    def __init__(self, plan: Plan, platform: Platform) -> None:
        super().__init__(plan, platform, ("tokens", "position_ids", "labels"))

    def values(self, batches: Sequence[Batch]) -> list[tuple[torch.Tensor, ...]]:
        """[answers] of each micro-batch, in nats, fp64 in host memory; nothing on ranks before the last stage."""
        self.kept.clear()
        self.passes(batches)
        return [(self._sums(losses, batch),) for losses, batch in zip(self.kept, batches, strict=False)]

    def _sums(self, losses: torch.Tensor, batch: Batch) -> torch.Tensor:
        answers = find_answers(batch["position_ids"], batch["loss_mask"])
        parts = parallel_state.get_context_parallel_world_size()
        number = parallel_state.get_context_parallel_rank()
        local = own_chunks({"answers": answers.of_token, "mask": batch["loss_mask"]}, parts, number)
        device = losses.device
        gained = -losses.double().flatten() * local["mask"].double().flatten().to(device)
        sums = gained.new_zeros(answers.count + 1).index_add(0, local["answers"].flatten().to(device), gained)
        if parts > 1:
            dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        return sums[: answers.count].cpu()


class TeacherLogits(Precomputed):
    """The largest logits of each token. Implements `engine.base.Precomputation`.

    Args:
        top_k: of the vocabulary without padding.
    """

    def __init__(self, plan: Plan, platform: Platform, top_k: int) -> None:
        super().__init__(plan, platform, ("tokens", "position_ids"))
        self._top_k = top_k
        self._vocabulary = plan.recipe.model.vocab_size

    def values(self, batches: Sequence[Batch]) -> list[tuple[torch.Tensor, ...]]:
        """Ids, int32, and logits of each micro-batch, [b, s, top_k], in host memory; nothing where `writes` is not."""
        self.kept.clear()
        self.passes(batches)
        return [each for each in self.kept if each]

    def kept_of(self, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What to keep of logits [b, s / context-parallel size, padded vocabulary / tensor-parallel size], a few."""
        rows = result.size(-1)
        count = self._top_k
        first = parallel_state.get_tensor_model_parallel_rank() * rows
        token_rows = max(0, min(rows, self._vocabulary - first))
        values, ids = result[..., :token_rows].topk(min(count, token_rows))
        missing = (0, count - ids.size(-1))
        values = F.pad(values, missing, value=-torch.inf)
        ids = F.pad(ids + first, missing)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            values, ids = (_gathered(tensor, group).movedim(0, -2).flatten(-2) for tensor in (values, ids))
            values, places = values.topk(count)
            ids = ids.gather(-1, places)
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            values, ids = (_whole(_gathered(tensor, group)) for tensor in (values, ids))
        return (ids.int().cpu(), values.cpu()) if self.writes else ()


def _gathered(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, ...] from one of each rank."""
    gathered = local.new_empty(dist.get_world_size(group), *local.shape)
    dist.all_gather_into_tensor(gathered.view(-1, *local.shape[1:]), local.contiguous(), group=group)
    return gathered


def _whole(parts: torch.Tensor) -> torch.Tensor:
    """[b, s, ...] from [ranks, b, s / ranks, ...]: what `own_chunks` has split."""
    halves = parts.chunk(2, dim=2)
    return torch.cat([*halves[0], *halves[1].flip(0)], dim=1)
