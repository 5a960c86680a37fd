"""Which layer implementation a run uses: TransformerEngine's modules, or megatron-core's own with our attention, norm
and latent attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import batched
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from llmrecipes.engine.core.model.attention import SdpaCoreAttention
from llmrecipes.engine.core.model.dropout import another_use
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import transformer_engine_obstacle
from llmrecipes.plan.layout import local_layers_reason, only_in_local_layers
from llmrecipes.recipe.derived.layer_pattern import CUT, PREDICTION, layer_pattern
from llmrecipes.recipe.derived.weight_names import FUSED_NORMS
from llmrecipes.recipe.schema import Recipe

Implementation = Literal["transformer_engine", "local"]

MINIMUM_CAPABILITY = (8, 0)  # TransformerEngine's fused attention needs Ampere


def choose(recipe: Recipe) -> tuple[Implementation, str]:
    """The implementation that `model.transformer_impl` selects on this machine, and why.

    Raises:
        UserError: TransformerEngine is requested by name but cannot run here.
    """
    by_name = recipe.model.transformer_impl == "transformer_engine"
    if recipe.model.transformer_impl == "local":
        return "local", "requested by the recipe"
    if reason := only_in_local_layers(recipe):  # whose rules refuse the other by name
        return "local", reason
    obstacle = _transformer_engine_obstacle()
    if obstacle is None and not by_name and (reason := local_layers_reason(recipe)):
        return "local", reason
    if obstacle is None:
        rounded = "; it multiplies fp32 in TF32" if recipe.train.precision == "fp32" else ""
        return "transformer_engine", f"installed, and the GPU supports it{rounded}"
    if by_name:
        raise UserError(
            f"transformer_engine cannot run here: {obstacle}",
            where="model.transformer_impl",
            rule="an implementation that is requested by name is never replaced",
            fix="model.transformer_impl=auto, or a GPU image that has TransformerEngine",
        )
    return "local", obstacle


def _transformer_engine_obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() < MINIMUM_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0"
    return transformer_engine_obstacle()


@dataclass(frozen=True)
class StackParts:
    """What the layers of a model are built from; megatron-core's `HybridModel` reads `mtp_block_spec`."""

    kinds: dict[str, ModuleSpec]
    """A transformer layer by its two symbols in the pattern."""
    layer_norm: Any
    """Of the last layer's output."""
    mtp_block_spec: MultiTokenPredictionBlockSubmodules | None
    """Of multi-token prediction (arXiv 2412.19437, section 2.2), on the chunk with it."""


class TransformerStack(TransformerBlock):
    """The layers of one chunk as the pattern of a `HybridModel` says, two symbols a transformer layer.

    megatron-core's `HybridStack` makes a layer of each symbol, which gives every weight another name, and its last norm
    is TransformerEngine's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: StackParts,
        *,
        layer_type_list: list[str],
        pre_process: bool,
        post_process: bool,
        pg_collection: Any,
        vp_stage: int | None,
        **_unused: Any,
    ) -> None:
        """
        Args:
            config: megatron-core's configuration of the model.
            submodules: what the layers are built from.
            layer_type_list: symbols of this chunk.
            pre_process, post_process, pg_collection, vp_stage: as megatron-core's `TransformerBlock`.
        """
        layers = [submodules.kinds[pair] for pair in _pairs("".join(layer_type_list))]
        super().__init__(
            config,
            TransformerBlockSubmodules(layers, submodules.layer_norm),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )


class PredictionLayer(MultiTokenPredictionLayer):
    """megatron-core's, with one transformer layer inside instead of a stack of one layer a symbol."""

    def __init__(self, *args: Any, mtp_layer_pattern: str | None = None, hybrid_submodules: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)

    def _get_embeddings(self, *args: Any, embedding: Any, **kwargs: Any) -> Any:
        with another_use(embedding.embedding_dropout, f"prediction {self.layer_number} embedding"):
            return super()._get_embeddings(*args, embedding=embedding, **kwargs)


def stack_spec(
    recipe: Recipe, config: TransformerConfig, implementation: Implementation, vp_stage: int | None
) -> ModuleSpec:
    """Specification of the layers of one model chunk of this pipeline stage.

    Args:
        recipe: whose layers they are.
        config: megatron-core's configuration of it.
        implementation: see `choose`.
        vp_stage: index of the chunk, with virtual pipeline stages.
    """
    by_transformer_engine = implementation == "transformer_engine"
    layers = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=by_transformer_engine, normalization=config.normalization
    )
    decoder = layer_pattern(recipe).split(PREDICTION)[0].replace(CUT, "")
    kinds = dict(zip(_pairs(decoder), layers, strict=True))
    _replace(kinds.values(), config, implementation)
    norm = TENorm if by_transformer_engine else TorchNorm
    prediction = _mtp_spec(config, layers[-1], implementation, vp_stage)
    return ModuleSpec(TransformerStack, {"vp_stage": vp_stage}, StackParts(kinds, norm, prediction))


