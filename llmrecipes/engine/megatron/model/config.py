"""recipe -> megatron-core `TransformerConfig`; names map one to one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU (arXiv 2109.08668); megatron-core's is a torch.compile'd function, so it would need a compiler."""
    return F.relu(x).square()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "squared_relu": squared_relu}


SAME_NAME_MODEL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "normalization",
    "layernorm_epsilon",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
)
SAME_NAME_PARALLELISM = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
SAME_NAME_MOE = (
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_dtype",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_token_dispatcher_type",
)
SAME_NAME_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


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
        **{name: getattr(model, name) for name in SAME_NAME_MODEL},
        **{name: getattr(recipe.parallelism, name) for name in SAME_NAME_PARALLELISM},
        "num_query_groups": plan.shape.num_query_groups,
        "kv_channels": plan.shape.kv_channels,
        "ffn_hidden_size": plan.shape.ffn_hidden_size,
        "activation_func": ACTIVATIONS[model.activation_func],
        # `init` fills the parameters. They are still "initialised", because megatron-core marks the sharded ones only
        # then, and its gradient norm counts on the mark.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": not on_gpu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": train.precision == "bf16",
        "fp16": train.precision == "fp16",
        # Two stages with several chunks each send to each other in both directions at once; batched messages between
        # one pair of ranks would be taken for one another.
        "overlap_p2p_comm": recipe.parallelism.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": recipe.parallelism.virtual_pipeline_model_parallel_size is None,
        # The loss is a mean over the tokens of the global batch, however it was cut into micro-batches and ranks.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": fuse and not transformer_engine and model.activation_func != "squared_relu",
        "bias_dropout_fusion": fuse,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": transformer_engine
        and model.position_embedding_type == "rope"
        and not model.multi_latent_attention,
        "persist_layer_norm": transformer_engine,
        "recompute_granularity": train.recompute_granularity,
        "recompute_method": train.recompute_method,
        "recompute_num_layers": train.recompute_num_layers,
        "mtp_num_layers": model.mtp_num_layers,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
    }
    if model.num_moe_experts:
        options |= {name: getattr(model, name) for name in SAME_NAME_MOE}
        options |= _balance_coefficients(recipe, plan)
        options["moe_grouped_gemm"] = transformer_engine
    if not model.multi_latent_attention:
        return TransformerConfig(**options)
    options |= {name: getattr(model, name) for name in SAME_NAME_MLA}
    options |= {"multi_latent_attention": True, "rope_type": "rope", "rotary_base": model.rotary_base}
    return MLATransformerConfig(**options)


def _balance_coefficients(recipe: Recipe, plan: Plan) -> dict[str, float | None]:
    """Coefficients of the routers' losses that make them weigh the same in every layout.

    Each rank adds its part of such a loss, times a number of tokens, to a sum that is divided by the tokens of the
    global batch. The parts make up one loss, so that number has to be the tokens of all ranks that share it. 0.16
    takes those of one rank, and of one sequence where the loss is per sequence; 0.19 takes those of the tensor- and
    context-parallel ranks, which is right but for the loss that data-parallel ranks share too.
    """
    model, parallel = recipe.model, recipe.parallelism
    kind, auxiliary, z_loss = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, model.moe_z_loss_coeff
    if kind == "global_aux_loss":
        auxiliary *= plan.layout.data_parallel_size
    if (MAJOR, MINOR) < (0, 19):
        ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        auxiliary *= ranks * (recipe.train.micro_batch_size if kind == "seq_aux_loss" else 1)
        z_loss = None if z_loss is None else z_loss * ranks
    return {"moe_aux_loss_coeff": auxiliary, "moe_z_loss_coeff": z_loss}


def _leave(_weight: torch.Tensor) -> None: ...
