"""The arithmetic of a step besides the model: learning rate, gradient norm, clipping and update, mean losses.

megatron-core reads the token count, the norm of each tensor and the global norm on the host, each of which empties the
GPU's queue. Here they stay on the device until the step's only transfer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.derived.batch_schedule import batch_schedule
from llmrecipes.recipe.derived.stages import decay_iters, span_of
from llmrecipes.recipe.schema import Recipe


def finalize(chunks: Sequence[Any], tokens: torch.Tensor | None, **options: Any) -> None:
    """Reduce gradients over ranks and divide them by the tokens of the global batch.

    Args:
        chunks: megatron-core's data-parallel wrappers.
        tokens: of this rank's micro-batches, an integer on the device; only the last stage counts them.
        options: megatron-core's.
    """
    with _complete_latent_norms(get_model_config(chunks[0])):
        finalize_model_grads(chunks, None, **options)
    if tokens is None:
        return
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(tokens, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    scaling = 1.0 / tokens.clamp(min=1)
    for chunk in chunks:
        chunk.scale_gradients(scaling)


@contextmanager
def _complete_latent_norms(config: TransformerConfig) -> Iterator[None]:
    """A block in which megatron-core sums no gradients of latent attention's norms over tensor-parallel ranks.

    By the name it takes `q_layernorm` there for a norm of the rank's heads. It normalizes what all heads share: the
    up-projection that follows sums the gradient already, and a second sum makes it too large by the number of ranks
    (0.19.2). With sequence parallelism the norms are marked like all others.
    """
    whole = config.multi_latent_attention and config.qk_layernorm
    if whole:
        config.qk_layernorm = False
    try:
        yield
    finally:
        if whole:
            config.qk_layernorm = True


def is_summed(name: str, parameter: torch.nn.Parameter, config: TransformerConfig) -> bool:
    """Whether the gradient of a parameter that all tensor-parallel ranks have is summed over them.

    This is the rule of megatron-core's `_allreduce_non_tensor_model_parallel_grads`, which needs its own gradient
    buffers: with sequence parallelism a rank applies norms, routers and biases to its own tokens only, and always the
    norms of queries and keys to its own heads only. `finalize` says why latent attention is different.

    Args:
        name: in the model.
        parameter: of the model.
        config: of the model.
    """
    if config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
        return True
    of_heads = config.qk_layernorm and not config.multi_latent_attention
    return of_heads and ("q_layernorm" in name or "k_layernorm" in name)


@torch.no_grad()
def squared_norm(optimizer: MegatronOptimizer, device: torch.device) -> torch.Tensor:
    """Square of the global gradient norm, on the device in fp64; a collective of all ranks.

    Args:
        optimizer: after `prepare_grads`.
        device: of the result.
    """
    by_group: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for part in parts(optimizer):
        by_group[part.get_grad_stats_parallel_group()] += part.get_grads_for_grad_norm()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group, gradients in by_group.items():
        square = torch.zeros((), dtype=torch.float64, device=device)
        if gradients:
            # Decoupled gradients may be in bf16, in which their norms would be too.
            square += torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double().square().sum()
        dist.all_reduce(square, group=group)
        total += square
    return total


def counted_gradients(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Gradients that this rank adds to `squared_norm`."""
    for part in parts(optimizer):
        yield from part.get_grads_for_grad_norm()


