"""gpt-oss: experts and router with biases, a clamped gate, learned sinks, and windows in every second layer.

A tensor has all experts of a layer, transposed, with the rows of the gate and of what it multiplies in turn. The
published ones have 4 bits (`hf.mxfp4`).
"""

from __future__ import annotations

from typing import Any

import torch

from llmrecipes.hf.families.mixture import SOFTMAX, ExpertsInEachLayer
from llmrecipes.hf.families.parts import (
    AROUND,
    ATTENTION,
    EXPERT,
    FREE_EXPERTS,
    LATENT,
    LAYER,
    LAYERS,
    NORMS,
    QKV_BIAS,
    SIZES,
    UNSUPPORTED,
    Heads,
    Rope,
    Window,
    in_layer,
)
from llmrecipes.hf.table import SAME, TRANSPOSED, Config, Family, Fixed, Key, To, Transform, Unsupported
from llmrecipes.recipe.schema import Model


class _InTurn:
    """Rows of the gate and of what it multiplies by turns, transposed unless it is a bias."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        gate, up = tensor.chunk(2)
        return [torch.stack([gate, up], 1).flatten(0, 1).t()]


class _Limit:
    """What clamps the gate: transformers cannot do without it."""

    theirs = ("swiglu_limit",)
    ours = ("activation_func_clamp_value",)

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        limit = model.activation_func_clamp_value
        rule = "a model of type gpt_oss has one"
        problems = [] if limit else [Unsupported("model.activation_func_clamp_value", limit, rule)]
        return {"swiglu_limit": limit}, problems

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        return {"activation_func_clamp_value": config["swiglu_limit"]}, []


class _Windows(Window):
    """As in other families, but transformers computes the mask of a window even where no layer has one."""

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        config, problems = super().config_of(model)
        return config if config["sliding_window"] else config | {"sliding_window": 128}, problems


def _of_experts(rows: dict[str, tuple[str, Transform]]) -> dict[str, To]:
    return {
        f"{LAYER}{EXPERT}{ours}": To((f"{LAYERS}mlp.experts.{theirs}",), how, stacked=True)
        for ours, (theirs, how) in rows.items()
    }


_IN_TURN = _InTurn()

GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    prefix="model.",
    needs={
        **SOFTMAX,
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "moe_router_pre_softmax": False,
    },
    keys=(
        *(key for key in SIZES if key.theirs != "hidden_act"),
        Key("rms_norm_eps", "layernorm_epsilon"),
        Key("num_experts_per_tok", "moe_router_topk"),
    ),
    fixed=(Fixed("attention_bias", True), Fixed("hidden_act", "silu"), Fixed("swiglu_alpha", 1.702)),
    tensors={
        **AROUND,
        **NORMS,
        **ATTENTION,
        **QKV_BIAS,
        **in_layer(
            {
                "self_attention.linear_proj.bias": (("self_attn.o_proj.bias",), SAME),
                "self_attention.core_attention.softmax_offset": (("self_attn.sinks",), SAME),
                "mlp.router.weight": (("mlp.router.weight",), SAME),
                "mlp.router.bias": (("mlp.router.bias",), SAME),
            }
        ),
        **_of_experts(
            {
                "linear_fc1.weight": ("gate_up_proj", _IN_TURN),
                "linear_fc1.bias": ("gate_up_proj_bias", _IN_TURN),
                "linear_fc2.weight": ("down_proj", TRANSPOSED),
                "linear_fc2.bias": ("down_proj_bias", SAME),
            }
        ),
    },
    free=FREE_EXPERTS,
    default_only=UNSUPPORTED - {"softmax_type", "activation_func_clamp_value", "glu_linear_offset"}
    | LATENT
    | {"moe_router_group_topk"},
    specials=(
        Heads(),
        Rope(said=True),
        _Windows(by_layer=True, said=True),
        ExpertsInEachLayer("gpt_oss"),
        _Limit(),
    ),
    # The first two have other names here; transformers does not read them.
    training_only=frozenset({"experts_per_token", "initial_context_length"}),
)
