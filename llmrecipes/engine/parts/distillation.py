"""A frozen teacher in the layout of its student, and the losses that compare the two without gathering logits or
hidden states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import make_viewless_tensor
from torch.autograd.function import once_differentiable

from llmrecipes.engine.base import Batch, Platform, Progress
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.parts.base import Agreed, Part, Step
from llmrecipes.engine.parts.frozen_passes import FrozenModel
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.frozen import teacher_plan
from llmrecipes.recipe.rules.distill_rules import section
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.distill import Distill
from llmrecipes.tracking.events import is_measured


class Teacher(FrozenModel, Part):
    """The teacher's passes, before those of the student, whose loss it replaces.

    Kept between the two are the last hidden states of a micro-batch, not its logits, which are several times as many
    bytes: they are computed when the student's loss needs them. So are the outputs of layers that are compared.
    """

    def __init__(self, step: Step) -> None:
        plan, platform, student = step.plan, step.platform, step.modules
        super().__init__(teacher_plan(plan), platform, ("tokens", "position_ids"))
        self._recipe = plan.recipe
        self._how = comparison(plan.recipe, section(plan.recipe))
        self.hidden = HiddenStates(plan, platform, student) if section(plan.recipe).layers else None
        self.size = int(self.hidden is not None)
        for module in student:
            module.compared = self._losses

    def batches(self, batches: Iterator[Batch], number: int, *, training: bool) -> Iterator[Batch]:
        return self.ahead(batches, number) if training else batches

    def start(self) -> None:
        if self.hidden is not None:
            self.hidden.start()

    def add_to(self, totals: torch.Tensor, own: torch.Tensor) -> None:
        if self.hidden is not None:  # on every stage
            self.hidden.add_to(totals, own)

    def read(self, own: list[float], local: list[float], agreed: Agreed) -> None:
        if self.hidden is not None:
            self.hidden.add(own[0], agreed.counted)

    def fields(self, before: Progress) -> dict[str, Any]:
        if self.hidden is None or not is_measured(before.step + 1, self._recipe):
            return {}
        return {"hidden_distance": self.hidden.take()}

    def expect(self, batch: Batch) -> None:
        """Take what the student's losses need of this rank's part of its next micro-batch."""
        if self.hidden is not None:
            self.hidden.mask = batch["loss_mask"]

    def forget(self) -> None:
        super().forget()
        if self.hidden is not None:
            self.hidden.forget()

    def use(self, modules: tuple[RecipeModel, ...], implementation: str) -> None:
        """Take a model that exists, and stop its passes at the hidden states."""
        super().use(modules, implementation)
        last = self.modules[-1]
        if last.post_process:
            self._project = last.output_layer.forward
            self._weight: torch.Tensor | None = None
            last.output_layer.forward = self._stop_at_hidden
        if self.hidden is not None:
            self.hidden.watch(modules)

    def _stop_at_hidden(self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **_: Any) -> Any:
        self._weight = weight
        return hidden, None

    @torch.no_grad()
    def _logits(self) -> torch.Tensor:
        """[s, b, padded vocabulary / tensor-parallel size] of the next micro-batch."""
        hidden = self.kept.popleft().transpose(0, 1).contiguous()
        logits: torch.Tensor = self._project(hidden, weight=self._weight)[0]
        return logits

    def _losses(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[b, s] in fp32, as `RecipeModel.compute_language_model_loss`."""
        rows = logits.size(-1)
        losses = compared_losses(
            logits.reshape(-1, rows), self._logits().reshape(-1, rows), labels.t().reshape(-1), self._how
        )
        return losses.view(labels.size(1), labels.size(0)).t().contiguous()


