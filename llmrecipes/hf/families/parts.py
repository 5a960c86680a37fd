"""What the tables of several families have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmrecipes.hf.table import ACTIVATIONS, GATE_UP, QKV, SAME, VOCABULARY, Config, Key, To, Transform, Unsupported
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.rules.moe_rules import LATENT_YARN
from llmrecipes.recipe.schema import TRAINING_ONLY, Model

LAYER = "decoder.layers.*."
LAYERS = "model.layers.*."
EXPERT = "mlp.experts.local_experts.*."

EVERY: dict[str, Any] = {"use_mup": False, "mtp_num_layers": None}
"""No family has these."""
DENSE: dict[str, Any] = {**EVERY, "num_moe_experts": None, "multi_latent_attention": False}
ROTARY: dict[str, Any] = {
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
LLAMA: dict[str, Any] = {
    **DENSE,
    **ROTARY,
    "gated_linear_unit": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
}

_LATENT_SIZES = frozenset({"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"})
LATENT = _LATENT_SIZES | {"rope_type", *LATENT_YARN}
"""Keys of latent attention, with those of its rotation."""
YARN = frozenset(key for key in Model.model_fields if key.startswith("yarn_"))
"""Keys of YaRN of other attention."""
_MUP = frozenset(key for key in Model.model_fields if key.startswith("mup_"))
UNSUPPORTED = _MUP | {
    "extra", "no_rope_freq", "softmax_type", "activation_func_clamp_value", "glu_linear_offset",
}  # fmt: skip
"""Keys that no family has, or a single one: `default_only` of all others."""
EXPERT_KEYS = frozenset(key for key in Model.model_fields if key.startswith("moe_"))
"""Keys of experts, which have no effect without `num_moe_experts`: rules refuse another value than the default."""
FREE = TRAINING_ONLY - {"attention_dropout", "init_method_std"} - EXPERT_KEYS
"""Training-only keys of a dense model that config.json does not have."""
FREE_EXPERTS = FREE | TRAINING_ONLY & EXPERT_KEYS

SIZES = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "hidden_size"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("hidden_act", "activation_func", ACTIVATIONS),
    Key("max_position_embeddings", "max_position_embeddings"),
    Key("initializer_range", "init_method_std"),
    Key("attention_dropout", "attention_dropout"),
    Key("tie_word_embeddings", "share_embeddings_and_output_weights"),
)
"""Keys of every family after Llama."""


class Heads:
    """Key and value heads, and channels of a head: unset in many files.

    Args:
        free: whether a head may have other channels than its share of the width.
    """

    theirs = ("num_key_value_heads", "head_dim")
    ours = ("num_query_groups", "kv_channels")

    def __init__(self, *, free: bool = True) -> None:
        self._free = free

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        share = model.hidden_size / model.num_attention_heads
        channels = model.kv_channels or int(share)
        config = {"num_key_value_heads": model.num_query_groups or model.num_attention_heads}
        if self._free:
            config["head_dim"] = channels
        rule = "a head has hidden_size / num_attention_heads channels"
        return config, [] if self._free or channels == share else [Unsupported("model.kv_channels", channels, rule)]

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        heads = config["num_attention_heads"]
        hidden = config["hidden_size"]
        groups = config["num_key_value_heads"]
        channels = config.get("head_dim") or hidden // heads  # some families have no such key
        # Unset where a recipe would leave it out.
        return {
            **({} if groups == heads else {"num_query_groups": groups}),
            **({} if channels * heads == hidden else {"kv_channels": channels}),
        }, []


SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of Llama 3.1's rotary embeddings: what megatron-core computes with, besides the factor."""


