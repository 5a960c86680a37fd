"""One optimizer step on megatron-core, in any layout, with mixed precision and the distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import (
    Accept,
    Batch,
    FirstAttempt,
    Implementation,
    Platform,
    Progress,
    Slice,
    StepResult,
    StopCheck,
)
from llmrecipes.engine.core import replicas, update
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.checkpoint.part import PartFormat
from llmrecipes.engine.core.generation import generate
from llmrecipes.engine.core.masters import own_gradients
from llmrecipes.engine.core.model.attention import apart, own_chunks, prediction_weights
from llmrecipes.engine.core.model.fake_quantize import renew_rounded, rounded
from llmrecipes.engine.core.model.gpt import BuiltModel, RecipeModel
from llmrecipes.engine.core.platform import patching
from llmrecipes.engine.core.rank_weights import gradient_slices, named_tensors, weight_slices
from llmrecipes.engine.core.rerun import RerunState, announced, is_finite, is_update, kept
from llmrecipes.engine.core.score import GPTScorer
from llmrecipes.engine.core.update import mean_over_tokens, scheduler, sum_over_tokens
from llmrecipes.engine.megatron import state
from llmrecipes.engine.megatron.cuda_graphs import RecordedLayers
from llmrecipes.engine.megatron.data_parallel import data_parallel
from llmrecipes.engine.megatron.optimizer import create_optimizer
from llmrecipes.engine.megatron.user_buffers import create_user_buffers, destroy_user_buffers
from llmrecipes.engine.meters import ReplicaFault
from llmrecipes.engine.parts.base import Agreed, Parts, Step
from llmrecipes.engine.sampling import Sampling
from llmrecipes.faults.numerics import first_bad_parameter
from llmrecipes.plan.derive import Plan

GRADIENT_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"


class MegatronEngine:
    """Implements `engine.base.MetaEngine`.

    Args:
        plan: of the recipe, on this world.
        built: the initialised model.
        platform: device of the batches.
    """

    name = "megatron"
    first_steps = 0

    def __init__(self, plan: Plan, built: BuiltModel, platform: Platform) -> None:
        self.recipe = plan.recipe
        self.plan = plan
        self.platform = platform
        recipe = plan.recipe
        self.modules: tuple[RecipeModel, ...] = built.modules
        self.implementation = Implementation(built.implementation, built.reason)
        self._config, self._masks = built.config, built.masks
        self._apart = apart(recipe, platform.device, built.implementation)
        if recipe.layout.torch_compile:
            for module in self.modules:
                module.compile_layers()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        if built.config.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        self._user_buffers = built.config.tp_comm_overlap and platform.device.type == "cuda"
        if self._user_buffers:
            create_user_buffers(plan)
        self.chunks = [data_parallel(plan, built, number) for number in range(len(built.modules))]
        self.optimizer: MegatronOptimizer = create_optimizer(recipe, self.modules, self.chunks)
        self.scheduler = scheduler(recipe, self.optimizer)
        self.updates = 0  # so far; a rank may have no parameter that counts them
        self.local_loss = 0.0
        self._micro_batches = plan.num_microbatches
        config = built.config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = update.finalize
        self._local_sums: list[torch.Tensor] = []
        self._reruns = recipe.faults.rerun_mode != "disabled"
        if self._reruns:
            update.watch_reduction(self.chunks, self._local_sums)
        if recipe.layout.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if self.chunks[0].ddp_config.align_param_gather:
            # Without effect in evaluation, which gathers the parameters first.
            config.param_sync_func = [chunk.start_param_sync for chunk in self.chunks]
        self._forward_backward = get_forward_backward_func()
        self.steps = 0  # that have begun, which the random numbers of a step depend on
        self.parts = self._make_parts(built.implementation)
        self._sum = next((part.loss for part in self.parts if part.loss is not None), sum_over_tokens)
        self._around = next((part.around for part in self.parts if part.around is not None), None)
        self._recorded: RecordedLayers | None = None
        if built.config.cuda_graph_impl != "none" and platform.device.type == "cuda":
            self._recorded = RecordedLayers(plan, self.chunks, self.optimizer)

    def train_step(
        self,
        batches: Iterator[Batch],
        *,
        num_microbatches: int | None = None,
        stop: StopCheck | None = None,
        accept: Accept | None = None,
        redo: Callable[[], None] | None = None,
    ) -> StepResult:
        renew_rounded(self.modules, self.steps)
        self.steps += 1
        self._micro_batches = num_microbatches or self.plan.num_microbatches
        before = RerunState(self.modules, self.optimizer)
        used = list[Batch]()
        result = self._attempt(kept(batches, used), stop, accept)
        if not is_update(result):
            before.restore_expert_bias()
        if not self._reruns or result.skipped or is_finite(result.loss, result.grad_norm):
            return result
        # All ranks have the same numbers, so all of them compute the step again.
        first = FirstAttempt(
            result.loss,
            math.nan if result.grad_norm is None else result.grad_norm,
            result.is_local,
            first_bad_parameter(self.named_tensors()),
        )
        before.restore()
        for part in self.parts:
            if part.counting:
                part.start()
        second = self._attempt(iter(used) if redo is None else announced(used, redo), stop, accept)
        if not is_update(second):
            before.restore_expert_bias()
        return replace(second, stop=second.stop or result.stop, first_attempt=first)

    def _attempt(self, batches: Iterator[Batch], stop: StopCheck | None, accept: Accept | None) -> StepResult:
        for chunk in self.chunks:
            chunk.train()
        if self._recorded is not None:
            self._recorded.before_step()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._local_sums.clear()
        for part in self.parts:
            part.before_passes(self.steps, self._micro_batches)
        outputs = self._passes(batches, forward_only=False)
        half = self.recipe.train.precision == "fp16"
        scale = self.optimizer.get_loss_scale().double().clone() if half else None
        overflow = self.optimizer.prepare_grads()
        for part in self.parts:
            part.before_norm()
        square = update.squared_norm(self.optimizer, self.platform.device)
        more = [update.total(self._local_sums, self.platform.device), *([] if scale is None else [scale])]
        agreed = self._agree(outputs, stop, square, more)
        loss = agreed.loss
        norm = agreed.norm
        stopping = agreed.stopping
        (local, *scales) = agreed.more
        lr = self.learning_rate
        scale_then = scales[0] if scales else None
        if overflow:
            return StepResult(loss, None, lr, scale_then, True, stopping)
        if not is_finite(loss, norm):
            # The update would spread it to every weight and hide where it started. All ranks have the same numbers.
            is_local = not (math.isfinite(self.local_loss) and math.isfinite(local))
            return StepResult(loss, norm, lr, scale_then, False, stopping, is_local=is_local)
        if accept is not None and not accept(loss, norm):
            return StepResult(loss, norm, lr, scale_then, False, stopping, rejected=True)
        for part in self.parts:
            part.before_update()
        update.clip(self.optimizer, self.recipe.optimizer.clip_grad or math.inf, norm)
        update.step(self.optimizer, self.chunks)
        self.updates += 1
        for part in self.parts:
            part.after_update()
        self.scheduler.step(increment=update.increment(self.plan, self._micro_batches))
        return StepResult(loss, norm, lr, scale_then, False, stopping)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], global_batches: int, stop: StopCheck | None = None) -> float | None:
        renew_rounded(self.modules, self.steps)
        for chunk in self.chunks:
            chunk.eval()
        losses: list[tuple[float, float]] = []
        stopping = False
        self._micro_batches = self.plan.num_microbatches
        while len(losses) < global_batches and not stopping:
            agreed = self._agree(self._passes(batches, forward_only=True), stop)
            stopping = agreed.stopping
            losses.append((agreed.loss, agreed.counted))
        for chunk in self.chunks:
            chunk.train()
        return None if stopping else mean_over_tokens(losses)

    @contextmanager
    def params_synced(self) -> Iterator[None]:
        """A block in which every rank has up-to-date parameters; all ranks have to enter it.

        With `overlap_param_gather` updated parameters are gathered during the next forward pass, so without this an
        evaluation would have old parameters, and a forward pass on a single rank would hang.
        """
        overlapped = self.chunks if self.recipe.layout.overlap_param_gather else []
        for chunk in overlapped:
            chunk.disable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in overlapped:
                chunk.enable_forward_pre_hook()

    def model_states(self) -> dict[str, list[torch.Tensor]]:
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        return {
            "weights": [parameter.data for parameter in parameters] + rounded(self.modules),
            "gradients": [parameter.main_grad for parameter in parameters if parameter.requires_grad],
            "optimizer": update.states(self.optimizer, parameters),
        }

    def watch_states(self, see: Callable[[str, Iterable[torch.Tensor]], None]) -> None:
        """All of them stay."""

    def replica_fault(self) -> ReplicaFault | None:
        named = ((name, tensor) for name, tensor in self.named_tensors() if not name.endswith(".grad"))
        return replicas.first_difference(named, self.platform.device)

    @torch.no_grad()
    def result_fault(self) -> ReplicaFault | None:
        # An interleaved schedule needs as many micro-batches as there are stages.
        number = self.plan.layout.pipeline_model_parallel_size if len(self.chunks) > 1 else 1
        self._micro_batches = number
        renew_rounded(self.modules, self.steps)
        with replicas.watched_results(self.modules) as results:
            for chunk in self.chunks:
                chunk.eval()
            self._passes(iter([replicas.fixed_tokens(self.recipe)] * number), forward_only=True)
            for chunk in self.chunks:
                chunk.train()
        return replicas.first_other_result(results, self.recipe, self.platform.device)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_tensors(self.modules)

    def weights(self) -> list[Slice]:
        return weight_slices(self.modules)

    def watch_gradients(self, see: Callable[[list[Slice], list[Slice]], None]) -> None:
        """Weights are copied after the forward pass: with `overlap_param_gather` they are not complete before it."""
        finalize = self._config.finalize_model_grads_func

        def finalize_and_see(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            see(weight_slices(self.modules), gradient_slices(self.modules, self.chunks))

        self._config.finalize_model_grads_func = finalize_and_see

    def checkpoint_format(self) -> ShardedFormat:
        return ShardedFormat(self._written_by(), pinned=self.plan.device == "cuda", frozen=self.recipe.train.freeze)

    def _written_by(self) -> dict[str, str]:
        return {"device": self.platform.name, "layers": self.implementation.name}

    def state(self, progress: Progress) -> dict[str, Any]:
        return state.sharded_state(self, progress)

    def part_format(self) -> PartFormat:
        return PartFormat(self._written_by(), pinned=self.plan.device == "cuda")

    def part(self, progress: Progress) -> dict[str, Any]:
        return state.needed_by_rank(self, progress)

    def load_state(self, entry: Entry) -> Progress:
        progress = state.load_state(self, entry)
        self.steps = progress.step
        return progress

    def rehearse_load(self) -> list[int]:
        return state.rehearse_load(self)

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        (module,) = self.modules
        renew_rounded(self.modules, self.steps)
        return generate(
            module, prompt, max_new_tokens=max_new_tokens, sampling=sampling, vocab_size=vocab_size, eod=eod
        )

    def scorer(self) -> GPTScorer:
        renew_rounded(self.modules, self.steps)
        return GPTScorer(self.modules, self.plan, self.platform)

    def close(self) -> None:
        """Release the model, its memory and its process groups.

        megatron-core's gradient hooks reference the model, and the model's configuration the optimizer, from inside
        autograd, which Python's garbage collector cannot see.
        """
        config = self.chunks[0].config
        config.grad_scale_func = config.finalize_model_grads_func = config.no_sync_func = None
        config.param_sync_func = config.moe_grad_scale_func = None
        if self._user_buffers:
            destroy_user_buffers()
        if self._recorded is not None:
            self._recorded.close()
        if (
            torch.are_deterministic_algorithms_enabled() != self._deterministic
        ):  # this imports torch's compiler: a second
            torch.use_deterministic_algorithms(self._deterministic)
        # megatron-core replaces it for the whole process (reduce_scatter_with_fp32_accumulation).
        patching.replace(GRADIENT_BUFFERS, "dist_reduce_scatter_func", dist.reduce_scatter_tensor)
        for chunk in self.chunks:
            vars(chunk).clear()
        # Process-wide state whose size depends on this model.
        MTPLossLoggingHelper.tracker.clear()
        get_moe_metrics_tracker().metrics.clear()

    def _make_parts(self, implementation: str) -> Parts:
        step = Step(
            plan=self.plan,
            platform=self.platform,
            modules=self.modules,
            implementation=implementation,
            optimizer=self.optimizer,
            trained=state.trained_parameters(self.modules),
            sharded=self.recipe.layout.use_distributed_optimizer,
            gradients=lambda: own_gradients(self.optimizer),
            counted=lambda: update.counted_gradients(self.optimizer),
            chunks=self.chunks,
        )
        return Parts.of(step, self.name)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: the recipe's, which a parameter group may scale."""
        return float(self.scheduler.get_lr({}))

    def _passes(self, batches: Iterator[Batch], *, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        """All micro-batches of a step through the pipeline, once in each pass; what `sum_over_tokens` reports, on the
        last stage."""
        for part in self.parts:
            batches = part.batches(batches, self._micro_batches, training=not forward_only)
        once = partial(
            self._forward_backward,
            forward_step_func=self._forward_step,
            model=self.chunks,
            num_microbatches=self._micro_batches,
            seq_length=self.recipe.model.seq_length,
            micro_batch_size=self.recipe.layout.micro_batch_size,
            decoder_seq_length=self.recipe.model.seq_length,
            forward_only=forward_only,
        )
        outputs: list[dict[str, torch.Tensor]]
        if self._around is None or forward_only:
            outputs = once(data_iterator=self._for_chunks(batches))
        else:
            outputs = self._around(
                batches, self._micro_batches, lambda each: once(data_iterator=self._for_chunks(each))
            )
        return outputs

    def _agree(
        self,
        outputs: list[dict[str, torch.Tensor]],
        stop: StopCheck | None,
        square: torch.Tensor | None = None,
        more: Sequence[torch.Tensor] = (),
    ) -> Agreed:
        """What the ranks know of a global batch; the parts get their numbers.

        The host waits for the device here and nowhere else in a step: everything it has to know comes in one transfer.

        Args:
            outputs: of the passes.
            stop: called here.
            square: of the gradient norm; None: of an evaluation, in which nothing but losses is measured.
            more: other numbers of this device, [].
        """
        # Only the last stage has losses; its tensor-parallel ranks have the same ones, which cancels out.
        totals = torch.zeros(2 + self.parts.size + 1, dtype=torch.float64, device=self.platform.device)
        for output in outputs:
            totals[:-1] += output["loss"]
        self.parts.add_to(totals[:-1])
        own = totals[:2].clone()
        totals[-1:].fill_(stop is not None and stop())  # an assignment copies from the host, and waits
        dist.all_reduce(totals)
        local = {} if square is None else self.parts.after_norm(square)
        norm = totals.new_full((1,), math.nan) if square is None else square.sqrt().reshape(1)
        read = torch.cat([own, totals, norm, *(each.reshape(1) for each in more), *local.values()]).tolist()
        own_loss, own_counted, loss, counted = read[:4]
        sums = read[4 : 4 + self.parts.size]
        (stops, the_norm, *others) = read[4 + self.parts.size :]
        self.local_loss = own_loss / max(own_counted, 1.0)
        agreed = Agreed(loss / max(counted, 1.0), counted, stops > 0, the_norm, tuple(others[: len(more)]))
        self.parts.read([*sums, *others[len(more) :]], local, agreed)
        return agreed

    def _for_chunks(self, batches: Iterator[Batch]) -> Any:
        """The micro-batches with their numbers."""
        if len(self.chunks) == 1:
            return enumerate(batches)
        # Each virtual stage iterates over all micro-batches independently.
        of_this_step = list(islice(batches, self._micro_batches))
        return [enumerate(of_this_step) for _ in self.chunks]

    def _forward_step(
        self, batches: Iterator[tuple[int, Batch]], model: Any, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Losses of a micro-batch [b, s], or with `return_schedule_plan` megatron-core's plan of the passes that
        compute them; and what sums them."""
        number, in_host = next(batches)
        if self._masks is not None:
            self._masks.begin(self.steps, number)
        conversations = self._apart(in_host["position_ids"])
        batch = {name: tensor.to(self.platform.device, non_blocking=True) for name, tensor in in_host.items()}
        parts = parallel_state.get_context_parallel_world_size()
        number = parallel_state.get_context_parallel_rank()
        depths = self.recipe.model.mtp_num_layers
        weights = prediction_weights(batch["loss_mask"], depths, parts, number) if depths else []
        batch = own_chunks(batch, parts, number)
        for part in self.parts:
            part.expect(batch)
        losses = (model.build_schedule_plan if return_schedule_plan else model)(
            batch["tokens"],
            batch["position_ids"],
            **conversations,
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            prediction_weights=weights,
        )
        return losses, partial(self._summed, batch)

    def _summed(self, batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count, reported = self._sum(batch, losses)
        return total, count, {"loss": torch.cat([reported, *self.parts.counted(batch, losses)])}
