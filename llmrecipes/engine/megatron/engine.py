"""One optimizer step on megatron-core, in any layout, with mixed precision and the distributed optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import (
    Accept,
    Batch,
    FirstAttempt,
    Implementation,
    Platform,
    Progress,
    ReplicaFault,
    Slice,
    StepResult,
    StopCheck,
)
from llmrecipes.engine.core import ema, update
from llmrecipes.engine.core.balance import RouterBalance
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.generation import generate
from llmrecipes.engine.core.model.attention import apart, own_chunks, prediction_weights
from llmrecipes.engine.core.model.config import DTYPES, optimizer_overrides
from llmrecipes.engine.core.model.gpt import BuiltModel, RecipeGPTModel
from llmrecipes.engine.core.platform import patching
from llmrecipes.engine.core.replicas import first_difference
from llmrecipes.engine.core.rerun import RerunState
from llmrecipes.engine.core.score import GPTScorer
from llmrecipes.engine.core.update import mean_over_tokens, scheduler
from llmrecipes.engine.core.versions import auxiliary_losses
from llmrecipes.engine.core.weights import gradient_slices, weight_slices
from llmrecipes.engine.megatron import state
from llmrecipes.engine.sampling import Sampling
from llmrecipes.errors import UserError
from llmrecipes.faults.numerics import first_bad_parameter, named_gradients
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.features import value, values
from llmrecipes.recipe.schema import Recipe

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
        self.recipe, self.plan, self.platform = plan.recipe, plan, platform
        recipe = plan.recipe
        self.modules: tuple[RecipeGPTModel, ...] = built.modules
        self.implementation = Implementation(built.implementation, built.reason)
        self._config = built.config
        self._apart = apart(recipe, platform.device, built.implementation)
        self.balance: RouterBalance | None = None
        if recipe.model.num_moe_experts:
            self.balance = RouterBalance(self.modules, plan, platform.device)
        if recipe.train.torch_compile:
            for module in self.modules:
                module.compile_layers()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        if built.config.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        self._user_buffers = built.config.tp_comm_overlap and platform.device.type == "cuda"
        if self._user_buffers:
            create_user_buffers(plan)
        self.chunks = [_data_parallel(plan, built, number) for number in range(len(built.modules))]
        options = optimizer_config(recipe)
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            options,
            self.chunks,
            config_overrides=optimizer_overrides(options, recipe.model, recipe.optimizer),
            use_gloo_process_groups=False,
        )
        _allocate_optimizer_state(self.optimizer)
        if recipe.optimizer.ema_decay is not None:
            ema.start(self.optimizer)
        self.scheduler = scheduler(recipe, self.optimizer)
        self.local_loss = 0.0
        config = built.config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = update.finalize
        self._local_sums: list[torch.Tensor] = []
        self._reruns = recipe.faults.rerun_mode != "disabled"
        if self._reruns:
            update.watch_reduction(self.chunks, self._local_sums)
        if recipe.parallelism.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if self.chunks[0].ddp_config.align_param_gather:
            # Without effect in evaluation, which gathers the parameters first.
            config.param_sync_func = [chunk.start_param_sync for chunk in self.chunks]
        self._forward_backward = get_forward_backward_func()

    def train_step(
        self, batches: Iterator[Batch], *, stop: StopCheck | None = None, accept: Accept | None = None
    ) -> StepResult:
        before = RerunState(self.modules, self.optimizer)
        used: list[Batch] = []
        result = self._attempt(_kept(batches, used), stop, accept)
        if result.rejected:
            before.restore_expert_bias()
        if not self._reruns or result.skipped or _is_finite(result.loss, result.grad_norm):
            return result
        # All ranks have the same numbers, so all of them compute the step again.
        first = FirstAttempt(
            result.loss,
            math.nan if result.grad_norm is None else result.grad_norm,
            result.is_local,
            first_bad_parameter(self.named_tensors()),
        )
        before.restore()
        if self.balance is not None:
            self.balance.restart()
        again = self._attempt(iter(used), stop, accept)
        if again.rejected:
            before.restore_expert_bias()
        return replace(again, stop=again.stop or result.stop, first_attempt=first)

    def _attempt(self, batches: Iterator[Batch], stop: StopCheck | None, accept: Accept | None) -> StepResult:
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._local_sums.clear()
        outputs = self._passes(batches, forward_only=False)
        half = self.recipe.train.precision == "fp16"
        scale = self.optimizer.get_loss_scale().double().clone() if half else None
        overflow = self.optimizer.prepare_grads()
        square = update.squared_norm(self.optimizer, self.platform.device)
        loss, _, stopping, (norm, scale_then, local) = self._agree(
            outputs, stop, square.sqrt(), scale, update.total(self._local_sums, self.platform.device)
        )
        lr = self.learning_rate
        if overflow:
            return StepResult(loss, None, lr, scale_then, True, stopping)
        if not _is_finite(loss, norm):
            # The update would spread it to every weight and hide where it started. All ranks have the same numbers.
            is_local = not (math.isfinite(self.local_loss) and math.isfinite(local))
            return StepResult(loss, norm, lr, scale_then, False, stopping, is_local=is_local)
        if accept is not None and not accept(loss, norm):
            return StepResult(loss, norm, lr, scale_then, False, stopping, rejected=True)
        update.clip(self.optimizer, self.recipe.optimizer.clip_grad or math.inf, norm)
        update.step(self.optimizer, self.chunks)
        if self.recipe.optimizer.ema_decay is not None:
            ema.update(self.optimizer, self.recipe.optimizer.ema_decay)
        self.scheduler.step(increment=1)
        return StepResult(loss, norm, lr, scale_then, False, stopping)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], global_batches: int, stop: StopCheck | None = None) -> float | None:
        for chunk in self.chunks:
            chunk.eval()
        losses: list[tuple[float, float]] = []
        stopping = False
        while len(losses) < global_batches and not stopping:
            loss, tokens, stopping, _ = self._agree(self._passes(batches, forward_only=True), stop)
            losses.append((loss, tokens))
        for chunk in self.chunks:
            chunk.train()
        return None if stopping else mean_over_tokens(losses)

    @contextmanager
    def params_synced(self) -> Iterator[None]:
        """A block in which every rank has up-to-date parameters; all ranks have to enter it.

        With `overlap_param_gather` updated parameters are gathered during the next forward pass, so without this an
        evaluation would have old parameters, and a forward pass on a single rank would hang.
        """
        overlapped = self.chunks if self.recipe.parallelism.overlap_param_gather else []
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
            "weights": [parameter.data for parameter in parameters],
            "gradients": [parameter.main_grad for parameter in parameters if parameter.requires_grad],
            "optimizer": update.states(self.optimizer, parameters),
        }

    def watch_states(self, see: Callable[[str, Iterable[torch.Tensor]], None]) -> None:
        """All of them stay."""

    def replica_fault(self) -> ReplicaFault | None:
        named = ((name, tensor) for name, tensor in self.named_tensors() if not name.endswith(".grad"))
        return first_difference(named, self.platform.device)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = [pair for module in self.modules for pair in _as_in_the_whole_model(module)]
        yield from sorted(pairs, key=lambda pair: pair[0].endswith(".grad"))

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
        written_by = {"device": self.platform.name, "layers": self.implementation.name}
        return ShardedFormat(written_by, pinned=self.plan.device == "cuda")

    def state(self, progress: Progress) -> dict[str, Any]:
        return state.sharded_state(self, progress)

    def load_state(self, entry: Entry) -> Progress:
        return state.load_state(self, entry)

    def rehearse_load(self) -> list[int]:
        return state.rehearse_load(self)

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        (module,) = self.modules
        return generate(
            module, prompt, max_new_tokens=max_new_tokens, sampling=sampling, vocab_size=vocab_size, eod=eod
        )

    def scorer(self) -> GPTScorer:
        return GPTScorer(self.modules, self.plan, self.platform)

    def close(self) -> None:
        """Release the model, its memory and its process groups.

        megatron-core's gradient hooks reference the model, and the model's configuration the optimizer, from inside
        autograd, which Python's garbage collector cannot see.
        """
        config = self.chunks[0].config
        config.grad_scale_func = config.finalize_model_grads_func = config.no_sync_func = None
        config.param_sync_func = None
        if self._user_buffers:
            destroy_user_buffers()
        torch.use_deterministic_algorithms(self._deterministic)
        # megatron-core replaces it for the whole process (reduce_scatter_with_fp32_accumulation).
        patching.replace(GRADIENT_BUFFERS, "dist_reduce_scatter_func", dist.reduce_scatter_tensor)
        for chunk in self.chunks:
            vars(chunk).clear()
        # Process-wide state whose size depends on this model.
        MTPLossLoggingHelper.tracker.clear()
        auxiliary_losses().clear()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: the recipe's, which a parameter group may scale."""
        return float(self.scheduler.get_lr({}))

    def _passes(self, batches: Iterator[Batch], *, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        """All micro-batches of a step through the pipeline; what `_sum_over_tokens` reports, on the last stage."""
        outputs: list[dict[str, torch.Tensor]] = self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=self._for_chunks(batches),
            model=self.chunks,
            num_microbatches=self.plan.num_microbatches,
            seq_length=self.recipe.model.seq_length,
            micro_batch_size=self.recipe.train.micro_batch_size,
            decoder_seq_length=self.recipe.model.seq_length,
            forward_only=forward_only,
        )
        return outputs

    def _agree(
        self,
        outputs: list[dict[str, torch.Tensor]],
        stop: StopCheck | None,
        norm: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        local: torch.Tensor | None = None,
    ) -> tuple[float, float, bool, tuple[float, float | None, float]]:
        """Mean loss of the global batch, its tokens, whether a rank has to stop, and three numbers of this device.

        The tokens are those that the loss counts, times tensor-parallel ranks.

        The host waits for the device here and nowhere else in a step: everything it has to know comes in one transfer.
        """
        # Summed loss, tokens, and whether to stop. Only the last stage has losses; its tensor-parallel ranks have the
        # same ones, which cancels out.
        device = self.platform.device
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        for output in outputs:
            totals[:2] += output["loss"]
        own = totals[:2].clone()
        totals[2] = float(stop is not None and stop())
        dist.all_reduce(totals)
        nothing = torch.zeros(1, dtype=torch.float64, device=device)
        more = [nothing if each is None else each.reshape(1) for each in (norm, scale, local)]
        numbers = torch.cat([own, totals, *more]).tolist()
        own_loss, own_tokens, loss, tokens, stops, the_norm, the_scale, the_local = numbers
        self.local_loss = own_loss / max(own_tokens, 1.0)
        scalars = the_norm, None if scale is None else the_scale, the_local
        return loss / max(tokens, 1.0), tokens, stops > 0, scalars

    def _for_chunks(self, batches: Iterator[Batch]) -> Any:
        if len(self.chunks) == 1:
            return batches
        # Each virtual stage iterates over all micro-batches independently.
        of_this_step = list(islice(batches, self.plan.num_microbatches))
        return [iter(of_this_step) for _ in self.chunks]

    def _forward_step(
        self, batches: Iterator[Batch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Losses of a micro-batch [b, s], or with `return_schedule_plan` megatron-core's plan of the passes that
        compute them; and what sums them."""
        in_host = next(batches)
        conversations = self._apart(in_host["position_ids"])
        batch = {name: tensor.to(self.platform.device, non_blocking=True) for name, tensor in in_host.items()}
        parts = parallel_state.get_context_parallel_world_size()
        number = parallel_state.get_context_parallel_rank()
        depths = self.recipe.model.mtp_num_layers
        weights = prediction_weights(batch["loss_mask"], depths, parts, number) if depths else []
        batch = own_chunks(batch, parts, number)
        losses = (model.build_schedule_plan if return_schedule_plan else model)(
            batch["tokens"],
            batch["position_ids"],
            **conversations,
            labels=batch["labels"],
            loss_mask=torch.ones_like(batch["loss_mask"]) if weights else batch["loss_mask"],
            prediction_weights=weights,
        )
        return losses, partial(_sum_over_tokens, batch["loss_mask"])


def _kept(batches: Iterator[Batch], used: list[Batch]) -> Iterator[Batch]:
    """The batches, of which those that are read are kept."""
    for batch in batches:
        used.append(batch)
        yield batch


def _is_finite(loss: float, norm: float | None) -> bool:
    return math.isfinite(loss) and norm is not None and math.isfinite(norm)


def _as_in_the_whole_model(module: RecipeGPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    numbers = [layer.layer_number - 1 for layer in module.decoder.layers]
    for name, tensor in named_gradients(module):
        local = re.match(r"decoder\.layers\.(\d+)(.*)", name)
        yield f"decoder.layers.{numbers[int(local[1])]}{local[2]}" if local else name, tensor


def _sum_over_tokens(
    mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss and token count of a micro-batch; megatron-core divides by the count of the global batch."""
    total = (losses.float() * mask).sum()
    tokens = mask.sum()
    report = torch.stack([total.detach(), tokens]).double()
    return total, tokens.to(torch.int), {"loss": report}


def create_user_buffers(plan: Plan) -> None:
    """Allocate what TransformerEngine's layers communicate through (`speed.tp_comm_overlap`); all ranks call it.

    For micro-batches of one shape, as in Megatron-LM's `training/initialize.py`. TransformerEngine takes ranks of
    consecutive numbers for tensor-parallel ones, which they are here.

    Raises:
        UserError: the GPUs cannot.
    """
    from transformer_engine.pytorch.module import base  # only where its layers are

    recipe = plan.recipe
    tokens = recipe.model.seq_length * recipe.train.micro_batch_size // plan.layout.context_parallel_size
    try:
        base.initialize_ub(
            shape=[tokens, recipe.model.hidden_size],
            tp_size=plan.layout.tensor_model_parallel_size,
            quantization_modes=[base.UserBufferQuantizationMode.NONE],
            dtype=DTYPES[recipe.train.precision],
            ub_cfgs={},
            # gloo would connect every rank with every other by TCP.
            bootstrap_backend="nccl",
        )
    except RuntimeError as error:
        raise UserError(
            " ".join(str(error).split()),
            where="speed.tp_comm_overlap",
            rule="its user buffers need NVLink with multicast between the tensor-parallel ranks, or UB_SKIPMC=1",
            fix="speed.tp_comm_overlap=null",
        ) from error


def destroy_user_buffers() -> None:
    """Free them; a later model can have others."""
    from transformer_engine.pytorch.module import base

    base.destroy_ub()


def _data_parallel(plan: Plan, built: BuiltModel, number: int) -> DistributedDataParallel:
    config = data_parallel_config(plan)
    # The first chunk's gradients are computed last; the other chunks need no buckets to overlap.
    return DistributedDataParallel(built.config, config, built.modules[number], disable_bucketing=number > 0)


def data_parallel_config(plan: Plan) -> DistributedDataParallelConfig:
    """megatron-core's configuration of gradient buffers and their reduction."""
    recipe = plan.recipe
    parallelism = recipe.parallelism
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=parallelism.grad_reduce_in_fp32 or recipe.train.precision == "fp32",
        overlap_grad_reduce=parallelism.overlap_grad_reduce,
        overlap_param_gather=parallelism.overlap_param_gather,
        use_distributed_optimizer=parallelism.use_distributed_optimizer,
        # Gradients of weights that come later are reduced later.
        delay_wgrad_compute=bool(value(plan.features, "delay_wgrad_compute")),
        **values(plan.features, "DistributedDataParallelConfig"),
    )


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer."""
    optimizer, train = recipe.optimizer, recipe.train
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        params_dtype=DTYPES[train.precision],
        initial_loss_scale=train.initial_loss_scale,
        min_loss_scale=train.min_loss_scale,
        loss_scale_window=train.loss_scale_window,
        hysteresis=train.hysteresis,
        use_distributed_optimizer=recipe.parallelism.use_distributed_optimizer,
        overlap_param_gather=recipe.parallelism.overlap_param_gather,
    )


def _allocate_optimizer_state(optimizer: MegatronOptimizer) -> None:
    # Otherwise the moments are allocated at the first update: too late for a save before it (every step can overflow in
    # fp16), and too late to detect that memory does not suffice.
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:  # a stage may have no parameters of a kind
            part.init_state_fn(part.optimizer, part.config)
