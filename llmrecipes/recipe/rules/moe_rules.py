"""Rules of mixture of experts, latent attention and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmrecipes.recipe.derived.degrees import divisors
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Model, Recipe

LATENT_YARN = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
               "mscale_all_dim")  # fmt: skip
"""Of which `rope_type: yarn` makes use, with megatron-core's defaults."""
_LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
                *LATENT_YARN)  # fmt: skip
# Keys that megatron-core's latent attention ignores, with their neutral values.
_NOT_LATENT = {"num_query_groups": None, "kv_channels": None, "add_qkv_bias": False, "rotary_percent": 1.0,
               "rope_scaling": False, "rotary_seq_len_interpolation_factor": None,
               "softmax_type": "vanilla"}  # fmt: skip


def experts(recipe: Recipe) -> Iterator[Problem]:
    """Keys of experts are consistent."""
    model = recipe.model
    if model.num_moe_experts is None:
        yield from belongs(model, _moe_keys(), "a mixture of experts", "num_moe_experts")
        return
    if model.moe_router_topk > model.num_moe_experts:
        yield Problem(
            "model.moe_router_topk",
            f"{model.moe_router_topk} of {model.num_moe_experts} experts",
            "moe_router_topk must be at most num_moe_experts",
            f"moe_router_topk {model.num_moe_experts}",
        )
    pattern = model.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        yield Problem(
            "model.moe_layer_freq",
            f"a list of {len(pattern)} for {model.num_layers} layers",
            "a moe_layer_freq list needs one entry per layer",
            f"{model.num_layers} entries, or num_layers {len(pattern)}",
        )
    if model.add_bias_linear:
        yield from _biases(recipe)
    if model.moe_pad_expert_input_to_capacity and model.moe_expert_capacity_factor is None:
        yield Problem(
            "model.moe_pad_expert_input_to_capacity",
            "true without moe_expert_capacity_factor",
            "only used with moe_expert_capacity_factor",
            "moe_expert_capacity_factor 1.25, or moe_pad_expert_input_to_capacity false",
        )
    if model.moe_pad_expert_input_to_capacity and model.moe_expert_capacity_factor and model.num_moe_experts:
        largest = model.num_moe_experts / model.moe_router_topk
        if model.moe_expert_capacity_factor > largest:
            yield Problem(
                "model.moe_expert_capacity_factor",
                f"{model.moe_expert_capacity_factor:g} with moe_pad_expert_input_to_capacity",
                "an expert is padded with other tokens, and num_moe_experts / moe_router_topk has room for all of them",
                f"at most {largest:g}, or moe_pad_expert_input_to_capacity false",
            )
    yield from _router(model)


def _biases(recipe: Recipe) -> Iterator[Problem]:
    """Biases of experts, which each rank of an expert would add."""
    if recipe.model.moe_shared_expert_intermediate_size:
        yield Problem(
            "model.add_bias_linear",
            "true with moe_shared_expert_intermediate_size",
            "megatron-core has no biases in shared experts",
            "add_bias_linear false",
        )
    ranks = recipe.layout.expert_tensor_parallel_size or recipe.layout.tensor_model_parallel_size
    if ranks > 1:
        unset = "" if recipe.layout.expert_tensor_parallel_size else " (unset: tensor_model_parallel_size)"
        yield Problem(
            "layout.expert_tensor_parallel_size",
            f"{ranks}{unset} with biases in experts (add_bias_linear)",
            "megatron-core would add the bias of an expert on each of its ranks",
            "expert_tensor_parallel_size 1",
        )


def _router(model: Model) -> Iterator[Problem]:
    if model.moe_aux_loss_coeff and model.moe_router_load_balancing_type == "none":
        yield Problem(
            "model.moe_aux_loss_coeff",
            f"{model.moe_aux_loss_coeff:g} with moe_router_load_balancing_type none",
            "a coefficient needs an auxiliary loss",
            "moe_router_load_balancing_type aux_loss, or moe_aux_loss_coeff 0",
        )
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        yield Problem(
            "model.moe_router_enable_expert_bias",
            f"true with moe_router_score_function {model.moe_router_score_function}",
            "the expert bias needs sigmoid scores",
            "moe_router_score_function sigmoid",
        )
    if model.moe_router_topk == 1 and model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax:
        yield Problem(
            "model.moe_router_topk",
            "1 with moe_router_pre_softmax false",
            "a softmax over one expert is always 1, so the router would not learn",
            "moe_router_pre_softmax true",
        )
    yield from _groups(model)


def _groups(model: Model) -> Iterator[Problem]:
    groups = model.moe_router_num_groups
    chosen = model.moe_router_group_topk
    number = model.num_moe_experts or 0
    if groups is None or chosen is None:
        return
    if number % groups:
        yield Problem(
            "model.moe_router_num_groups",
            f"{number} experts do not divide evenly into {groups} groups",
            "moe_router_num_groups must divide num_moe_experts",
            f"moe_router_num_groups {divisors(number, groups)}",
        )
    elif chosen > groups:
        yield Problem(
            "model.moe_router_group_topk",
            f"{chosen} of {groups} groups",
            "moe_router_group_topk must be at most moe_router_num_groups",
            f"moe_router_group_topk {groups}",
        )
    elif model.moe_router_topk % chosen or model.moe_router_topk // chosen > number // groups:
        yield Problem(
            "model.moe_router_group_topk",
            f"{chosen} groups of {number // groups} experts for moe_router_topk {model.moe_router_topk}",
            "moe_router_group_topk must divide moe_router_topk, and a group must have at least the quotient of experts",
            f"moe_router_group_topk {divisors(model.moe_router_topk, chosen)}",
        )


