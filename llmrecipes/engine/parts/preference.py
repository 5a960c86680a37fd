"""Direct preference optimization (arXiv 2305.18290) in any layout: the reference's passes and the loss of pairs.

A micro-batch has sequences of a prompt and an answer, the better and the worse one of a pair after each other, in rows
of their own or several in a row. Their log-probabilities are sums over tokens, which context-parallel ranks have parts
of: they exchange a number for each answer, and each goes backward through its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Batch, WeightSource
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.core.model.lora import adapters
from llmrecipes.engine.parts.base import Agreed, Part, Step, Summed
from llmrecipes.engine.parts.frozen_passes import FrozenModel
from llmrecipes.plan.frozen import reference_plan
from llmrecipes.recipe.rules.preference_rules import has_reference, has_second_model
from llmrecipes.recipe.sections.preference_section import Dpo

COUNTS = 3
"""Numbers that a micro-batch reports: rewards of both answers, and pairs whose better answer has the larger reward."""


@dataclass(frozen=True)
class Gains:
    """What the answers of pairs have gained on the reference, in nats: [pairs] each, fp64.

    Args:
        chosen, rejected: log-probability of the better and the worse answer minus the reference's.
        chosen_tokens, rejected_tokens: of these answers.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor


def pair_losses(gains: Gains, dpo: Dpo) -> torch.Tensor:
    """[pairs], the loss of each, as TRL 1.16's DPOTrainer has it; the papers are those of `Dpo.loss_type`."""
    beta = dpo.beta
    chosen = gains.chosen
    rejected = gains.rejected
    margin = chosen - rejected
    per_token = chosen / gains.chosen_tokens - rejected / gains.rejected_tokens
    log = F.logsigmoid
    match dpo.loss_type:
        case "sigmoid":
            return -log(beta * margin)
        case "hinge":
            return torch.relu(1 - beta * margin)
        case "ipo":
            return (per_token - 1 / (2 * beta)) ** 2
        case "robust":
            wrong = dpo.label_smoothing
            return (wrong * log(-beta * margin) - (1 - wrong) * log(beta * margin)) / (1 - 2 * wrong)
        case "exo_pair":
            likely, unlikely = (
                torch.tensor(share, dtype=torch.float64).log()
                for share in (1 - dpo.label_smoothing, dpo.label_smoothing)
            )
            q = torch.sigmoid(beta * margin)
            return q * (log(beta * margin) - likely) + (1 - q) * (log(-beta * margin) - unlikely)
        case "nca_pair":
            return -log(beta * chosen) - 0.5 * log(-beta * chosen) - 0.5 * log(-beta * rejected)
        case "bco_pair":
            return -log(beta * chosen) - log(-beta * rejected)
        case "sppo_hard":
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "apo_zero":
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * margin)
        case "sigmoid_norm":
            return -log(beta * per_token)


@dataclass(frozen=True)
class Answers:
    """Where the answers of a micro-batch are.

    Args:
        of_token: [b, s], number of the answer that a label is of; `count` for other tokens.
        count: of answers, the better one of each pair before the worse.
    """

    of_token: torch.Tensor
    count: int


def find_answers(positions: torch.Tensor, mask: torch.Tensor) -> Answers:
    """The answers of a micro-batch in host memory.

    Args:
        positions: [b, s], 0 where the prompt of an answer, or padding, begins.
        mask: [b, s], 1 where a label is of an answer.

    Raises:
        ValueError: a pair is not complete.
    """
    begins = positions.numpy() == 0
    begins[:, 0] = True
    counted = mask.numpy() > 0
    segments = begins.ravel().cumsum().reshape(begins.shape)
    with_answer, numbers = np.unique(segments[counted], return_inverse=True)
    if len(with_answer) % 2:
        raise ValueError(f"{len(with_answer)} answers in a micro-batch: a pair has two")
    of_token = np.full(segments.shape, len(with_answer), np.int64)
    of_token[counted] = numbers
    return Answers(torch.from_numpy(of_token), len(with_answer))


class RewardMeter:
    """Rewards of pairs, by TRL's names."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin with nothing."""
        self._sums = [0.0] * (1 + COUNTS)

    def add(self, pairs: float, chosen: float, rejected: float, right: float) -> None:
        """Count sums over all ranks."""
        new = pairs, chosen, rejected, right
        self._sums = [one + other for one, other in zip(self._sums, new, strict=True)]

    def take(self) -> dict[str, float] | None:
        """`StepMetrics.rewards` of the global batches since `start`; None: there were none."""
        pairs, chosen, rejected, right = self._sums
        if not pairs:
            return None
        chosen = chosen / pairs
        rejected = rejected / pairs
        return {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected, "accuracies": right / pairs}


