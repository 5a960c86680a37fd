"""Construction of the model of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from llmrecipes.engine.base import WeightSource
from llmrecipes.engine.core.checkpoint.slices import other_state
from llmrecipes.engine.core.model import dropout
from llmrecipes.engine.core.model.config import accepted_by_core, require_in_local_layers, transformer_config
from llmrecipes.engine.core.model.dropout import Masks
from llmrecipes.engine.core.model.fake_quantize import FakeQuantizer
from llmrecipes.engine.core.model.frozen_parameters import freeze
from llmrecipes.engine.core.model.init import buffers, fill, initialise, parameter_slices
from llmrecipes.engine.core.model.layer_spec import choose, stack_spec
from llmrecipes.engine.core.model.lora import ADAPTER, insert
from llmrecipes.engine.core.model.loss import (
    Chunking,
    CompiledLossKernels,
    LossKernels,
    Split,
    chunked_losses,
    losses_of_logits,
)
from llmrecipes.engine.core.model.schedule_plan import ScheduledModel
from llmrecipes.engine.core.platform import Platform
from llmrecipes.engine.core.token_accuracy import TokenAccuracy
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import compiler_obstacle, transformer_engine_version
from llmrecipes.plan.derive import Plan, gpu_memory, with_chunks
from llmrecipes.plan.losses import in_kernels
from llmrecipes.recipe.derived.layer_pattern import layer_pattern
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import FeatureChoice, SpeedTarget, require, resolve, value


class RecipeModel(ScheduledModel):
    """megatron-core's model with label smoothing, and a loss with fewer passes over unsplit logits, or in chunks.

    megatron-core's cross entropy is written for logits split over tensor-parallel ranks; on unsplit ones torch's needs
    fewer passes over the logits, which are the largest tensor of a small model.

    In chunks the output layer passes its input on, and the loss multiplies it by the layer's weight. What megatron-core
    does with the logits in between is a product with a number (muP's), which is the same on its input.
    """

    has_adapters = False
    """Whether the model itself is frozen, and checkpoints have the adapters only."""
    fake_quantizer: FakeQuantizer | None = None
    """Rounds the matrices of the layers (`qat`)."""
    extra: Mapping[str, Any] = MappingProxyType({})
    """`model.extra`."""
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    loss_chunk_tokens: int = 0
    """Tokens whose logits are in memory together; 0: all of a micro-batch."""
    accuracy: TokenAccuracy
    """Sees the logits of each loss."""
    logits: torch.nn.Identity
    """Passes the scaled logits on, to be watched by a hook like other activations: with a loss in chunks in evaluations
    only, chunk by chunk, [tokens, padded vocabulary / tensor-parallel size]."""
    compared: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """In place of the cross entropy in training, the loss that compares with a teacher; arguments and result as
    `_token_losses`."""
    _weights: Iterator[torch.Tensor] = iter(())
    _loss_weights: Iterator[torch.Tensor | None] = iter(())
    _in_chunks = False
    _output_weight: tuple[torch.Tensor, ...]  # one, in a tuple because a module would register it
    _compiled_loss: LossKernels | None = None

    def chunk_loss(self, tokens: int) -> None:
        """Compute the loss in chunks of this many tokens from now on."""
        self.loss_chunk_tokens = tokens
        if tokens and self.post_process:
            self.output_layer.forward = self._output(self.output_layer.forward)

    def _output(self, whole: Any) -> Any:
        def forward(input_: torch.Tensor, weight: torch.Tensor | None = None, **options: Any) -> Any:
            if not self._in_chunks:
                return whole(input_, weight=weight, **options)
            self._output_weight = (self.output_layer.weight if weight is None else weight,)
            return input_, None

        return forward

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile layer by layer: all layers share one compiled graph, so compile time does not grow with depth.

        Of a layer with experts only the attention: its experts get another number of tokens each time, so they would be
        compiled again and again until torch gives up.

        Args:
            backend: of torch.compile; `eager` traces only.
        """
        for layer in self.decoder.layers:
            part = layer.self_attention if isinstance(layer.mlp, MoELayer) else layer
            part.compile(dynamic=False, backend=backend)
        self.compile_loss(backend)

    def compile_loss(self, backend: str = "inductor") -> None:
        """Compute the loss in compiled kernels, which never have all logits of a chunk in fp32.

        Args:
            backend: as of `compile_layers`.
        """
        self._compiled_loss = CompiledLossKernels(backend)

    def forward(self, *args: Any, prediction_weights: Sequence[torch.Tensor] = (), **kwargs: Any) -> torch.Tensor:
        """megatron-core's, with a weight for each loss of multi-token prediction.

        Args:
            prediction_weights: those weights, [b, s], in place of the loss mask.
            args, kwargs: megatron-core's. The sum of the losses has to be weighted with `loss_mask`, if both it and
                `labels` are passed.
        """
        kwargs = self._expect_losses(prediction_weights, kwargs)
        try:
            # A layer may look at its configuration only now.
            with accepted_by_core(self.extra, (AssertionError, NotImplementedError)):
                result: torch.Tensor = super().forward(*args, **kwargs)
        finally:
            self._in_chunks = False
        return result

    def build_schedule_plan(self, *args: Any, prediction_weights: Sequence[torch.Tensor] = (), **kwargs: Any) -> Any:
        """megatron-core's passes of a micro-batch in parts, which its schedule runs beside those of another one
        (`layout.overlap_moe_expert_parallel_comm`). It runs them all before it asks for the next one of this chunk.

        Args: as `forward`.
        """
        return super().build_schedule_plan(*args, **self._expect_losses(prediction_weights, kwargs))

    def _expect_losses(self, prediction_weights: Sequence[torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
        """What the losses of a micro-batch are computed with, and megatron-core's arguments; arguments as `forward`."""
        self._weights = iter(prediction_weights)
        self._in_chunks = self.loss_chunk_tokens > 0 and options.get("labels") is not None
        # What weights the losses of multi-token prediction is decided in megatron-core.
        self._loss_weights = chain(repeat(None, self.config.mtp_num_layers or 0), [options.get("loss_mask")])
        return options | {"loss_mask": torch.ones_like(options["loss_mask"])} if prediction_weights else options

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Loss of each token; megatron-core first requests those of multi-token prediction, which have weights.

        Args and result as `_token_losses`.
        """
        if self._in_chunks:
            losses = self._chunked_losses(labels, logits)
        else:
            logits = self.logits(logits)
            self.accuracy.see(logits, labels.t())
            compare = self.training and self.compared
            losses = compare(labels, logits) if compare else self._token_losses(labels, logits)
        weight = next(self._weights, None)
        return losses if weight is None else losses * weight

    def _chunked_losses(self, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """As `_token_losses`, with the output layer's input [s, b, h] (scaled as the logits are)."""
        (weight,) = self._output_weight
        how = self._chunking(self.logits, self.accuracy.see)
        return chunked_losses(hidden, weight, labels, next(self._loss_weights), how)

    def _chunking(self, evaluated: Callable[..., torch.Tensor], seen: Callable[..., None]) -> Chunking:
        split = self.config.tensor_model_parallel_size > 1
        return Chunking(
            self.loss_chunk_tokens,
            Split(parallel_state.get_tensor_model_parallel_group() if split else None, self.config.sequence_parallel),
            self.label_smoothing if self.training else 0.0,
            self.z_loss_coeff if self.training else 0.0,
            self._compiled_loss or LossKernels(),
            evaluated,
            seen,
        )

    def _token_losses(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each token.

        Args:
            labels: [b, s] token ids.
            logits: [s, b, padded vocabulary / tensor-parallel size].

        Returns:
            [b, s] in fp32. Smoothed in training only, so that validation losses are comparable across recipes.
        """
        if self._compiled_loss is not None:
            return losses_of_logits(logits, labels, self._chunking(torch.nn.Identity(), lambda *_: None))
        smoothing = self.label_smoothing if self.training else 0.0
        if self.config.tensor_model_parallel_size > 1:
            excess = smoothing * _AboveMean.apply(logits, labels.t()).t() if smoothing else 0.0
            loss: torch.Tensor = super().compute_language_model_loss(labels, logits)
            return loss + excess
        flat = logits.reshape(-1, logits.size(-1)).float()
        loss = F.cross_entropy(flat, labels.t().reshape(-1), reduction="none", label_smoothing=smoothing)
        return loss.view(labels.size(1), labels.size(0)).t().contiguous()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """megatron-core's, without the output layer's extra state, which its checkpoints of GPT do not have."""
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        state.pop("output_layer._extra_state", None)
        return state

    def sharded_state(self) -> dict[str, Any]:
        """Sharded state dict of the weights, in the format of checkpoints."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state: dict[str, Any] = self.sharded_state_dict(
            metadata={"dp_cp_group": group, "singleton_local_shards": False}
        )
        return state

    def saved_state(self) -> dict[str, Any]:
        """`sharded_state` of what checkpoints have: all weights, or only the adapters."""
        if not self.has_adapters:
            return self.sharded_state()
        return {
            name: value
            for name, value in self.sharded_state().items()
            if isinstance(value.data, torch.nn.Parameter) and value.data.requires_grad
        }


class _AboveMean(torch.autograd.Function):
    """Label logit minus mean logit: times the smoothing probability, this is what smoothing adds to the loss.

    megatron-core's own smoothing takes the mean over the logits of one tensor-parallel rank, which is a different loss.
    A custom autograd function, because autograd would save the logits, which megatron-core's cross entropy overwrites.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[s, b] from logits [s, b, padded vocabulary / tensor-parallel size] and labels [s, b]."""
        rows = logits.size(-1)
        local = labels - parallel_state.get_tensor_model_parallel_rank() * rows
        here = (local >= 0) & (local < rows)
        local = local.clamp(0, rows - 1).unsqueeze(-1)
        vocabulary = rows * parallel_state.get_tensor_model_parallel_world_size()
        difference = logits.float().gather(-1, local).squeeze(-1) * here - logits.float().sum(-1) / vocabulary
        torch.distributed.all_reduce(difference, group=parallel_state.get_tensor_model_parallel_group())
        ctx.save_for_backward(local, here)
        ctx.shape = logits.shape
        ctx.dtype = logits.dtype
        ctx.vocabulary = vocabulary
        return difference

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gradient of the logits: 1 at the label minus 1/vocabulary everywhere, times the incoming gradient."""
        local, here = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        result = (-gradient / ctx.vocabulary).expand(ctx.shape).to(ctx.dtype).contiguous()
        return result.scatter_add_(-1, local, (gradient * here.unsqueeze(-1)).to(ctx.dtype)), None


@dataclass(frozen=True)
class BuiltModel:
    """A model and how it was built."""

    modules: tuple[RecipeModel, ...]
    """This rank's chunks: one, or one for each virtual pipeline stage."""
    config: TransformerConfig
    implementation: str
    """`transformer_engine` or `local`."""
    reason: str
    """Why it was chosen."""
    masks: Masks | None = None
    """Of dropout that is the same in every layout."""

    @property
    def module(self) -> RecipeModel:
        """The only chunk of a rank that has the full model."""
        (module,) = self.modules
        return module


def build(plan: Plan, platform: Platform, weights: WeightSource | None = None, *, only: str = "") -> BuiltModel:
    """The initialised model of this rank, on the platform's device.

    Args:
        plan: of the recipe, on this world.
        platform: device of the parameters.
        weights: its weights, adapters aside; None: initial ones.
        only: initialise the parameters with this in their global name; the others have no defined values.
    """
    built = construct(plan, platform)
    for module in built.modules:
        state = module.sharded_state()
        if weights is None:
            initialise(state, plan.recipe.model, plan.recipe.train.seed, only=only)
        else:
            base = (part for part in parameter_slices(state) if ADAPTER not in part.name)
            fill(chain(base, buffers(other_state(state))), weights)
            if module.has_adapters:
                initialise(state, plan.recipe.model, plan.recipe.train.seed, only=ADAPTER)
    return built


def construct_without_memory(plan: Plan) -> RecipeModel:
    """The whole model of one process, of local layers, as names and shapes: its parameters are on the meta device."""
    config = transformer_config(plan, on_gpu=False, transformer_engine=False)
    config.perform_initialization = False  # operations on the meta device import torch's compiler, for half a second
    with accepted_by_core(plan.recipe.model.extra), torch.device("meta"):
        return _chunk(plan, config, "local", None)


def construct(plan: Plan, platform: Platform) -> BuiltModel:
    """The model without defined values; arguments as `build`."""
    recipe = plan.recipe
    implementation, reason, target = software(plan, platform)
    if implementation == "local" and (platform.device.type != "meta" or plan.device == "cpu"):
        require_in_local_layers(recipe.model)
    config = transformer_config(
        plan,
        on_gpu=platform.device.type != "cpu",
        transformer_engine=implementation == "transformer_engine",
        target=target,
    )
    chunks = recipe.layout.virtual_pipeline_model_parallel_size
    stages = range(chunks) if chunks else (None,)
    with accepted_by_core(recipe.model.extra):
        modules = tuple(_chunk(plan, config, implementation, stage) for stage in stages)
    for module in modules:
        module.to(device=platform.device)
        for parameter in module.parameters():
            # The position embedding is created in fp32. Buffers are not converted: expert biases need fp32.
            parameter.data = parameter.data.to(config.params_dtype)
        if module.fake_quantizer is not None:
            module.fake_quantizer.allocate()
    masks = None
    if implementation == "local":
        on_gpu = target.device != "cpu"
        compiled = on_gpu and config.bias_dropout_fusion and platform.device.type != "meta"
        masks = dropout.create(plan, modules, on_gpu=on_gpu, compiled=compiled)
    return BuiltModel(modules, config, implementation, reason, masks)


def software(plan: Plan, platform: Platform) -> tuple[str, str, SpeedTarget]:
    """The implementation of the layers, why it was chosen, and what this rank has for the features of `speed`.

    Raises:
        UserError: the recipe wants a feature that is not there, or contradicts a variable of the environment.
    """
    recipe = plan.recipe
    implementation, reason = choose(recipe)
    target = detected(plan, platform, transformer_engine=implementation == "transformer_engine", reason=reason)
    if platform.device.type != "meta":  # which has no TransformerEngine, and computes nothing
        choices = resolve(recipe, target)
        require(choices)
        _require_environment(choices, target)
        reason += _missing(recipe, target, choices)
    return implementation, reason, target


def detected(plan: Plan, platform: Platform, *, transformer_engine: bool, reason: str) -> SpeedTarget:
    """What this rank has for the features of `speed`; without data, what the planned device has.

    Args:
        transformer_engine, reason: the layers, and why.
    """
    kind = plan.device if platform.device.type == "meta" else platform.device.type
    device: Literal["cpu", "cuda"] = "cpu" if kind == "cpu" else "cuda"
    return replace(
        plan.target,
        device=device,
        transformer_engine=transformer_engine,
        layers_reason=reason,
        version=transformer_engine_version(),
        no_compiler=None if platform.device.type == "meta" else compiler_obstacle(device),
        no_deep_ep=deep_ep_obstacle(plan.recipe.layout.moe_flex_dispatcher_backend == "hybridep"),
        **_gpu(platform),
    )


def _gpu(platform: Platform) -> dict[str, Any]:
    """What this rank's GPU and torch can do; nothing without one."""
    if platform.device.type != "cuda":
        return {}
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return {"capability": torch.cuda.get_device_capability(platform.device), "cuda": (int(major), int(minor))}


def _missing(recipe: Recipe, target: SpeedTarget, choices: Sequence[FeatureChoice]) -> str:
    """Features that the plan counts on and this machine's software lacks, as the end of a sentence."""
    planned = resolve(recipe, replace(target, version=None, no_compiler=None, no_deep_ep=None))
    lacking = [now for wanted, now in zip(planned, choices, strict=True) if wanted.on and not now.on]
    return "".join(f"; {choice.key} is off: {choice.reason}" for choice in lacking)


ATTENTION_KERNELS = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}
"""Variables by which megatron-core tells TransformerEngine what it may choose."""


def _require_environment(choices: Sequence[FeatureChoice], target: SpeedTarget) -> None:
    """Refuse variables of the user that contradict the recipe: megatron-core asserts that they do not."""
    backend = value(choices, "attention_backend") or "auto"
    for variable, kernel in ATTENTION_KERNELS.items():
        wanted = str(int(backend in ("auto", kernel)))
        if os.environ.get(variable, wanted) != wanted:
            raise UserError(
                f"{os.environ[variable]} with layout.attention_backend {backend}",
                where=variable,
                rule="megatron-core sets it from layout.attention_backend",
                fix=f"unset {variable}, and layout.attention_backend=flash, fused or unfused",
            )
    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    if value(choices, "deterministic_mode") and target.transformer_engine and os.environ.get(name) != "0":
        raise UserError(
            f"{os.environ.get(name, 'not set')} with layout.deterministic_mode",
            where=name,
            rule="TransformerEngine reads it when it is imported; llmrecipes train and submit set it",
            fix=f"{name}=0 in the environment of the ranks",
        )


def deep_ep_obstacle(hybrid: bool) -> str | None:
    """Why megatron-core cannot use DeepEP, or its branch HybridEP; None if it can."""
    name, there = ("HybridEP", fused_a2a.HAVE_HYBRIDEP) if hybrid else ("DeepEP", fused_a2a.HAVE_DEEP_EP)
    if there:
        return None
    return (
        f"{name} is not installed (package deep_ep); the CUDA image does not have it: add it to docker/Dockerfile.cuda"
    )


def loss_chunk_tokens(plan: Plan, *, compiled: bool) -> int:
    """Tokens of a chunk of the loss: as planned, or smaller where the plan counts on compiled kernels that this rank
    cannot have, without which logits take six times the memory."""
    if compiled or not plan.cluster.gpus or not in_kernels(plan.recipe, plan.device):
        return plan.loss_chunk_tokens
    recipe = plan.recipe.with_layout(cross_entropy_loss_fusion=False)
    memory = gpu_memory(plan.cluster, plan.layout.world_size)
    return with_chunks(recipe, plan.shape, plan.layout, memory).layout.loss_chunk_tokens or 0


def _chunk(plan: Plan, config: TransformerConfig, implementation: Any, stage: int | None) -> RecipeModel:
    model = plan.recipe.model
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    module = RecipeModel(
        config,
        stack_spec(plan.recipe, config, implementation, stage),
        vocab_size=plan.shape.vocab_size,
        max_sequence_length=plan.shape.max_position_embeddings,
        hybrid_layer_pattern=layer_pattern(plan.recipe),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=last,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,  # megatron-core says int, and computes with any number
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        vp_stage=stage,
    )
    if model.rope_scaling:  # Llama 3's, which `HybridModel` does not pass on
        rotary = module.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, factor=model.rope_scaling_factor)
    if config.rotary_interleaved and (embedding := getattr(module, "rotary_pos_emb", None)) is not None:
        embedding.rotary_interleaved = True  # which it does not pass on either
    _correct(module)
    module.extra = model.extra
    module.label_smoothing = plan.recipe.train.label_smoothing
    module.z_loss_coeff = plan.recipe.train.z_loss_coeff
    module.logits = torch.nn.Identity()
    module.accuracy = TokenAccuracy(model.vocab_size)
    module.chunk_loss(loss_chunk_tokens(plan, compiled=config.cross_entropy_loss_fusion))
    if config.cross_entropy_loss_fusion and last:
        module.compile_loss()
    if plan.recipe.lora is not None:
        insert(module, plan.recipe.lora)
    if plan.recipe.train.freeze:
        freeze(module, plan.recipe)
    if plan.recipe.qat is not None:
        module.fake_quantizer = FakeQuantizer(module, plan.recipe.qat)
    return module


def _correct(module: RecipeModel) -> None:
    """Set attributes of parameters that megatron-core leaves out or sets wrongly."""
    for part in module.modules():
        if isinstance(offset := getattr(part, "softmax_offset", None), torch.nn.Parameter):
            # It leaves out the mark, without which only the first rank's sinks are in the gradient norm.
            set_tensor_model_parallel_attributes(offset, True, 0, 1)
        for expert in part.local_experts if isinstance(part, SequentialMLP) else ():
            if (bias := expert.linear_fc2.bias) is not None:
                # It would be summed over tensor-parallel ranks, which have other experts.
                bias.sequence_parallel = False
                # One rank has all of an expert with a bias, and may add it in place to what it has not reduced.
                expert.linear_fc2.explicit_expert_comm = True