def latent_attention(recipe: Recipe) -> Iterator[Problem]:
    """Keys of latent attention need it, and those of other attention exclude it."""
    model = recipe.model
    if not model.multi_latent_attention:
        yield from belongs(model, _LATENT_KEYS, "latent attention", "multi_latent_attention")
        return
    for name, nothing in _NOT_LATENT.items():
        if getattr(model, name) != nothing:
            yield Problem(
                f"model.{name}",
                "set with multi_latent_attention",
                f"latent attention has separate head sizes and does not use {name}",
                f"remove {name}",
            )
    if model.position_embedding_type != "rope":
        yield Problem(
            "model.position_embedding_type",
            f"{model.position_embedding_type} with multi_latent_attention",
            "latent attention needs rotary embeddings; YaRN is selected by rope_type",
            "position_embedding_type rope" + (", rope_type yarn" if model.position_embedding_type == "yarn" else ""),
        )
    if model.rope_type != "yarn":
        yield from belongs(model, LATENT_YARN, "YaRN", "rope_type yarn")
    if model.qk_pos_emb_head_dim % 2:
        yield Problem(
            "model.qk_pos_emb_head_dim",
            f"{model.qk_pos_emb_head_dim} is odd",
            "rotary embeddings rotate pairs of channels",
            f"qk_pos_emb_head_dim {model.qk_pos_emb_head_dim + 1}",
        )


def multi_token_prediction(recipe: Recipe) -> Iterator[Problem]:
    """Multi-token prediction is only used with what megatron-core supports."""
    model, _train = recipe.model, recipe.train
    if model.mtp_num_layers is None:
        yield from belongs(model, ("mtp_loss_scaling_factor",), "multi-token prediction", "mtp_num_layers")
        return
    if model.position_embedding_type == "learned_absolute":
        yield Problem(
            "model.mtp_num_layers",
            f"{model.mtp_num_layers} with position_embedding_type {model.position_embedding_type}",
            "multi-token prediction needs rope: a table of positions would be needed on the last pipeline stage too",
            "position_embedding_type rope, or remove mtp_num_layers",
        )
    if model.share_embeddings_and_output_weights and recipe.layout.pipeline_model_parallel_size > 1:
        yield Problem(
            "model.share_embeddings_and_output_weights",
            "true with mtp_num_layers and pipeline stages",
            "megatron-core cannot save a tied embedding from the stage of multi-token prediction",
            "share_embeddings_and_output_weights false, or pipeline_model_parallel_size 1",
        )
    if recipe.layout.recompute_method == "uniform" and recipe.layout.recompute_num_layers != 1:
        yield Problem(
            "layout.recompute_num_layers",
            f"{recipe.layout.recompute_num_layers} with recompute_method uniform and mtp_num_layers",
            "megatron-core recomputes multi-token prediction layers one at a time, or with block not at all",
            "recompute_num_layers 1, or recompute_method block",
        )


def _moe_keys() -> tuple[str, ...]:
    return tuple(name for name in Model.model_fields if name.startswith("moe_"))


def belongs(model: Model, names: tuple[str, ...], what: str, switch: str) -> Iterator[Problem]:
    """Keys that only have an effect with `switch`, and are set without it."""
    for name in names:
        default: Any = Model.model_fields[name].default
        if getattr(model, name) != default:
            yield Problem(
                f"model.{name}",
                f"set without {switch}",
                f"{name} is only used with {what}",
                f"model.{switch}, or remove {name}",
            )


def dispatcher(recipe: Recipe) -> Iterator[Problem]:
    """What `moe_token_dispatcher_type: flex` needs in megatron-core."""
    model, parallel = recipe.model, recipe.layout
    if not model.num_moe_experts or model.moe_token_dispatcher_type != "flex":  # noqa: S105 - no password
        return
    key = "model.moe_token_dispatcher_type"
    backend = recipe.layout.moe_flex_dispatcher_backend or "deepep"
    tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if parallel.expert_model_parallel_size * tensor == 1:
        yield Problem(key, "flex without expert parallelism", "flex needs expert or expert-tensor parallelism",
                      "alltoall, or expert_model_parallel_size 2")  # fmt: skip
    if backend == "deepep" and model.moe_pad_expert_input_to_capacity:
        yield Problem(key, "flex with moe_pad_expert_input_to_capacity true", "DeepEP does not support padding",
                      "alltoall, or moe_pad_expert_input_to_capacity false")  # fmt: skip
    if model.moe_router_dtype != "fp32":
        yield Problem(key, f"flex with moe_router_dtype {model.moe_router_dtype}",
                      "DeepEP's kernels send scores in fp32",
                      "moe_router_dtype fp32")  # fmt: skip
    if engine_name(recipe) != MEGATRON:
        yield Problem(key, "flex with engine deepspeed", "flex is untested with DeepSpeed's experts", "alltoall")
