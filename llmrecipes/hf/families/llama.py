"""Llama 2 and 3, and the dense families made after it: Mistral, Ministral, Qwen2, Qwen3, Seed-OSS, Apertus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmrecipes.hf.families.parts import (
    AROUND,
    ATTENTION,
    EXPERT_KEYS,
    FREE,
    GATED_MLP,
    LATENT,
    LLAMA,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    SIZES,
    UNSUPPORTED,
    WINDOWS,
    Heads,
    NoWindow,
    Rope,
    Window,
    in_layer,
)
from llmrecipes.hf.table import ACTIVATIONS, SAME, Config, Family, Fixed, Key, Unsupported
from llmrecipes.recipe.schema import Model

_DENSE_KEYS = (*SIZES, Key("intermediate_size", "ffn_hidden_size"))
_EPSILON = Key("rms_norm_eps", "layernorm_epsilon")

LLAMA_FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    needs=LLAMA,
    keys=(*_DENSE_KEYS, _EPSILON),
    fixed=(Fixed("attention_bias", False), Fixed("mlp_bias", False)),
    tensors={**AROUND, **NORMS, **ATTENTION, **GATED_MLP},
    free=FREE,
    default_only=UNSUPPORTED | EXPERT_KEYS | LATENT | WINDOWS,
    specials=(Heads(), Rope(), NoWindow()),
)


class _Dropout:
    """After attention and MLP, but not after the embedding, where ours is too: it is left out."""

    theirs = ("residual_dropout",)
    ours = ()

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        return {"residual_dropout": 0.0}, []

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        return {}, []


_WITH_WINDOWS = LLAMA_FAMILY.default_only - WINDOWS

MISTRAL = replace(
    LLAMA_FAMILY,
    name="mistral",
    architecture="MistralForCausalLM",
    fixed=(),
    default_only=_WITH_WINDOWS,
    specials=(Heads(), Rope(), Window(said=True)),
)

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    architecture="MinistralForCausalLM",
    specials=(Heads(), Rope(), Window(by_layer=True, said=True)),
)

QWEN2 = replace(
    LLAMA_FAMILY,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    needs={**LLAMA, "add_qkv_bias": True},
    fixed=(),
    tensors={**LLAMA_FAMILY.tensors, **QKV_BIAS},
    default_only=_WITH_WINDOWS,
    specials=(Heads(free=False), Rope(), Window(by_layer=True, switch=True)),
)

QWEN3 = replace(
    LLAMA_FAMILY,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    needs={**LLAMA, "qk_layernorm": True},
    fixed=(Fixed("attention_bias", False),),
    tensors={**LLAMA_FAMILY.tensors, **QK_NORM},
    default_only=_WITH_WINDOWS,
    specials=(Heads(), Rope(), Window(by_layer=True, switch=True)),
)

SEED_OSS = replace(
    QWEN2,
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    fixed=(
        Fixed("attention_bias", True),
        Fixed("attention_out_bias", False),
        Fixed("mlp_bias", False),
    ),
    default_only=LLAMA_FAMILY.default_only,
    specials=(Heads(), Rope(), NoWindow(), _Dropout()),
)

APERTUS = replace(
    LLAMA_FAMILY,
    name="apertus",
    architecture="ApertusForCausalLM",
    needs={**LLAMA, "gated_linear_unit": False, "qk_layernorm": True},
    keys=(
        *(key for key in _DENSE_KEYS if key.theirs != "hidden_act"),
        Key("hidden_act", "activation_func", ACTIVATIONS),
        Key("rms_norm_eps", "layernorm_epsilon"),
    ),
    fixed=(Fixed("attention_bias", False),),
    tensors={
        **AROUND,
        **ATTENTION,
        **QK_NORM,
        **in_layer(
            {
                "input_layernorm.weight": (("attention_layernorm.weight",), SAME),
                "pre_mlp_layernorm.weight": (("feedforward_layernorm.weight",), SAME),
                "mlp.linear_fc1.weight": (("mlp.up_proj.weight",), SAME),
                "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), SAME),
            }
        ),
    },
    specials=(Heads(free=False), Rope(said=True)),
)
