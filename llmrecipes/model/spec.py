"""Which layer implementation a run uses: TransformerEngine's modules, or megatron-core's own with our attention."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from llmrecipes.errors import UserError
from llmrecipes.model.attention import SdpaCoreAttention
from llmrecipes.model.norm import TorchNorm

Implementation = Literal["transformer_engine", "local"]

MINIMUM_CAPABILITY = (8, 0)  # TransformerEngine's fused attention needs Ampere


def choose(requested: str) -> tuple[Implementation, str]:
    """The implementation that `model.transformer_impl` comes to on this machine, and why.

    Args:
        requested: `auto`, `local` or `transformer_engine`.

    Raises:
        UserError: TransformerEngine is asked for by name and cannot run here.
    """
    if requested == "local":
        return "local", "the recipe asks for it"
    obstacle = _transformer_engine_obstacle()
    if obstacle is None:
        return "transformer_engine", "installed, and the GPU supports it"
    if requested == "transformer_engine":
        raise UserError(
            f"model.transformer_impl: transformer_engine cannot run here: {obstacle}",
            rule="an implementation asked for by name is never swapped for another",
            fix="model.transformer_impl=auto, or a GPU image that has TransformerEngine",
        )
    return "local", obstacle


def _transformer_engine_obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() < MINIMUM_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0"
    if importlib.util.find_spec("transformer_engine") is None:
        return "TransformerEngine is not installed"
    return None


def layer_spec(implementation: Implementation, *, normalization: str, qk_layernorm: bool) -> ModuleSpec:
    """Specification of one transformer layer."""
    if implementation == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
    spec = get_gpt_layer_local_spec(normalization=normalization, qk_layernorm=qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = TorchNorm
    layer.pre_mlp_layernorm = TorchNorm
    attention = layer.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, TorchNorm)
    return spec


def block_spec(
    implementation: Implementation, *, num_layers: int, normalization: str, qk_layernorm: bool
) -> TransformerBlockSubmodules | ModuleSpec:
    """Specification of the layers of one pipeline stage."""
    spec = layer_spec(implementation, normalization=normalization, qk_layernorm=qk_layernorm)
    if implementation == "transformer_engine":
        return spec
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=TorchNorm)