def _pairs(pattern: str) -> list[str]:
    return ["".join(pair) for pair in batched(pattern, 2)]


def _mtp_spec(
    config: TransformerConfig, layer: ModuleSpec, implementation: Implementation, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Specification of the multi-token prediction layers; their transformer layer is the decoder's last one."""
    if not config.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(
        config, layer, use_transformer_engine=implementation == "transformer_engine", vp_stage=vp_stage
    )
    for each in spec.layer_specs if spec is not None else ():
        each.module = PredictionLayer
        if implementation == "local":
            for name in ("enorm", "hnorm", "layer_norm"):
                setattr(each.submodules, name, TorchNorm)
    return spec


def _replace(layers: Iterable[ModuleSpec], config: TransformerConfig, implementation: Implementation) -> None:
    """Replace parts of layers by ours."""
    for layer in layers:
        _use_our_queries(layer, config)
        if implementation == "local":
            _use_ours(layer)


def _use_our_queries(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Give queries that are projected at once no norm: in every version and implementation, it is the same model."""
    attention = layer.submodules.self_attention
    if attention.module is MLASelfAttention and config.q_lora_rank is None:
        attention.module = PlainQueries
        attention.submodules.q_layernorm = IdentityOp


def _use_ours(layer: ModuleSpec) -> None:
    """Replace norms and core attention of megatron-core's local layer by ours."""
    parts = layer.submodules
    parts.input_layernorm = TorchNorm
    parts.pre_mlp_layernorm = TorchNorm
    if issubclass(parts.self_attention.module, MLASelfAttention):
        # Checkpoints have the names of TransformerEngine's layers, so that either kind can load them; megatron-core has
        # this map for its other attention only. The norm of the attention's input is not fused there.
        parts.sharded_state_dict_keys_map = {
            f"{norm}.": f"{linear}.layer_norm_" for linear, norm in FUSED_NORMS.items() if norm != "input_layernorm"
        }
    if getattr(parts.mlp, "func", None) is MoELayer:
        # TransformerEngine fuses this norm into dense MLPs only; its name in checkpoints is the same in both.
        parts.sharded_state_dict_keys_map = {
            name: other
            for name, other in parts.sharded_state_dict_keys_map.items()
            if not name.startswith("pre_mlp_layernorm")
        }
    if issubclass(parts.self_attention.module, MLASelfAttention):
        parts.self_attention.module = LatentAttention
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, None) not in (None, IdentityOp):
            setattr(attention, name, TorchNorm)


class TorchNorm:
    """Builds the norm of `config.normalization`.

    megatron-core's own wrapper refuses sequence parallelism; here the weights are marked for it, so that their
    gradients are reduced over the tensor-parallel group like those of the fused norms.
    """

    # A class, because megatron-core passes functions of a specification on instead of calling them.
    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> Any:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class PlainQueries(MLASelfAttention):
    """megatron-core's, whose queries have no norm unless they are compressed (`q_lora_rank`).

    With `qk_layernorm` megatron-core requires one in front of an uncompressed projection, which only TransformerEngine
    has; DeepSeek-V2-Lite (arXiv 2405.04434, appendix B) has none.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The modules as the specification names them."""
        if self.config.q_lora_rank is not None:
            resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
            return resolved
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


class LatentAttention(PlainQueries):
    """megatron-core's, for layers without TransformerEngine.

    Every rank uses the rotated key that all heads share (arXiv 2405.04434, section 2.1) for its own heads.
    megatron-core gathers it from the ranks' parts of the down-projection, and in the backward pass only slices each
    rank's part of the gradient: contributions of other ranks' heads are lost. Here they are summed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._whole)

    def _whole(self, _module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
        """The down-projection as of an unsplit layer: [s / TP under sequence parallelism, b, full width].

        megatron-core accepts that, and under sequence parallelism gathers the shared key over the sequence, where it
        does sum the gradient.
        """
        share, bias = output
        whole = gather_from_tensor_model_parallel_region(share)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole), bias
        latent, key = whole.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        if key.requires_grad:
            key.register_hook(_summed)
        return torch.cat([latent, key], dim=-1), bias


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    # megatron-core's copy_to_tensor_model_parallel_region returns a non-contiguous gradient unreduced.
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total
