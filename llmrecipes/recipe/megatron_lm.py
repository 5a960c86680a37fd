"""What the arguments of a Megatron-LM training say of its model, against a recipe.

Names are those of `megatron/training/arguments.py`, of megatron-core 0.19 and before. An argument that a version does
not have is not compared; whether the weights have the recipe's shapes is checked besides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.shape import shape

Arguments = Mapping[str, Any]

_SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "normalization", "add_bias_linear", "qk_layernorm",
    "multi_latent_attention",
)  # fmt: skip
"""Arguments with the name and the meaning of the recipe's key."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_EXPERTS = (
    "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
)  # fmt: skip
_ROTARY = ("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor")
_MUP = (
    "use_mup", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim",
    "mup_attn_scale_power",
)  # fmt: skip
_FIXED: Mapping[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "window_size": None,
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "is_hybrid_model": False,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "openai_gelu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "mtp_use_repeated_layer": False,
}
"""Arguments that change the model and are not a recipe key, with the value that recipes imply."""


def check(arguments: Arguments, recipe: Recipe) -> Iterator[Problem]:
    """Keys of the recipe that describe another model than the arguments, with both values."""
    for key, name, theirs, ours in _compared(arguments, recipe.model):
        if not _equal(theirs, ours):
            yield Problem(
                f"model.{key}",
                f"{_shown(ours)} in the recipe, {name} {_shown(theirs)} in the checkpoint",
                "the recipe describes the model that was trained",
                f"model.{key}={_shown(theirs)}",
            )
    yield from _vocabulary(arguments, recipe.model)
    for name, needed in _FIXED.items():
        if name in arguments and not _equal(arguments[name], needed):
            yield Problem(
                name,
                f"{_shown(arguments[name])} in the checkpoint",
                f"recipes have {name} {_shown(needed)}",
            )


def notes(arguments: Arguments, recipe: Recipe) -> Iterator[str]:
    """What differs without being refused, a sentence each."""
    if not arguments:
        yield "the checkpoint has no arguments: only names and shapes of its weights were compared with the recipe"
    if recipe.data.tokenizer.type == "bpe":
        yield "data.tokenizer.type bpe trains a new tokenizer: token ids mean something else than they did"
    plain = recipe.model.activation_func == "gelu" and not recipe.model.gated_linear_unit
    if plain and arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear"):
        yield "its GELU was the tanh approximation (bias_gelu_fusion); the recipe's is exact"
    kind = next((name for name in ("bf16", "fp16") if arguments.get(name)), "fp32") if "bf16" in arguments else ""
    if kind and kind != recipe.train.precision:
        yield f"its weights were trained in {kind}; they are converted to {recipe.train.precision}"


