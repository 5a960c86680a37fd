"""What the arguments of a Megatron-LM training say of its model, against a recipe.

Names are those of `megatron/training/arguments.py`, of megatron-core 0.19 and before. Every key of `Model` has one
account: it is compared, shown by the weights themselves, or says only how a model is trained. A key that is not
compared, because the arguments do not have it or this module does not know it, must have its default: that is what a
version without the argument computes. Whether the weights have the recipe's shapes is checked besides.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llmrecipes.recipe.derived.shape import shape, unrotated
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.rules.moe_rules import LATENT_YARN
from llmrecipes.recipe.schema import TRAINING_ONLY, Model, Recipe

Arguments = Mapping[str, Any]

_SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "normalization", "add_bias_linear", "qk_layernorm",
    "multi_latent_attention", "softmax_type",
)  # fmt: skip
"""Arguments with the name and the meaning of the recipe's key."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_EXPERTS = (
    "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
)  # fmt: skip
_GATE = ("activation_func_clamp_value", "glu_linear_offset")
_ROTARY = ("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor")
_YARN = tuple(name for name in Model.model_fields if name.startswith("yarn_"))
_MUP = (
    "use_mup", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim",
    "mup_attn_scale_power",
)  # fmt: skip
BY_SHAPE = frozenset(
    {
        *_LATENT, "num_layers", "hidden_size", "ffn_hidden_size", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
        "normalization", "gated_linear_unit", "share_embeddings_and_output_weights", "position_embedding_type",
        "max_position_embeddings", "multi_latent_attention", "num_moe_experts", "moe_layer_freq",
        "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "mtp_num_layers", "vocab_size",
    }
)  # fmt: skip
"""Keys of which another value has other weights, or others of their shapes: compared where there is an argument."""
BY_ARGUMENT = frozenset(
    {
        *_ROTARY, *_YARN, *LATENT_YARN, "rope_type", *_MUP, *_EXPERTS, "num_attention_heads", "num_query_groups",
        "kv_channels", "rope_scaling", "rope_scaling_factor", "layernorm_epsilon", "activation_func", "extra",
        "window_size", "window_attn_skip_freq", "no_rope_freq",
        "softmax_type", *_GATE,
    }
)  # fmt: skip
"""Keys that only the arguments show; without an argument, a recipe has the default."""
FIXED: Mapping[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "is_hybrid_model": False,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "openai_gelu": False,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_router_topk_limited_devices": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "mtp_use_repeated_layer": False,
}
"""Arguments that change the model and are not a recipe key, with the value that recipes imply."""


def check(arguments: Arguments, recipe: Recipe) -> Iterator[Problem]:
    """Keys of the recipe that describe another model than the arguments, with both values."""
    seen = set()
    for key, name, theirs, ours in _compared(arguments, recipe.model):
        seen.add(key)
        if not _equal(theirs, ours):
            yield Problem(
                f"model.{key}",
                f"{_shown(ours)} in the recipe, {name} {_shown(theirs)} in the checkpoint",
                "the recipe must describe the checkpoint's model",
                f"model.{key}={_shown(theirs)}",
            )
    yield from _not_compared(arguments, recipe.model, seen)
    yield from _vocabulary(arguments, recipe.model)
    for name, needed in FIXED.items():
        if name in arguments and not _equal(arguments[name], needed):
            yield Problem(
                name,
                f"{_shown(arguments[name])} in the checkpoint",
                f"only {name} {_shown(needed)} is supported",
            )


def _not_compared(arguments: Arguments, model: Model, seen: Collection[str]) -> Iterator[Problem]:
    """Keys with another value than the default that no argument was compared with, if there are arguments at all."""
    known = {*seen, *TRAINING_ONLY, *BY_SHAPE, *_without_effect(model)}
    for key, field in type(model).model_fields.items() if arguments else ():
        default = field.get_default(call_default_factory=True)
        ours = getattr(model, key)
        if key not in known and ours != default:
            yield Problem(
                f"model.{key}",
                f"{_shown(ours)} in the recipe, not in the checkpoint's arguments",
                "keys missing from the arguments must have their default",
                "" if field.is_required() else f"model.{key}={_shown(default)}",
            )


def _without_effect(model: Model) -> Iterator[str]:
    """Keys whose value does not matter in this model."""
    if model.position_embedding_type == "learned_absolute":
        yield from _ROTARY
    if not model.rope_scaling:
        yield "rope_scaling_factor"
    if model.moe_router_score_function != "softmax":
        yield "moe_router_pre_softmax"


def notes(arguments: Arguments, recipe: Recipe) -> Iterator[str]:
    """What differs without being refused, a sentence each."""
    if not arguments:
        yield "the checkpoint has no arguments: only names and shapes of weights were compared with the recipe"
    if recipe.data.tokenizer.type == "bpe":
        yield "data.tokenizer.type bpe trains a new tokenizer, so token ids no longer mean the same"
    plain = recipe.model.activation_func == "gelu" and not recipe.model.gated_linear_unit
    if plain and _approximates(arguments):
        yield (
            "its GELU is the tanh approximation (bias_gelu_fusion), but exact in the recipe; to match it, set "
            "model.activation_func=gelu_tanh"
        )
    kind = next((name for name in ("bf16", "fp16") if arguments.get(name)), "fp32") if "bf16" in arguments else ""
    if kind and kind != recipe.train.precision:
        yield f"its weights are in {kind} and will be converted to {recipe.train.precision}"