def watch_reduction(chunks: Sequence[Any], sums: list[torch.Tensor]) -> None:
    """Append the sum of each gradient buffer to a list before it is reduced over data-parallel ranks.

    After the reduction a value that is not finite is on every rank; before, the sum says which rank computed it. One
    pass over the gradients on the device, and nothing for the host to wait for.

    Args:
        chunks: megatron-core's data-parallel wrappers.
        sums: the caller empties it before each step.
    """

    def watched(group: Any, reduce: Callable[..., None]) -> Callable[..., None]:
        def start_grad_sync(*args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                sums.extend(bucket.grad_data.sum() for bucket in group.buckets)
            reduce(*args, **kwargs)

        return start_grad_sync

    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.start_grad_sync = watched(group, group.start_grad_sync)


def total(sums: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of scalars of any type, on the device in fp64."""
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([part.double() for part in sums]).sum()


@torch.no_grad()
def clip(optimizer: MegatronOptimizer, bound: float, norm: float) -> None:
    """Scale the gradients down to a norm, as `torch.nn.utils.clip_grad_norm_`.

    Args:
        optimizer: after `prepare_grads`.
        bound: largest norm.
        norm: their norm.
    """
    factor = bound / (norm + 1e-6)
    if not factor < 1.0:
        return
    for part in parts(optimizer):
        gradients = [grad for grad in map(gradient, part.get_parameters()) if grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What the optimizer updates a parameter with: gradients of another type than its own are apart from `grad`."""
    decoupled: torch.Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


def step(optimizer: MegatronOptimizer, chunks: Sequence[Any]) -> None:
    """Update the weights, and gather them unless the next forward pass does.

    With experts there are two optimizers; the weights of both are gathered together.

    Args:
        optimizer: with clipped gradients.
        chunks: megatron-core's data-parallel wrappers.
    """
    for part in parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            super(DistributedOptimizer, part).step_with_ready_grads()
        else:
            part.step_with_ready_grads()
    config = chunks[0].ddp_config
    if config.use_distributed_optimizer and not config.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync()


def states(optimizer: MegatronOptimizer, weights: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Master weights and moments on this rank.

    Args:
        optimizer: with allocated state.
        weights: the model's, which an fp32 optimizer updates in place.
    """
    weight_storages = {parameter.untyped_storage()._cdata for parameter in weights}
    tensors: list[torch.Tensor] = []
    for part in parts(optimizer):
        if part.optimizer is None:
            continue
        tensors += [
            parameter.data
            for parameter in part.get_parameters()
            if parameter.untyped_storage()._cdata not in weight_storages
        ]
        tensors += [
            tensor for state in part.optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)
        ]
    return tensors


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of dense parameters and of experts; empty on a stage without experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


class Schedule(OptimizerParamScheduler):
    """megatron-core's, with a polynomial decay and an exponential warm-up.

    Args:
        warmup_style: `linear` or `exponential`.
        power: of the polynomial.
        options: megatron-core's.
    """

    def __init__(self, optimizer: Any, *, warmup_style: str, power: float, **options: Any) -> None:
        self._warmup_style = warmup_style
        self._power = power
        super().__init__(optimizer, **options)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Learning rate of the next step of a parameter group, which may have its own limits."""
        highest: Any = param_group.get("max_lr", self.max_lr)
        lowest: Any = param_group.get("min_lr", self.min_lr)
        done, warmup = self.num_steps, self.lr_warmup_steps
        if warmup > 0 and done <= warmup:
            first = self.init_lr * (highest / self.max_lr)
            if self._warmup_style == "exponential":
                return float(highest * (self.init_lr / self.max_lr) ** (1 - done / warmup))
            return float(first + (highest - first) * float(done) / float(warmup))
        if self.lr_decay_style == "polynomial":
            left = max(0.0, 1 - (done - warmup) / (self.lr_decay_steps - warmup))
            return float(lowest + (highest - lowest) * left**self._power)
        return float(super().get_lr(param_group))


def scheduler(recipe: Recipe, optimizer: Any) -> Schedule:
    """The scheduler of a recipe: over steps, or over samples where the global batch grows, as in Megatron-LM.

    Keys that count steps then stand for the samples of these steps.

    Args:
        recipe: defines the curve.
        optimizer: its parameter groups are updated.
    """
    schedule = recipe.scheduler
    decay = decay_iters(recipe)
    length = _length(recipe)
    wsd = schedule.lr_wsd_decay_iters
    return Schedule(
        optimizer,
        warmup_style=schedule.lr_warmup_style,
        power=schedule.lr_polynomial_power,
        init_lr=schedule.lr_warmup_init,
        max_lr=recipe.optimizer.lr,
        min_lr=recipe.optimizer.min_lr,
        lr_warmup_steps=length(schedule.lr_warmup_iters),
        lr_decay_steps=length(decay),
        lr_decay_style=schedule.lr_decay_style,
        start_wd=recipe.optimizer.weight_decay,
        end_wd=recipe.optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run follows the current recipe; the checkpoint only provides the step.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=None if wsd is None else length(decay) - length(decay - wsd),
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )


def _length(recipe: Recipe) -> Callable[[int], int]:
    """What the scheduler counts of the first steps of its schedule: these steps, or their samples."""
    batches = batch_schedule(recipe)
    span = span_of(recipe)
    if batches.is_constant:
        return lambda steps: steps
    return batches.since(0 if span is None else span.schedule[0]).samples


def load_schedule(curve: OptimizerParamScheduler, state: dict[str, Any], recipe: Recipe, step: int) -> None:
    """Go on with the schedule of a checkpoint, unless it is of the stage before one that begins another."""
    curve.num_steps = 0  # megatron-core adds the loaded steps to those of a run that goes back
    span = span_of(recipe)
    if span is not None and 0 < step == span.schedule[0]:
        curve.step(increment=0)
    else:
        curve.load_state_dict(state)


def increment(plan: Plan, num_microbatches: int) -> int:
    """What a step with this many micro-batches of a rank adds to the scheduler."""
    if plan.batches.is_constant:
        return 1
    return num_microbatches * plan.recipe.layout.micro_batch_size * plan.layout.data_parallel_size


def learning_rate(recipe: Recipe, step: int) -> float:
    """Learning rate of a step, counted from 1, if no step was skipped."""
    curve = scheduler(recipe, SimpleNamespace(param_groups=[]))
    span = span_of(recipe)
    curve.num_steps = _length(recipe)(step - 1 - (0 if span is None else span.schedule[0]))
    return float(curve.get_lr({}))


def sum_over_tokens(
    batch: Mapping[str, torch.Tensor], losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of a micro-batch, its tokens, and both as they are reported, [2]; of losses [b, s]."""
    mask = batch["loss_mask"]
    total = (losses.float() * mask).sum()
    tokens = mask.sum()
    return total, tokens.to(torch.int), torch.stack([total.detach().double(), tokens.double()])


def mean_over_tokens(losses: Sequence[tuple[float, float]]) -> float:
    """Mean loss per token of several batches.

    Args:
        losses: mean loss of each, and the tokens that it counts.
    """
    counts = {tokens for _, tokens in losses}
    if len(counts) == 1:
        return math.fsum(loss for loss, _ in losses) / len(losses)
    return math.fsum(loss * tokens for loss, tokens in losses) / max(math.fsum(tokens for _, tokens in losses), 1.0)