def _compared(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    """(key, argument, its value, the recipe's value), with what both leave unset derived."""
    sizes = shape(model)
    for name in _SAME:
        if name in arguments:
            yield name, name, arguments[name], getattr(model, name)
    for name in _MUP if arguments.get("use_mup") or model.use_mup else ():
        if name in arguments:
            yield name, name, arguments[name], getattr(model, name)
    yield from _given(arguments, "ffn_hidden_size", "ffn_hidden_size", sizes.ffn_hidden_size)
    yield from _attention(arguments, model)
    yield from _positions(arguments, model)
    for name in ("norm_epsilon", "layernorm_epsilon"):
        yield from _given(arguments, "layernorm_epsilon", name, model.layernorm_epsilon)
    yield from _activation(arguments, model)
    if "untie_embeddings_and_output_weights" in arguments:
        name = "share_embeddings_and_output_weights"
        theirs = not arguments["untie_embeddings_and_output_weights"]
        yield name, "not untie_embeddings_and_output_weights:", theirs, model.share_embeddings_and_output_weights
    if "num_experts" in arguments:
        yield "num_moe_experts", "num_experts", arguments["num_experts"], model.num_moe_experts
    if model.num_moe_experts and arguments.get("num_experts"):
        yield from _experts(arguments, model)
    if "mtp_num_layers" in arguments:
        yield "mtp_num_layers", "mtp_num_layers", arguments["mtp_num_layers"] or None, model.mtp_num_layers


def _given(arguments: Arguments, key: str, name: str, ours: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """An argument that is unset where it is derived as here."""
    if arguments.get(name) is not None:
        yield key, name, arguments[name], ours


def _attention(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    sizes = shape(model)
    if "add_qkv_bias" in arguments and not model.add_bias_linear:
        yield "add_qkv_bias", "add_qkv_bias", arguments["add_qkv_bias"], model.add_qkv_bias
    if model.multi_latent_attention:
        for name in _LATENT:
            if name in arguments:
                yield name, name, arguments[name], getattr(model, name)
        if "rope_type" in arguments:
            yield "multi_latent_attention", "rope_type", arguments["rope_type"], "rope"
        return
    yield from _given(arguments, "kv_channels", "kv_channels", sizes.kv_channels)
    if "group_query_attention" in arguments:
        groups = arguments.get("num_query_groups" if arguments["group_query_attention"] else "num_attention_heads")
        yield "num_query_groups", "num_query_groups", groups, sizes.num_query_groups


def _positions(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    kind = "rope" if arguments.get("use_rotary_position_embeddings") else arguments.get("position_embedding_type")
    if kind is not None:
        yield "position_embedding_type", "position_embedding_type", kind, model.position_embedding_type
    if model.position_embedding_type == "learned_absolute":
        ours = shape(model).max_position_embeddings
        yield from _given(arguments, "max_position_embeddings", "max_position_embeddings", ours)
        return
    for name in _ROTARY:
        yield from _given(arguments, name, name, getattr(model, name))
    if "use_rope_scaling" in arguments:
        yield "rope_scaling", "use_rope_scaling", arguments["use_rope_scaling"], model.rope_scaling
        if model.rope_scaling:
            yield from _given(arguments, "rope_scaling_factor", "rope_scaling_factor", model.rope_scaling_factor)


def _activation(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    if "swiglu" not in arguments:
        return
    kind = next((name for name in ("swiglu", "squared_relu") if arguments.get(name)), "gelu")
    theirs = "silu" if kind == "swiglu" else kind
    yield "activation_func", f"{kind}:", theirs, model.activation_func
    yield "gated_linear_unit", "swiglu", bool(arguments["swiglu"]), model.gated_linear_unit


def _experts(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    sizes = shape(model)
    for name in _EXPERTS:
        if name in arguments:
            yield name, name, arguments[name], getattr(model, name)
    yield from _given(arguments, "moe_ffn_hidden_size", "moe_ffn_hidden_size", sizes.moe_ffn_hidden_size)
    name = "moe_shared_expert_intermediate_size"
    if name in arguments:
        yield name, name, arguments[name] or None, model.moe_shared_expert_intermediate_size
    if "moe_layer_freq" in arguments:
        theirs, ours = arguments["moe_layer_freq"], sizes.moe_pattern
        same = _pattern(theirs, sizes.num_layers) == _pattern(ours, sizes.num_layers)
        yield "moe_layer_freq", "moe_layer_freq", theirs, theirs if same else ours


def _pattern(frequency: Any, layers: int) -> list[Any]:
    """Which layers have experts."""
    if isinstance(frequency, int) and frequency > 0:
        return [int(layer % frequency == 0) for layer in range(layers)]
    return list(frequency) if isinstance(frequency, list | tuple) else [frequency]


def _vocabulary(arguments: Arguments, model: Model) -> Iterator[Problem]:
    """All tokens of the training are in the recipe's vocabulary, and all of the recipe's have a row."""
    rows, tokens = arguments.get("padded_vocab_size"), arguments.get("vocab_size")
    for name, theirs, fits in (
        ("padded_vocab_size", rows, isinstance(rows, int) and model.vocab_size <= rows),
        ("vocab_size", tokens, isinstance(tokens, int) and model.vocab_size >= tokens),
    ):
        if isinstance(theirs, int) and not fits:
            yield Problem(
                "model.vocab_size",
                f"{model.vocab_size} in the recipe, {name} {theirs} in the checkpoint",
                "a token keeps its row of the embedding: vocab_size ≤ model.vocab_size ≤ padded_vocab_size",
                f"model.vocab_size={tokens or rows}",
            )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one) == bool(other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other)


def _shown(value: Any) -> str:
    """As in a recipe."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