class Window:
    """Sliding windows: with one of w tokens, token i attends to tokens i - w + 1 to i, itself included.

    Args:
        by_layer: whether `layer_types` says which layers have it; else all have, or none.
        said: write `sliding_window: null` where there is none.
        switch: whether the window is used only with `use_sliding_window: true`, as in Qwen's files.
    """

    theirs = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    ours = ("window_size", "window_attn_skip_freq")

    def __init__(self, *, by_layer: bool = False, said: bool = False, switch: bool = False) -> None:
        self._by_layer = by_layer
        self._said = said
        self._switch = switch

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        sizes = shape(model)
        kinds = {"layer_types": [_SLIDING if windowed else _FULL for windowed in sizes.windowed]}
        config: dict[str, Any] = kinds if self._by_layer and (self._said or sizes.window) else {}
        if sizes.window is None:
            config |= {"sliding_window": None} if self._said else {}
            return config | ({"use_sliding_window": False} if self._switch else {}), []
        problems = []
        if not self._by_layer and not all(sizes.windowed):
            rule = "all layers of a model of this type have the window"
            problems.append(Unsupported("model.window_attn_skip_freq", model.window_attn_skip_freq, rule))
        config |= {"sliding_window": sizes.window}
        if self._switch:
            config |= {"use_sliding_window": True, "max_window_layers": sizes.windowed.index(True)}
        return config, problems

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        kinds = config.get("layer_types") or []
        window = config.get("sliding_window") if not self._switch or config.get("use_sliding_window") else None
        if problems := _unlike(kinds):
            return {}, problems
        if window is None or (kinds and _SLIDING not in kinds):
            rule = f"layers with {_SLIDING} need a sliding_window"
            return {}, [Unsupported("layer_types", _SLIDING, rule)] if _SLIDING in kinds else []
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            return {}, [Unsupported("sliding_window", window, "a number of tokens")]
        windows: dict[str, Any] = {"window_size": (window - 1, 0)}
        if _FULL in kinds:
            if not self._by_layer:
                rule = "all layers of a model of this type have the window"
                return {}, [Unsupported("layer_types", _FULL, rule)]
            windows["window_attn_skip_freq"] = [int(kind == _SLIDING) for kind in kinds]
        return windows, []


class NoWindow:
    """Every token attends to all tokens before it; transformers reads no size of a window."""

    theirs = Window.theirs
    ours = ()

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        return {}, []

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        kinds = config.get("layer_types") or []
        rule = f"all layers of a model of this type have {_FULL}"
        return {}, _unlike(kinds) or [Unsupported("layer_types", kind, rule) for kind in kinds if kind == _SLIDING][:1]


_FULL, _SLIDING = "full_attention", "sliding_attention"
WINDOWS = frozenset(Window.ours)
"""Keys of sliding windows: `default_only` of families without."""


def _unlike(kinds: Any) -> list[Unsupported]:
    """Kinds of layers that no recipe has."""
    other = sorted(map(str, {*kinds} - {_FULL, _SLIDING}))
    return [Unsupported("layer_types", other[0], f"layers must have {_FULL} or {_SLIDING}")] if other else []