class PreferenceLoss(Part):
    """The reference's passes, before those of the trained model, and the loss that compares the two."""

    size, in_evaluations = COUNTS, True

    def __init__(self, step: Step) -> None:
        plan = step.plan
        platform = step.platform
        recipe = step.plan.recipe
        if recipe.dpo is None:
            raise ValueError(f"recipe {recipe.name} has no section dpo")
        self._dpo = recipe.dpo
        self._counts: deque[int] = deque()
        """Answers of the micro-batches whose losses come next."""
        self._reported = torch.zeros(COUNTS)
        self.rewards = RewardMeter()
        self._own: tuple[RecipeModel, ...] = ()  # the trained model's chunks, if they are the reference too
        self._reference: FrozenModel | None = None
        if has_reference(recipe):
            self._reference = FrozenModel(reference_plan(plan), platform, ("tokens", "position_ids", "labels"))
            if not has_second_model(recipe):
                self._own = tuple(step.modules)
                self._reference.use(tuple(step.chunks), step.implementation)

    def load(self, weights: Entry | WeightSource | None = None) -> None:
        """Build the reference, if there is a second model; see `FrozenModel.load`."""
        if self._reference is not None and not self._own:
            self._reference.load(weights)

    def start(self) -> None:
        self.rewards.start()

    def batches(self, batches: Iterator[Batch], number: int, *, training: bool) -> Iterator[Batch]:
        """See `Part.batches`; each after the reference's pass over it, with `answers`: `Answers.of_token`."""
        self._counts.clear()
        if self._reference is not None:
            batches = self._reference.ahead(batches, number, self._as_reference if self._own else nullcontext)
        return self._with_answers(batches)

    def _with_answers(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            answers = find_answers(batch["position_ids"], batch["loss_mask"])
            self._counts.append(answers.count)
            yield {**batch, "answers": answers.of_token}

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """A block in which the trained model is the one without adapters."""
        training = [module.training for module in self._own]
        own_adapters = [adapter for module in self._own for adapter in adapters(module)]
        for module in self._own:
            module.eval()
        for adapter in own_adapters:
            adapter.is_off = True
        try:
            yield
        finally:
            for adapter in own_adapters:
                adapter.is_off = False
            for module, was in zip(self._own, training, strict=True):
                module.train(was)

    def loss(self, batch: Batch, losses: torch.Tensor) -> Summed:
        """Loss of a micro-batch's pairs, summed; megatron-core divides by the number of pairs in the global batch.

        Args:
            batch: this rank's part, on the device: with `answers`, and if it was computed before training `reference`,
                whose sums over the tokens of an answer are its negative log-probability.
            losses: of its tokens.
        """
        count = self._counts.popleft()
        kept = batch.get("reference") if self._reference is None else self._reference.kept.popleft()
        gains = self._gains(losses, kept, batch["answers"], count, batch["loss_mask"])
        total = pair_losses(gains, self._dpo).sum()
        # Context-parallel ranks have the same sums, of which one is counted; each goes back through its own tokens.
        first = float(parallel_state.get_context_parallel_rank() == 0)
        chosen = self._dpo.beta * gains.chosen.detach()
        rejected = self._dpo.beta * gains.rejected.detach()
        pairs = torch.tensor(count // 2, dtype=torch.float64, device=losses.device)
        self._reported = torch.stack([chosen.sum(), rejected.sum(), (chosen > rejected).double().sum()]) * first
        return total.float(), (pairs * first).int(), torch.stack([total.detach() * first, pairs * first])

    def counted(self, batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        return self._reported

    def read(self, own: list[float], local: list[float], agreed: Agreed) -> None:
        self.rewards.add(agreed.counted, *own)

    def fields(self, before: Any) -> dict[str, Any]:
        return {"rewards": self.rewards.take()}

    def _gains(
        self, losses: torch.Tensor, kept: torch.Tensor | None, answers: torch.Tensor, count: int, mask: torch.Tensor
    ) -> Gains:
        gained = losses.double() if kept is None else losses.double() - kept.double()
        sums = losses.new_zeros(2, count + 1, dtype=torch.float64)
        weight = mask.double().flatten()
        sums = sums.index_add(1, answers.flatten(), torch.stack([-gained.flatten() * weight, weight]))[:, :count]
        if parallel_state.get_context_parallel_world_size() > 1:
            whole = sums.detach().clone()
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
            sums = sums + (whole - sums.detach())
        (chosen, rejected), (tokens, others) = (total.view(-1, 2).unbind(1) for total in sums)
        return Gains(chosen, rejected, tokens.detach(), others.detach())
