"""One optimizer step by DeepSpeed on the megatron-core model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import (
    Accept,
    Batch,
    Implementation,
    Platform,
    Progress,
    Slice,
    StepResult,
    StopCheck,
)
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.checkpoint.slices import ShardedParameter
from llmrecipes.engine.core.generation import generate
from llmrecipes.engine.core.masters import OwnGradient
from llmrecipes.engine.core.model.attention import masks
from llmrecipes.engine.core.model.gpt import BuiltModel
from llmrecipes.engine.core.model.init import slice_of
from llmrecipes.engine.core.rank_weights import weight_slices
from llmrecipes.engine.core.score import GPTScorer
from llmrecipes.engine.core.update import increment, is_summed, mean_over_tokens, scheduler
from llmrecipes.engine.deepspeed import state
from llmrecipes.engine.deepspeed.build import accepted_by_deepspeed, optimizer, zero
from llmrecipes.engine.deepspeed.configuration import deepspeed_config
from llmrecipes.engine.deepspeed.experts import expert_groups
from llmrecipes.engine.deepspeed.partition import Partition
from llmrecipes.engine.deepspeed.runtime import mpu, tensor_parallel_group
from llmrecipes.engine.meters import ReplicaFault
from llmrecipes.engine.parts.base import Agreed, Part, Parts, Step
from llmrecipes.engine.sampling import Sampling
from llmrecipes.faults.numerics import named_gradients
from llmrecipes.plan.derive import Plan


class DeepSpeedEngine:
    """Implements `engine.base.Engine`.

    Args:
        plan: of the recipe, on this world.
        built: the initialised model.
        sharded_parameters: all of its parameters.
        platform: device of the batches.
        resources: closed with the engine.
    """

    name = "deepspeed"

    def __init__(
        self,
        plan: Plan,
        built: BuiltModel,
        sharded_parameters: list[ShardedParameter],
        platform: Platform,
        resources: AbstractContextManager[Any],
    ) -> None:
        import deepspeed

        self._resources = resources

        self.recipe = plan.recipe
        self.plan = plan
        self.platform = platform
        self._mask = masks(plan.recipe, platform.device)
        self.modules = built.modules
        self._config, self._masks = built.config, built.masks
        self._steps = 0  # that have begun, which the masks of a step depend on
        self.module = built.module
        self.sharded_parameters = sharded_parameters
        self.implementation = Implementation(built.implementation, built.reason)
        _sum_over_tensor_parallel_ranks(built)
        with accepted_by_deepspeed(plan), expert_groups(self.module, plan.layout.expert_model_parallel_size):
            self._engine, self.optimizer, _, _ = deepspeed.initialize(
                model=self.module,
                optimizer=optimizer(plan.recipe, self.module, sharded_parameters),
                config=deepspeed_config(plan),
                mpu=mpu(),
                dist_init_required=False,
            )
        if plan.recipe.train.precision == "fp16":
            # The loop decides what a scale at its minimum means; DeepSpeed would raise.
            self.optimizer.loss_scaler.raise_error_at_min_scale = False
        self.partition = Partition(self.optimizer, sharded_parameters)
        self.scheduler = scheduler(plan.recipe, self.optimizer)
        self.local_loss = 0.0
        self._scale = 1.0
        step = Step(
            plan=plan,
            platform=platform,
            modules=self.modules,
            implementation=built.implementation,
            optimizer=self.optimizer,
            trained=sharded_parameters,
            sharded=False,
            gradients=self._full_gradients,
            loss_scale=lambda: self._scale,
        )
        self.parts = Parts.of(step, self.name)
        self._numbers = torch.zeros(self.parts.size, dtype=torch.float64, device=platform.device)
        self._see: Callable[[list[Slice], list[Slice]], None] | None = None

    def train_step(
        self,
        batches: Iterator[Batch],
        *,
        num_microbatches: int | None = None,
        stop: StopCheck | None = None,
        accept: Accept | None = None,
        redo: Callable[[], None] | None = None,
    ) -> StepResult:
        """`accept` is ignored: with ZeRO, DeepSpeed updates before the norm can be read (`recipe/rules/zero_rules.py`).

        So is `redo`: a step is computed once.
        """
        self._engine.train()
        self._steps += 1
        number = num_microbatches or self.plan.num_microbatches
        for part in self.parts:
            part.before_passes(self._steps, number)
        of_this_step = list(islice(batches, number))
        # DeepSpeed averages gradients over ranks, each micro-batch for itself, so the tokens of the global batch are
        # needed before the first backward pass.
        counts = self._agree(sum(float(batch["loss_mask"].sum()) for batch in of_this_step), stop)
        factor = (self.plan.layout.data_parallel_size / counts[0].clamp(min=1.0)).float()
        self._prepare_routers(sum(batch["loss_mask"].numel() for batch in of_this_step))
        loss = torch.zeros((), dtype=torch.float64, device=self.platform.device)
        scale = float(self.optimizer.loss_scale) if self.recipe.train.precision == "fp16" else None
        self._scale = scale or 1.0
        for place, batch in enumerate(of_this_step):
            last = place == len(of_this_step) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            if self._masks is not None:
                self._masks.begin(self._steps, place)
            total = self._loss(self._engine, batch)
            loss += total.detach().double()
            if last and scale is None:
                # DeepSpeed makes no update from gradients that are not finite, and does not look at the loss.
                factor = factor.where(loss.isfinite(), math.nan)
            self._engine.backward(total * factor, scale_wrt_gas=False)
            if not last:
                self._engine.step()
        lr = self.learning_rate
        local = self.parts.after_norm(None)
        if self._see is not None:
            self._see(self.weights(), self._gradients())
        if zero(self.recipe).stage == 0:
            agreed = self._read(loss, counts, self._norm_without_zero(), local)
            if not (math.isfinite(agreed.loss) and math.isfinite(agreed.norm)):
                # The update would spread it to every weight and hide where it started; with ZeRO, DeepSpeed looks.
                is_local = not math.isfinite(self.local_loss)
                return StepResult(agreed.loss, agreed.norm, lr, scale, False, agreed.stopping, is_local=is_local)
            self._engine.step()
        else:
            self._engine.step()
            agreed = self._read(loss, counts, self._engine.get_global_grad_norm(), local)
        if not self._engine.was_step_applied():
            # Without a loss scale this is not an overflow that a smaller scale cures: the run has to stop.
            norm = math.nan if scale is None else None
            return StepResult(agreed.loss, norm, lr, scale, scale is not None, agreed.stopping)
        self.scheduler.step(increment=increment(self.plan, number))
        return StepResult(agreed.loss, agreed.norm, lr, scale, False, agreed.stopping)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], global_batches: int, stop: StopCheck | None = None) -> float | None:
        self._engine.eval()
        losses: list[tuple[float, float]] = []
        stopping = False
        while len(losses) < global_batches and not stopping:
            loss = torch.zeros((), dtype=torch.float64, device=self.platform.device)
            tokens = 0.0
            for batch in islice(batches, self.plan.num_microbatches):
                loss += self._loss(self.module, batch).double()
                tokens += float(batch["loss_mask"].sum())
            agreed = self._read(loss, self._agree(tokens, stop), None, {})
            stopping = agreed.stopping
            losses.append((agreed.loss, agreed.counted))
        self._engine.train()
        return None if stopping else mean_over_tokens(losses)

    def params_synced(self) -> AbstractContextManager[None]:
        """DeepSpeed gathers updated parameters before a step ends, or when they are used."""
        return nullcontext()

    def replica_fault(self) -> ReplicaFault | None:
        """None: `recipe/rules/zero_rules.py` refuses the check."""
        return None

    def result_fault(self) -> ReplicaFault | None:
        """None, likewise."""
        return None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Where parameters are partitioned, this rank's part of each."""
        if zero(self.recipe).stage < 3:
            yield from named_gradients(self.module)
            return
        for name, parameter in self.module.named_parameters():
            yield name, parameter.ds_tensor

    def weights(self) -> list[Slice]:
        with self._gathered():
            return weight_slices(self.modules)

    def watch_gradients(self, see: Callable[[list[Slice], list[Slice]], None]) -> None:
        self._see = see

    def checkpoint_format(self) -> ShardedFormat:
        written_by = {"device": self.platform.name, "layers": self.implementation.name}
        return ShardedFormat(written_by, pinned=self.plan.device == "cuda")

    def state(self, progress: Progress) -> dict[str, Any]:
        return state.sharded_state(self, progress)

    def load_state(self, entry: Entry) -> Progress:
        progress = state.load_state(self, entry)
        self._steps = progress.step
        return progress

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        return generate(
            self.module, prompt, max_new_tokens=max_new_tokens, sampling=sampling, vocab_size=vocab_size, eod=eod
        )

    def scorer(self) -> GPTScorer:
        return GPTScorer(self.modules, self.plan, self.platform)

    def close(self) -> None:
        """Release the model, its memory and its process groups.

        Stage 3's hooks reference all of it from inside autograd, which Python's garbage collector cannot see.
        """
        self._engine.destroy()
        for owner in (*self.module.parameters(), *self.module.modules(), self.optimizer, self._engine):
            vars(owner).clear()
        self._resources.__exit__(None, None, None)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: the recipe's, which a parameter group may scale."""
        return float(self.scheduler.get_lr({}))

    def _loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Summed loss over the tokens of a micro-batch."""
        on_device = {name: tensor.to(self.platform.device, non_blocking=True) for name, tensor in batch.items()}
        mask = on_device["loss_mask"]
        losses = model(
            on_device["tokens"],
            on_device["position_ids"],
            self._mask(batch["position_ids"]),
            labels=on_device["labels"],
            loss_mask=mask,
        )
        self._numbers = self._numbers + torch.cat(self.parts.counted(on_device, losses))
        total: torch.Tensor = (losses.float() * mask).sum()
        return total

    def _agree(self, tokens: float, stop: StopCheck | None) -> torch.Tensor:
        """[2] on the device: tokens of the global batch, and ranks that have to stop."""
        counts = torch.tensor([tokens, float(stop is not None and stop())], dtype=torch.float64)
        counts = counts.to(self.platform.device, non_blocking=True)
        dist.all_reduce(counts)
        return counts / self.plan.layout.tensor_model_parallel_size

    def _read(
        self,
        loss: torch.Tensor,
        counts: torch.Tensor,
        norm: torch.Tensor | float | None,
        local: Mapping[Part, torch.Tensor],
    ) -> Agreed:
        """What the ranks know of a global batch; the parts get their numbers.

        It is the one time in a step that the host waits here for the device.

        Args:
            loss: summed over the micro-batches of this rank.
            counts: from `_agree`.
            norm: on the device, or already read by DeepSpeed; None: there is none.
            local: numbers that the parts read besides.
        """
        totals = torch.cat([loss[None], self._numbers])
        self._numbers = torch.zeros_like(self._numbers)
        dist.all_reduce(totals)
        norms = [norm.double().reshape(1)] if isinstance(norm, torch.Tensor) and norm.device == loss.device else []
        read: list[float] = torch.cat([totals, loss[None], counts, *norms, *local.values()]).tolist()
        whole, *sums = read[: len(totals)]
        self.local_loss, tokens, stops, *others = read[len(totals) :]
        that_clips = others.pop(0) if norms else math.nan if norm is None else float(norm)
        size = self.plan.layout.tensor_model_parallel_size
        agreed = Agreed(whole / size / max(tokens, 1.0), tokens, stops > 0, that_clips)
        self.parts.read([*sums, *others], local, agreed)
        return agreed

    def _norm_without_zero(self) -> torch.Tensor:
        """Global gradient norm; DeepSpeed's stage 0 clips without telling it."""
        from deepspeed.runtime.utils import clip_grad_norm_

        result: torch.Tensor = clip_grad_norm_(self.module.parameters(), math.inf, mpu=mpu())
        return result

    def _prepare_routers(self, tokens: int) -> None:
        """Begin a step: no tokens counted, and the weight of the routers' losses, which have their own backward pass.

        megatron-core multiplies them by all tokens of a micro-batch, masked ones too, so they are divided by these.

        Args:
            tokens: of this rank's micro-batches. DeepSpeed averages over ranks.
        """
        if not self.recipe.model.num_moe_experts:
            return
        reset_model_temporary_tensors(self._config, self.modules)
        scale = float(self.optimizer.loss_scale) if self.recipe.train.precision == "fp16" else 1.0
        # A tensor as megatron-core gives it, which copies into it later.
        MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), scale / tokens, device=self.platform.device))

    def _gradients(self) -> list[Slice]:
        """Copies of the reduced gradients of this rank's parameters, in model order."""
        shards = {sharded.parameter: sharded for sharded in self.sharded_parameters}
        return [
            slice_of(part.shard, values[part.start : part.start + part.numel].view(part.shard.local_shape).clone())
            for gradient in self._full_gradients()
            for values in (gradient.values.detach().to("cpu", torch.float32).flatten(),)
            for part in shards[gradient.parameter].slices
        ]

    def _full_gradients(self) -> Iterator[OwnGradient]:
        """Reduced gradients, each gathered from the ranks that have its parts."""
        from deepspeed.utils import safe_get_full_grad

        for sharded in self.sharded_parameters:
            yield OwnGradient(sharded.parameter, 0, safe_get_full_grad(sharded.parameter))

    def _gathered(self) -> AbstractContextManager[None]:
        if zero(self.recipe).stage < 3:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(self.module.parameters()))
        return gathered


def _sum_over_tensor_parallel_ranks(built: BuiltModel) -> None:
    """Sum gradients of weights that every tensor-parallel rank has, but applies to its own tokens or heads.

    It is done before ZeRO reduces and cuts them.
    """
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    for name, parameter in built.module.named_parameters():
        if parameter.requires_grad and is_summed(name, parameter, built.config):
            parameter.register_hook(_all_reduced)


def _all_reduced(gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.contiguous().clone()
    dist.all_reduce(total, group=tensor_parallel_group())
    return total