class Rope:
    """Rotary embeddings: unscaled, with linearly interpolated positions (arXiv 2306.15595), scaled as in Llama 3.1, or
    by YaRN (arXiv 2309.00071).

    Written as `rope_theta` and `rope_scaling`, which transformers 5 reads as well as its own `rope_parameters`, and
    older programs read only.

    Args:
        latent: the rotation is that of latent attention, which is only scaled by YaRN.
        said: also say that it is unscaled: without, transformers would scale it.
        plain: it is never scaled, but may be of a part of the channels.
    """

    theirs = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    def __init__(self, *, latent: bool = False, said: bool = False, plain: bool = False) -> None:
        self._latent = latent
        self._said = said
        self._plain = plain
        scaled = {"rotary_base", "rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"}
        scaled |= {"rotary_percent"} if plain else set()
        self.ours = scaled | ({"rope_type", *LATENT_YARN} if latent else {"position_embedding_type", *YARN})

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        if model.position_embedding_type == "learned_absolute":
            return {}, [
                Unsupported(
                    "model.position_embedding_type", "learned_absolute", "this family supports only rope and yarn"
                )
            ]
        if model.rope_scaling and self._latent:
            return {}, [Unsupported("model.rope_scaling", True, "this family does not support this scaling")]
        if (factor := model.rotary_seq_len_interpolation_factor) is not None and self._latent:
            rule = "this family does not interpolate positions"
            return {}, [Unsupported("model.rotary_seq_len_interpolation_factor", factor, rule)]
        scaling: dict[str, Any] | None = {"rope_type": "default"} if self._said else None
        if model.rotary_seq_len_interpolation_factor is not None:
            scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
        if model.rope_scaling:
            scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **SCALING}
        if model.position_embedding_type == "yarn" or (self._latent and model.rope_type == "yarn"):
            scaling = _yarn_of(model, latent=self._latent)
        if self._plain:
            rule = "this family does not scale positions"
            problems = [Unsupported("model.position_embedding_type", scaling["rope_type"], rule)] if scaling else []
            return {"rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_percent}, problems
        return {"rope_theta": model.rotary_base, "rope_scaling": scaling}, []

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        scaling = config["rope_parameters"]  # transformers moves the other keys of the rotation there
        if nested := next((key for key, value in scaling.items() if isinstance(value, Mapping)), None):
            return {}, [Unsupported(f"rope_scaling.{nested}", scaling[nested], "all layers must have the same values")]
        kind = scaling["rope_type"]
        section: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": scaling["rope_theta"]}
        share = scaling.get("partial_rotary_factor")  # not in unless it is set
        if self._plain:
            section["rotary_percent"] = share
            return section, [] if kind == "default" else [Unsupported("rope_scaling.rope_type", kind, "default")]
        problems = (
            []
            if share in (None, 1, 1.0)
            else [Unsupported("partial_rotary_factor", share, "all channels must be rotated")]
        )
        if kind == "default":
            return section, problems
        if kind == "yarn":
            values, more = _from_yarn(scaling, latent=self._latent)
            return {**section, **values}, [*problems, *more]
        if kind == "linear" and not self._latent:
            return {**section, "rotary_seq_len_interpolation_factor": scaling["factor"]}, problems
        if kind != "llama3" or self._latent:
            rule = "default or yarn" if self._latent else "one of default, linear, llama3, yarn"
            return section, [*problems, Unsupported("rope_scaling.rope_type", kind, rule)]
        for name, value in SCALING.items():
            if scaling.get(name) != value:
                problems.append(
                    Unsupported(f"rope_scaling.{name}", scaling.get(name), f"megatron-core supports only {value:g}")
                )
        return {**section, "rope_scaling": True, "rope_scaling_factor": scaling["factor"]}, problems


_YARN_NUMBERS = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim",
)  # fmt: skip
_YARN_KEYS = {*_YARN_NUMBERS, "truncate", "rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
"""With `finetuned`, a note in older files."""


def _yarn_of(model: Model, *, latent: bool) -> dict[str, Any]:
    """`rope_scaling` of a model with YaRN.

    transformers reads both of `mscale` and `mscale_all_dim` as 1 and 0 if either is 0; an `attention_factor` replaces
    what follows from them.
    """
    prefix = "" if latent else "yarn_"
    factor, mscale, all_dim = (
        getattr(model, prefix + name) for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")
    )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        **{
            name: getattr(model, prefix + name)
            for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        },
    }
    if not (mscale and all_dim) and (mscale, all_dim) != (1.0, 0.0):
        step = _yarn_step(factor)
        scaling["attention_factor"] = (mscale * step + 1) / (all_dim * step + 1)
    if not latent and not model.yarn_correction_range_round_to_int:
        scaling["truncate"] = False
    return scaling


