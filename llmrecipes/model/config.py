"""recipe -> megatron-core `TransformerConfig`; names map one to one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU (arXiv 2109.08668); megatron-core's is a torch.compile'd function, so it would need a compiler."""
    return F.relu(x).square()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "squared_relu": squared_relu}


def transformer_config(recipe: Recipe, plan: Plan, *, on_gpu: bool, transformer_engine: bool) -> TransformerConfig:
    """megatron-core's configuration of a recipe.

    Args:
        recipe: the resolved recipe.
        plan: its derived sizes.
        on_gpu: create parameters on the GPU and allow its fused kernels.
        transformer_engine: layers are TransformerEngine's, which brings the fused rotary embedding.
    """
    model, train = recipe.model, recipe.train
    dtype = DTYPES[train.precision]
    # megatron-core's fusions are torch.compile'd functions: they need a compiler, so they come with torch_compile.
    fuse = train.torch_compile
    options: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": plan.num_query_groups,
        "kv_channels": plan.kv_channels,
        "ffn_hidden_size": plan.ffn_hidden_size,
        "normalization": model.normalization,
        "layernorm_epsilon": model.layernorm_epsilon,
        "activation_func": ACTIVATIONS[model.activation_func],
        "gated_linear_unit": model.gated_linear_unit,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
        # llmrecipes.model.init fills the parameters.
        "perform_initialization": False,
        "use_cpu_initialization": not on_gpu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": train.precision == "bf16",
        "fp16": train.precision == "fp16",
        # The loss is a mean over the tokens of the global batch, however it was cut into micro-batches and ranks.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": fuse and not transformer_engine and model.activation_func != "squared_relu",
        "bias_dropout_fusion": fuse,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": transformer_engine and model.position_embedding_type == "rope",
        "persist_layer_norm": transformer_engine,
        "recompute_granularity": train.recompute_granularity,
        "recompute_method": train.recompute_method,
        "recompute_num_layers": train.recompute_num_layers,
    }
    return TransformerConfig(**options)