def _approximates(arguments: Arguments) -> bool:
    """Whether GELU is the tanh approximation: that of the kernel that adds the bias too."""
    return bool(arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear"))


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
    yield from _windows(arguments, model)
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
        yield from _latent_positions(arguments, model)
        return
    if not arguments:
        return
    heads = model.num_attention_heads
    channels = arguments.get("kv_channels") or model.hidden_size // heads
    yield "kv_channels", "kv_channels", channels, sizes.kv_channels
    grouped = arguments.get("group_query_attention", "num_query_groups" in arguments)
    groups = arguments.get("num_query_groups") if grouped else arguments.get("num_attention_heads", heads)
    yield "num_query_groups", "num_query_groups", groups, sizes.num_query_groups


def _windows(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    theirs = arguments.get("window_size")
    ours = model.window_size
    # Before 0.13 a window could be infinite on both sides, which is none.
    theirs = None if theirs is None or list(theirs) == [-1, -1] else list(theirs)
    if "window_size" in arguments:
        yield "window_size", "window_size", theirs, None if ours is None else list(ours)
    if theirs is not None and ours is not None and "window_attn_skip_freq" in arguments:
        skipped = arguments["window_attn_skip_freq"]
        same = _kinds(skipped, model.num_layers) == [int(windowed) for windowed in shape(model).windowed]
        yield (
            "window_attn_skip_freq",
            "window_attn_skip_freq",
            skipped,
            skipped if same else model.window_attn_skip_freq,
        )


def _kinds(skipped: Any, layers: int) -> list[Any]:
    """Which layers have the window."""
    if isinstance(skipped, int) and skipped > 0:
        return [int((layer + 1) % skipped != 0) for layer in range(layers)]
    return [1] * layers if skipped is None else list(skipped) if isinstance(skipped, list | tuple) else [skipped]


def _left_out(layers: Any, number: int) -> list[Any]:
    """Which layers have no rotation; megatron-core has replaced a number by a list."""
    if isinstance(layers, int) and layers > 0:
        return [int((layer + 1) % layers == 0) for layer in range(number)]
    return [0] * number if layers is None else list(layers) if isinstance(layers, list | tuple) else [layers]


def _latent_positions(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    if "rope_type" not in arguments:
        return
    # An argument that is unset, or that a version does not have, is the default of megatron-core's configuration.
    kind = arguments["rope_type"] or "yarn"
    yield "rope_type", "rope_type", kind, model.rope_type
    if kind == model.rope_type == "yarn":
        for name in LATENT_YARN:
            yield name, name, arguments.get(name, Model.model_fields[name].default), getattr(model, name)
    elif kind == "rope" and arguments.get("rotary_scaling_factor", 1.0) > 1:
        # It scales the scores whatever the rotation is.
        yield "mscale_all_dim", "mscale_all_dim", arguments.get("mscale_all_dim", 0.0), 0.0


def _positions(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    kind = "rope" if arguments.get("use_rotary_position_embeddings") else arguments.get("position_embedding_type")
    if kind is not None:
        yield "position_embedding_type", "position_embedding_type", kind, model.position_embedding_type
    if model.position_embedding_type == "learned_absolute":
        ours = shape(model).max_position_embeddings
        yield from _given(arguments, "max_position_embeddings", "max_position_embeddings", ours)
        return
    if "no_rope_freq" in arguments:
        theirs = arguments["no_rope_freq"]
        listed = [int(left_out) for left_out in unrotated(model)]
        same = _left_out(theirs, model.num_layers) == listed
        yield "no_rope_freq", "no_rope_freq", theirs, theirs if same else model.no_rope_freq
    for name in (*_ROTARY, *(_YARN if model.position_embedding_type == "yarn" else ())):
        yield from _given(arguments, name, name, getattr(model, name))
    if "use_rope_scaling" in arguments:
        yield "rope_scaling", "use_rope_scaling", arguments["use_rope_scaling"], model.rope_scaling
        if model.rope_scaling:
            yield from _given(arguments, "rope_scaling_factor", "rope_scaling_factor", model.rope_scaling_factor)


def _activation(arguments: Arguments, model: Model) -> Iterator[tuple[str, str, Any, Any]]:
    if "swiglu" not in arguments:
        return
    kind = next((name for name in ("swiglu", "quick_geglu", "squared_relu") if arguments.get(name)), "gelu")
    theirs = {"swiglu": "silu", "quick_geglu": "quick_gelu"}.get(kind, kind)
    if theirs == "gelu" and model.activation_func == "gelu_tanh" and _approximates(arguments):
        theirs = "gelu_tanh"
    yield "activation_func", f"{kind}:", theirs, model.activation_func
    yield "gated_linear_unit", f"{kind}:", kind in ("swiglu", "quick_geglu"), model.gated_linear_unit
    for name in _GATE:
        if name in arguments:
            yield name, name, arguments[name], getattr(model, name)


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
        theirs = arguments["moe_layer_freq"]
        ours = sizes.moe_pattern
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
                "tokens must keep their rows of the embedding: vocab_size ≤ model.vocab_size ≤ padded_vocab_size",
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
