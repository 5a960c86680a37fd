"""Mixtures of experts whose router is a softmax: Mixtral and Qwen3-MoE.

On disk each expert has its own matrices, the form of the Hub since these models came out: vLLM reads it, and
transformers 5, which computes with all experts of a layer in one tensor, stacks them while it loads.
"""

from __future__ import annotations

from typing import Any

from llmrecipes.hf.families.parts import (
    AROUND,
    ATTENTION,
    EXPERT,
    FREE_EXPERTS,
    GATED_MLP,
    LATENT,
    LLAMA,
    NORMS,
    QK_NORM,
    SIZES,
    UNSUPPORTED,
    Heads,
    Rope,
    Window,
    gated,
    in_layer,
)
from llmrecipes.hf.table import SAME, Config, Family, Fixed, Key, Unsupported, resolved
from llmrecipes.recipe.derived.weight_names import moe_layers
from llmrecipes.recipe.schema import Model

SOFTMAX: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key != "num_moe_experts"},
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
}
_TOPK = Key("num_experts_per_tok", "moe_router_topk")


class ExpertsInEachLayer:
    """Every layer has experts, and their width is the only one.

    Args:
        family: `model_type`.
    """

    theirs = ("intermediate_size", "num_local_experts", "num_experts")
    ours = ("ffn_hidden_size", "moe_ffn_hidden_size", "num_moe_experts", "moe_layer_freq")

    def __init__(self, family: str) -> None:
        self._family = family

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        rule = f"every layer of a model of type {self._family} has experts"
        obstacles = [] if model.num_moe_experts else [Unsupported("model.num_moe_experts", model.num_moe_experts, rule)]
        if model.num_moe_experts and not all(moe_layers(model)):
            obstacles.append(Unsupported("model.moe_layer_freq", model.moe_layer_freq, rule))
        width = resolved(model).get("moe_ffn_hidden_size")
        return {"intermediate_size": width, "num_local_experts": model.num_moe_experts}, obstacles

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        return {"ffn_hidden_size": config["intermediate_size"], "num_moe_experts": config["num_local_experts"]}, []


class _QwenExperts:
    """Some layers may be dense, with a width of their own; scores of the selected experts may sum to one."""

    theirs = ("num_experts", "num_local_experts", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
    ours = ("num_moe_experts", "moe_layer_freq", "moe_router_pre_softmax")

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        if not model.num_moe_experts:
            return {}, [Unsupported("model.num_moe_experts", None, "a model of type qwen3_moe has experts")]
        return {
            "num_experts": model.num_moe_experts,
            "mlp_only_layers": [number for number, has in enumerate(moe_layers(model)) if not has],
            "decoder_sparse_step": 1,
            "norm_topk_prob": not model.moe_router_pre_softmax,
        }, []

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        layers, dense, step = (config[key] for key in ("num_hidden_layers", "mlp_only_layers", "decoder_sparse_step"))
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        return {
            "num_moe_experts": config["num_local_experts"],
            "moe_router_pre_softmax": not config["norm_topk_prob"],
            **({} if all(pattern) else {"moe_layer_freq": pattern}),
        }, []


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    prefix="model.",
    needs={**SOFTMAX, "moe_router_pre_softmax": False},
    keys=(*SIZES, Key("rms_norm_eps", "layernorm_epsilon"), _TOPK),
    fixed=(),
    tensors={
        **AROUND,
        **NORMS,
        **ATTENTION,
        **in_layer({"mlp.router.weight": (("block_sparse_moe.gate.weight",), SAME)}),
        **gated(EXPERT, "block_sparse_moe.experts.*.", ("w1", "w3", "w2")),
    },
    free=FREE_EXPERTS,
    default_only=UNSUPPORTED | LATENT | {"moe_router_group_topk"},
    specials=(Heads(), Rope(), Window(said=True), ExpertsInEachLayer("mixtral")),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    prefix="model.",
    needs={**SOFTMAX, "qk_layernorm": True},
    keys=(
        *SIZES,
        Key("rms_norm_eps", "layernorm_epsilon"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size"),
        Key("num_experts_per_tok", "moe_router_topk"),
    ),
    fixed=(Fixed("attention_bias", False),),
    tensors={
        **AROUND,
        **NORMS,
        **ATTENTION,
        **QK_NORM,
        **GATED_MLP,
        **in_layer({"mlp.router.weight": (("mlp.gate.weight",), SAME)}),
        **gated(EXPERT, "mlp.experts.*."),
    },
    free=FREE_EXPERTS,
    default_only=UNSUPPORTED | LATENT | {"moe_router_group_topk"},
    specials=(Heads(), Rope(), Window(switch=True), _QwenExperts()),
)