class PrecomputedTargets(Part):
    """The largest logits of a teacher, computed before training (`distill.logits`), in place of its passes."""

    def __init__(self, step: Step) -> None:
        recipe = step.plan.recipe
        # All that were written count: they are the largest.
        self._how = comparison(recipe, section(recipe).model_copy(update={"top_k": None}))
        self._said: tuple[torch.Tensor, torch.Tensor] | None = None
        for module in step.modules:
            module.compared = self._losses

    def expect(self, batch: Batch) -> None:
        """Take what was said of this rank's part of the micro-batch that comes next: `teacher_ids` and
        `teacher_logits`, [b, s, top_k]; ranks before the last stage have none."""
        self._said = (batch["teacher_ids"], batch["teacher_logits"]) if "teacher_ids" in batch else None

    def _losses(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[b, s] in fp32, as `RecipeModel.compute_language_model_loss`."""
        if self._said is None:
            raise ValueError("a micro-batch without teacher_ids and teacher_logits")
        rows = logits.size(-1)
        ids, said = (tensor.transpose(0, 1).flatten(0, 1) for tensor in self._said)
        said = said.to(logits.dtype)  # exact: they were computed in this precision
        local = ids.long() - self._how.first(rows)
        local = torch.where((local >= 0) & (local < rows), local, rows)
        # Other ranks' tokens go to a further column, which is cut off.
        teacher = said.new_full((len(said), rows + 1), -torch.inf).scatter_(1, local, said)[:, :rows]
        losses = compared_losses(logits.reshape(-1, rows), teacher, labels.t().reshape(-1), self._how)
        return losses.view(labels.size(1), labels.size(0)).t().contiguous()


@dataclass
class _Pair:
    """A layer of the student on this rank, and the one of the teacher that it is compared with."""

    teacher: int
    """Its number, from 1."""
    taught: deque[torch.Tensor] = field(default_factory=deque)
    """Outputs of the teacher's layer, of the micro-batches that the student has not passed, in their order."""
    again: deque[torch.Tensor] = field(default_factory=deque)
    """Gradients of micro-batches whose backward pass computes the student's layer again."""


class HiddenStates:
    """Distances between the outputs of layers of student and teacher (`distill.layers`), [s, b, h].

    A pair is on one rank, with the same tokens of both models: nothing is sent. The loss of a stage before the last one
    is not in what the last one goes backward from, so its gradient, in the hidden states' precision, is added where
    theirs passes, as megatron-core adds that of a router's loss (`MoEAuxLossAutoScaler`). Like the loss of the tokens
    it is a sum, times the loss scale, that the tokens of the global batch divide once gradients are reduced.

    Args:
        plan, platform: of the student.
        student: this rank's chunks.
    """

    def __init__(self, plan: Plan, platform: Platform, student: Sequence[RecipeModel]) -> None:
        distill = section(plan.recipe)
        layout = plan.layout
        self._distill, self._pairs = distill, list[_Pair]()
        self._split = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
        self.mask: torch.Tensor | None = None
        """[b, s] of this rank's part of the student's micro-batch, weights of the loss of its tokens."""
        self._sum = torch.zeros((), dtype=torch.float64, device=platform.device)
        self._distance = self._tokens = 0.0
        others = dict(distill.layers)
        for module in student:
            for layer in module.decoder.layers:
                if layer.layer_number in others:
                    self._pairs.append(_Pair(others[layer.layer_number]))
                    layer.register_forward_hook(partial(self._compare, self._pairs[-1], module.config))

    def watch(self, teacher: Sequence[RecipeModel]) -> None:
        """Keep the outputs of the layers of the teacher, this rank's chunks, in each of its passes."""
        layers = {layer.layer_number: layer for module in teacher for layer in module.decoder.layers}
        for pair in self._pairs:
            layers[pair.teacher].register_forward_hook(partial(_keep, pair.taught))

    def forget(self) -> None:
        """Drop what is left of an earlier step."""
        for pair in self._pairs:
            pair.taught.clear()
            pair.again.clear()

    def add_to(self, totals: torch.Tensor, own: torch.Tensor) -> None:
        """Add the weighted distances of the micro-batches since the last call, summed over tokens, to the loss in sums
        over all ranks, and without weight to `own`, [1]: of the tensor-parallel ranks each has all."""
        summed = self._sum * self._split
        totals[0] += self._distill.layers_weight * summed
        own += summed
        self._sum.zero_()

    def start(self) -> None:
        self._distance = self._tokens = 0.0

    def add(self, distance: float, tokens: float) -> None:
        """Count sums over all ranks."""
        self._distance, self._tokens = self._distance + distance, self._tokens + tokens

    def take(self) -> float | None:
        """`StepMetrics.hidden_distance` of the global batches since `start`; None: there were none."""
        return self._distance / self._tokens if self._tokens else None

    def _compare(self, pair: _Pair, config: Any, layer: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        """Hook of a layer of the student, whose output it returns with the gradient of the distance behind it."""
        if not layer.training:
            return None
        states, *rest = output
        if torch.is_grad_enabled() and pair.again:  # computed again, in the order of the first passes
            gradient = pair.again.popleft()
        else:
            gradient = self._gradient(states.detach(), pair.taught.popleft(), config)
            if not torch.is_grad_enabled():  # the first pass of a layer that is recomputed
                pair.again.append(gradient)
                return None
        if not states.requires_grad:
            return None
        added = _AddGradient.apply(states, gradient)
        # A stage frees the data of what it has sent, which must not be a view.
        return (make_viewless_tensor(added, requires_grad=True, keep_graph=True), *rest)

    @torch.no_grad()
    def _gradient(self, states: torch.Tensor, taught: torch.Tensor, config: Any) -> torch.Tensor:
        """[s, b, h], of a micro-batch's part of the loss; the distance itself is summed here."""
        if self.mask is None:
            raise ValueError("a micro-batch without loss_mask")
        mask = self.mask.t()
        if self._split > 1:
            first = parallel_state.get_tensor_model_parallel_rank() * states.size(0)
            mask = mask[first : first + states.size(0)]
        distances, gradient = hidden_distances(states, taught, self._distill)
        share = mask / len(self._distill.layers)
        self._sum += (distances * share).double().sum()
        factor = self._distill.layers_weight * share
        if config.grad_scale_func is not None:  # before the gradient is rounded, which fp16 is scaled for
            factor = config.grad_scale_func(factor)
        return gradient.mul_(factor[..., None]).to(states.dtype)


def _keep(kept: deque[torch.Tensor], _layer: torch.nn.Module, _inputs: Any, output: Any) -> None:
    kept.append(output[0].detach())  # another tensor of the same memory: a stage frees that of what it has sent


def hidden_distances(
    student: torch.Tensor, teacher: torch.Tensor, distill: Distill
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance of each token (`distill.layers_loss`), and its gradient, which overwrites no argument.

    Args:
        student, teacher: [s, b, h] of any precision.

    Returns:
        [s, b] and, with respect to the student's, [s, b, h], in fp32.
    """
    if distill.layers_loss == "mse":
        difference = torch.sub(student.float(), teacher)  # a new tensor, in the wider type of both
        return difference.square().mean(-1), difference.mul_(2 / student.size(-1))
    own = student.float()
    other = teacher.float()
    norm, length = (torch.linalg.vector_norm(each, dim=-1, keepdim=True).clamp_min_(_LEAST) for each in (own, other))
    own = own / norm
    other = other / length
    cosine = (own * other).sum(-1, keepdim=True)
    return 1 - cosine[..., 0], own.mul_(cosine).sub_(other).div_(norm)


_LEAST = 1e-8
"""Norm of a vector of zeros, as in torch's `cosine_similarity`."""


class _AddGradient(torch.autograd.Function):
    """Hidden states as they are, with a gradient that is added to theirs in the backward pass.

    It is not among autograd's saved tensors, but in the place of the teacher's hidden states, in the plan too.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """[s, b, h] each."""
        ctx.gradient = gradient
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gradient of the hidden states."""
        gradient = ctx.gradient
        ctx.gradient = None
        return gradients[0] + gradient, None


@dataclass(frozen=True)
class TeacherComparison:
    """How a student is compared with its teacher.

    Args:
        distill: of the recipe.
        vocabulary: tokens without padding; only they are compared.
        group: ranks that share the vocabulary; None: one has all of it.
    """

    distill: Distill
    vocabulary: int
    group: Any = None

    def first(self, rows: int) -> int:
        """Token of this rank's first row."""
        return 0 if self.group is None else dist.get_rank(self.group) * rows

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """[ranks, ...] from one of each rank."""
        if self.group is None:
            return own[None]
        every = own.new_empty(dist.get_world_size(self.group), *own.shape)
        dist.all_gather_into_tensor(every.view(-1, *own.shape[1:]), own.contiguous(), group=self.group)
        return every


def comparison(recipe: Recipe, distill: Distill) -> TeacherComparison:
    """How a recipe's model is compared on this rank."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group() if size > 1 else None
    return TeacherComparison(distill, recipe.model.vocab_size, group)


def compared_losses(
    logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, how: TeacherComparison
) -> torch.Tensor:
    """(1 - alpha) × cross entropy + alpha × distance to the teacher, of each token.

    Args:
        logits, teacher: [n, rows] of this rank, of any precision; the teacher's have no gradient.
        labels: [n] token ids.

    Returns:
        [n] in fp32. Ranks exchange three numbers a token and two sums, and with `top_k` the largest `top_k` of each.
    """
    losses: torch.Tensor = _ComparedLosses.apply(logits, teacher, labels, how)
    return losses


class _ComparedLosses(torch.autograd.Function):
    """Keeps the gradient of the logits, in their precision, which takes less than what autograd would keep."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, how: TeacherComparison
    ) -> torch.Tensor:
        """Arguments and result as `compared_losses`."""
        distill = how.distill
        rows = logits.size(-1)
        first = how.first(rows)
        own = max(0, min(rows, how.vocabulary - first))  # rows that are tokens
        local = labels - first
        has = (local >= 0) & (local < rows)
        local = local.clamp(0, rows - 1)[:, None]
        student = logits.float()
        # Both are new tensors, which are overwritten below.
        divided = student[:, :own] / distill.temperature
        taught = teacher[:, :own].float() / distill.temperature
        if distill.top_k is not None:
            taught.masked_fill_(taught < _threshold(taught, distill.top_k, how), -torch.inf)
        # A rank without a token adds nothing to a sum over tokens.
        sums = how.gathered(torch.stack([_log_sum(student), _log_sum(divided), _log_sum(taught)])).logsumexp(0)
        total, of_student, of_teacher = sums[..., None]
        label = student.gather(-1, local)[:, 0] * has
        if distill.loss == "kl":
            p = divided.sub_(of_student)
            q = taught.sub_(of_teacher)
            shares = q.exp()
            # A token without a share adds nothing, if its logarithm is finite; a mask would be a byte for each logit.
            distance = q.sub_(p).clamp_min_(torch.finfo(q.dtype).min).mul_(shares).sum(-1) * distill.temperature**2
            difference = p.exp_().sub_(shares).mul_(distill.temperature)
            del q, shares
        else:
            difference = divided.sub_(taught)
            distance = difference.square().sum(-1) / how.vocabulary
            difference.mul_(2 / how.vocabulary)
        del taught
        label, distance = how.gathered(torch.stack([label, distance])).sum(0)
        alpha = distill.alpha
        gradient = (student - total).exp_()
        gradient.scatter_add_(-1, local, -has.float()[:, None]).mul_(1 - alpha)
        gradient[:, :own].add_(difference, alpha=alpha)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return (1 - alpha) * (total[:, 0] - label) + alpha * distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None, None


def _log_sum(values: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp of [n, rows]; minus infinity without rows."""
    if values.size(-1) == 0:
        return values.new_full(values.shape[:1], -torch.inf)
    return values.logsumexp(-1)


def _threshold(values: torch.Tensor, count: int, how: TeacherComparison) -> torch.Tensor:
    """[n, 1], the `count`-th largest value of [n, rows] on all ranks."""
    own = values.topk(min(count, values.size(-1)), dim=-1).values
    missing = count - own.size(-1)
    if missing:
        own = torch.nn.functional.pad(own, (0, missing), value=-torch.inf)
    every = how.gathered(own).movedim(0, 1).flatten(1)
    return every.topk(count, dim=-1).values[:, -1:]
