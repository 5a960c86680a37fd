"""What of a recipe rules each feature of `speed` out: a reason, or None."""

from __future__ import annotations

from llmrecipes.recipe.derived.freezing import frozen_weights
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Recipe


def anything(_recipe: Recipe) -> None:
    return None


def activation(recipe: Recipe) -> str | None:
    model = recipe.model
    if model.activation_func_clamp_value is not None or model.glu_linear_offset:
        return "the kernel of SwiGLU has no activation_func_clamp_value or glu_linear_offset"
    if model.activation_func == "silu" and model.gated_linear_unit:
        return None
    if model.activation_func == "gelu" and not model.gated_linear_unit and model.add_bias_linear:
        return "the MLP of an expert has no fused GELU" if model.num_moe_experts else None
    return (
        "needs SwiGLU (activation_func silu, gated_linear_unit true), or gelu with add_bias_linear and without a gate"
    )


def residual(recipe: Recipe) -> str | None:
    biased = recipe.model.num_moe_experts and recipe.model.add_bias_linear
    return "TransformerEngine's experts have no biases with it" if biased else None


def rotation(recipe: Recipe) -> str | None:
    model = recipe.model
    if model.multi_latent_attention:
        return None if model.rope_type == "yarn" else "the kernel of latent attention needs rope_type yarn"
    return None if model.position_embedding_type == "rope" else "needs position_embedding_type rope"


def megatron(recipe: Recipe) -> str | None:
    return None if engine_name(recipe) == MEGATRON else "only the engine megatron has gradient buffers"


def weight_gradients(recipe: Recipe) -> str | None:
    key = frozen_weights(recipe)
    return f"frozen weights have no gradient ({key})" if key else megatron(recipe)


def own_engine(recipe: Recipe) -> str | None:
    return None if engine_name(recipe) == MEGATRON else "needs the engine megatron"


def buckets(recipe: Recipe) -> str | None:
    if recipe.layout.overlap_grad_reduce:
        return megatron(recipe)
    return "without overlap_grad_reduce there is only one bucket"


def sharded(recipe: Recipe) -> str | None:
    if recipe.layout.use_distributed_optimizer:
        return megatron(recipe)
    return "needs use_distributed_optimizer, whose buckets are padded and scattered"


def interleaved(recipe: Recipe) -> str | None:
    parallel = recipe.layout
    if parallel.overlap_param_gather and parallel.virtual_pipeline_model_parallel_size:
        return None
    return "needs virtual pipeline stages and overlap_param_gather"


def short_gradients(recipe: Recipe) -> str | None:
    if recipe.train.grad_reduce_in_fp32 or recipe.train.precision == "fp32":
        return "gradients are sent in fp32 (grad_reduce_in_fp32, precision)"
    return sharded(recipe)


def experts(recipe: Recipe) -> str | None:
    return None if recipe.model.num_moe_experts else "the model has no experts"


def fused_router(recipe: Recipe) -> str | None:
    if not (reason := experts(recipe)) and recipe.model.moe_router_dtype != "fp32":
        return "the fused router computes in fp32 (moe_router_dtype)"
    return reason


def shared_experts(recipe: Recipe) -> str | None:
    model, _train = recipe.model, recipe.train
    if not model.num_moe_experts or not model.moe_shared_expert_intermediate_size:
        return "the model has no shared experts"
    if model.moe_token_dispatcher_type != "alltoall":  # noqa: S105 - no password
        return "needs the dispatcher alltoall, which computes shared experts while it communicates"
    if recipe.lora is not None:
        return "adapters of shared experts communicate themselves (lora)"
    if {"shared_experts", "moe"} & set(recipe.layout.recompute_modules or ()):
        return "shared experts are recomputed (recompute_modules)"
    if recipe.layout.overlap_moe_expert_parallel_comm:
        return "overlap_moe_expert_parallel_comm hides the same communication"
    return None


def flex(recipe: Recipe) -> str | None:
    if recipe.model.num_moe_experts and recipe.model.moe_token_dispatcher_type == "flex":  # noqa: S105 - no password
        return None
    return "only used with moe_token_dispatcher_type flex"


def context(recipe: Recipe) -> str | None:
    parallel = recipe.layout
    model = recipe.model
    kind = recipe.layout.cp_comm_type
    size = parallel.context_parallel_size
    tensor = parallel.tensor_model_parallel_size
    if size == 1:
        return "context_parallel_size is 1"
    if kind is None or kind == "p2p":
        return None
    if model.multi_latent_attention:
        return "latent attention supports p2p only: its keys and values differ in width"
    sizes = recipe.layout.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p":
        if sizes is None:
            return "a2a+p2p needs hierarchical_context_parallel_sizes"
        size = sizes[0]
    heads = shape(model).num_query_groups // tensor
    if kind != "all_gather" and heads % size:
        return f"{heads} query groups of a tensor-parallel rank do not divide evenly over {size} ranks exchanging heads"
    return None


def hierarchy(recipe: Recipe) -> str | None:
    sizes = recipe.layout.hierarchical_context_parallel_sizes
    if recipe.layout.cp_comm_type != "a2a+p2p":
        return "only used with cp_comm_type a2a+p2p"
    if sizes is not None and sizes[0] * sizes[1] != recipe.layout.context_parallel_size:
        return f"their product must be context_parallel_size {recipe.layout.context_parallel_size}"
    return None


def collections(recipe: Recipe) -> str | None:
    return "manual_gc is off" if recipe.layout.manual_gc is False else None