def _from_yarn(parameters: Mapping[str, Any], *, latent: bool) -> tuple[dict[str, Any], list[Unsupported]]:
    """Values of `model` of `rope_parameters` with YaRN, as transformers' `_compute_yarn_parameters` reads them.

    Args:
        parameters: `rope_parameters` of config.json.
        latent: as in `Rope`.
    """
    values = {key: value for key, value in parameters.items() if value is not None}
    problems = [
        Unsupported(f"rope_scaling.{name}", value, f"one of {', '.join(_YARN_NUMBERS)}, truncate")
        for name, value in values.items()
        if name not in _YARN_KEYS
    ]
    for name in _YARN_NUMBERS:
        value = values.get(name)
        required = name in ("factor", "original_max_position_embeddings")
        if not (_is_size(value) or (value is None and not required)) or (required and value == 0):
            problems.append(Unsupported(f"rope_scaling.{name}", value, "a number, at least 0 and below 2**31"))
    truncate = parameters.get("truncate", True)  # this and the two below by default as in the function above
    if not isinstance(truncate, bool) or (latent and not truncate):
        rule = "latent attention of megatron-core rounds the bounds" if latent else "a boolean"
        problems.append(Unsupported("rope_scaling.truncate", truncate, rule))
    if problems:
        return {}, problems
    mscales = _mscales(values, latent=latent)
    if mscales is None:
        rule = "megatron-core multiplies by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)"
        return {}, [Unsupported("rope_scaling.attention_factor", values["attention_factor"], rule)]
    prefix, kind = ("", "rope_type") if latent else ("yarn_", "position_embedding_type")
    scaling = {
        "rotary_scaling_factor": values["factor"],
        "original_max_position_embeddings": values["original_max_position_embeddings"],
        "beta_fast": values.get("beta_fast") or 32.0,
        "beta_slow": values.get("beta_slow") or 1.0,
        "mscale": mscales[0],
        "mscale_all_dim": mscales[1],
        **({} if latent else {"correction_range_round_to_int": truncate}),
    }
    return {kind: "yarn", **{prefix + name: value for name, value in scaling.items()}}, []


def _mscales(values: Mapping[str, Any], *, latent: bool) -> tuple[float, float] | None:
    """`mscale` and `mscale_all_dim` for transformers' factor of queries and keys; None: no pair of values gives it.

    Latent attention's `mscale_all_dim` also scales its scores, so it is that of the file. Other attention may have any
    two with the right ratio. Rounded far below the precision of fp32, so that what is written is read as it was.
    """
    mscale = values.get("mscale")
    all_dim = values.get("mscale_all_dim")
    step = _yarn_step(values["factor"])
    ratio = values.get("attention_factor")
    if ratio is None and mscale and all_dim:
        return mscale, all_dim
    scores = (all_dim or 0.0) if latent else 0.0
    if ratio is None:
        ratio = 1 + step
    if not step or not ratio:
        return (1.0, scores) if ratio == 1 else None
    needed = round((ratio * (1 + scores * step) - 1) / step, 9)
    if needed >= 0:
        return needed, scores
    return None if latent else (0.0, round((1 / ratio - 1) / step, 9))


def _yarn_step(factor: float) -> float:
    """What a unit of `mscale` adds to 1."""
    return 0.1 * math.log(factor) if factor > 1 else 0.0


def _is_size(value: object) -> bool:
    # Larger than any context; megatron-core prepares a table of the original one.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 31


# -- tensors -----------------------------------------------------------------------------------------------------------


def to(*names: str, transform: Transform = SAME) -> To:
    """A row of a table."""
    return To(names, transform)


def in_layer(rows: dict[str, tuple[tuple[str, ...], Transform]]) -> dict[str, To]:
    """Rows of one layer, by names without those of the layer."""
    return {LAYER + name: To(tuple(LAYERS + tensor for tensor in names), how) for name, (names, how) in rows.items()}


AROUND = {
    "embedding.word_embeddings.weight": to("model.embed_tokens.weight", transform=VOCABULARY),
    "decoder.final_layernorm.weight": to("model.norm.weight"),
    "output_layer.weight": to("lm_head.weight", transform=VOCABULARY),
}
NORMS = in_layer(
    {
        "input_layernorm.weight": (("input_layernorm.weight",), SAME),
        "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), SAME),
    }
)
_HEADS = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
ATTENTION = in_layer(
    {
        "self_attention.linear_qkv.weight": (tuple(f"{head}.weight" for head in _HEADS), QKV),
        "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), SAME),
    }
)
QKV_BIAS = in_layer({"self_attention.linear_qkv.bias": (tuple(f"{head}.bias" for head in _HEADS), QKV)})
QK_NORM = in_layer(
    {
        "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), SAME),
        "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), SAME),
    }
)


def gated(ours: str, theirs: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, To]:
    """A gated MLP, by the names of its folder in both, and of the three matrices."""
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    return in_layer({f"{ours}linear_fc1.weight": ((gate, up), GATE_UP), f"{ours}linear_fc2.weight": ((down,), SAME)})


GATED_MLP = gated("mlp.", "mlp.")
