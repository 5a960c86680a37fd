"""DeepSeek-V3: latent attention, shared experts, a sigmoid router with a bias that balances the experts.

Layers of multi-token prediction (arXiv 2412.19437, section 2.2) come after the others, each with a copy of the
embedding and of the output layer, as DeepSeek publishes them. vLLM and SGLang draft tokens with them, as transformers
with `use_mtp`; otherwise transformers leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrecipes.hf.families.parts import (
    AROUND,
    EXPERT,
    FREE_EXPERTS,
    GATED_MLP,
    LAYER,
    LAYERS,
    NORMS,
    ROTARY,
    SIZES,
    UNSUPPORTED,
    WINDOWS,
    YARN,
    Rope,
    gated,
    in_layer,
)
from llmrecipes.hf.table import (
    EMBEDDING,
    OUTPUT,
    PREDICTIONS,
    SAME,
    Config,
    Family,
    Fixed,
    Key,
    To,
    Unsupported,
    resolved,
)
from llmrecipes.recipe.derived.weight_names import moe_layers
from llmrecipes.recipe.schema import Model

_EPSILON = 1e-6


class _Heads:
    """Every query head has its own key and value."""

    theirs = ("num_key_value_heads", "head_dim", "qk_head_dim")
    ours = ()

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        return {"num_key_value_heads": model.num_attention_heads}, []

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        return {}, []  # sizes of the latent attention are keys of their own


class Experts:
    """The first layers are dense; shared experts are as wide as routed ones; groups of experts.

    Args:
        family: `model_type`.
    """

    theirs = (
        "n_routed_experts", "num_local_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group",
        "norm_topk_prob", "routed_scaling_factor",
    )  # fmt: skip
    ours = (
        "num_moe_experts", "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_router_num_groups",
        "moe_router_group_topk", "moe_router_topk_scaling_factor",
    )  # fmt: skip

    def __init__(self, family: str) -> None:
        self._family = family

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        if not model.num_moe_experts:
            return {}, [Unsupported("model.num_moe_experts", None, f"a model of type {self._family} has experts")]
        obstacles = []
        pattern = moe_layers(model)
        dense = pattern.index(True) if True in pattern else len(pattern)
        if not all(pattern[dense:]):
            rule = f"after the first layer with experts, each layer of a model of type {self._family} has them"
            obstacles.append(Unsupported("model.moe_layer_freq", model.moe_layer_freq, rule))
        width = resolved(model)["moe_ffn_hidden_size"]
        shared, rest = divmod(model.moe_shared_expert_intermediate_size or 0, width)
        if rest or not shared:
            rule = f"a multiple of moe_ffn_hidden_size, {width}"
            key = "model.moe_shared_expert_intermediate_size"
            obstacles.append(Unsupported(key, model.moe_shared_expert_intermediate_size, rule))
        groups = model.moe_router_num_groups or 1
        chosen = model.moe_router_group_topk or 1
        if problem := _unlike_two(groups, chosen, model.moe_router_topk):
            obstacles.append(Unsupported("model.moe_router_group_topk", chosen, problem))
        return {
            "n_routed_experts": model.num_moe_experts,
            "n_shared_experts": shared,
            "first_k_dense_replace": dense,
            "n_group": groups,
            "topk_group": chosen,
            # megatron-core does not normalise the score of a single expert.
            "norm_topk_prob": model.moe_router_topk > 1,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        }, obstacles

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        layers = config["num_hidden_layers"]
        dense = config["first_k_dense_replace"]
        groups, chosen, topk = (config[key] for key in ("n_group", "topk_group", "num_experts_per_tok"))
        scale = config["routed_scaling_factor"]
        normalised = config["norm_topk_prob"]
        rule = "scores of several experts sum to one, and the score of a single one is left as it is"
        obstacles = [] if normalised == (topk > 1) else [Unsupported("norm_topk_prob", normalised, rule)]
        pattern = [int(layer >= dense) for layer in range(layers)]
        for key, value in (("n_group", groups), ("topk_group", chosen)):
            if not value:  # transformers divides by it
                obstacles.append(Unsupported(key, value, "a number of groups of experts, at least 1"))
        if problem := _unlike_two(groups, chosen, topk):
            obstacles.append(Unsupported("topk_group", chosen, problem))
        grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
        return {
            "num_moe_experts": config["n_routed_experts"],
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
            **({} if scale == 1.0 else {"moe_router_topk_scaling_factor": scale}),
            **({} if groups == 1 else grouped),
            **({} if all(pattern) else {"moe_layer_freq": pattern}),
        }, obstacles


class Predictions:
    """Layers of multi-token prediction; transformers assumes one where config.json has no number."""

    theirs = ("num_nextn_predict_layers", "num_mtp_layers")
    ours = ("mtp_num_layers",)

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        depths = model.mtp_num_layers or 0
        rule = "layers of multi-token prediction have experts"
        problems = [] if not depths or moe_layers(model)[-1] else [Unsupported("model.mtp_num_layers", depths, rule)]
        return {"num_nextn_predict_layers": depths}, problems

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        depths = config["num_nextn_predict_layers"]  # which transformers does not check
        if depths is not None and (type(depths) is not int or depths < 0):
            return {}, [Unsupported("num_nextn_predict_layers", depths, "it is a number of layers")]
        return {"mtp_num_layers": depths or None}, []


def _unlike_two(groups: int, chosen: int, topk: int) -> str:
    """Why groups of experts are ranked otherwise in transformers; empty if they are not.

    The score of a group is the sum of its best experts: always two in transformers, and in megatron-core as many as a
    chosen group has to give. Where every group is chosen, the scores do not matter.
    """
    if groups in (1, chosen) or topk == 2 * chosen:
        return ""
    return f"two experts of each chosen group, as transformers scores groups: half of moe_router_topk {topk}"


EXPERTS = {
    **GATED_MLP,
    **in_layer(
        {
            "mlp.router.weight": (("mlp.gate.weight",), SAME),
            "mlp.router.expert_bias": (("mlp.gate.e_score_correction_bias",), SAME),
        }
    ),
    **gated(EXPERT, "mlp.experts.*."),
    **gated("mlp.shared_experts.", "mlp.shared_experts."),
}
_TENSORS = {
    **AROUND,
    **NORMS,
    **in_layer(
        {
            f"self_attention.{ours}.weight": ((f"self_attn.{theirs}.weight",), SAME)
            for ours, theirs in {
                "linear_q_proj": "q_proj",
                "linear_q_down_proj": "q_a_proj",
                "q_layernorm": "q_a_layernorm",
                "linear_q_up_proj": "q_b_proj",
                "linear_kv_down_proj": "kv_a_proj_with_mqa",
                "kv_layernorm": "kv_a_layernorm",
                "linear_kv_up_proj": "kv_b_proj",
                "linear_proj": "o_proj",
            }.items()
        }
    ),
    **EXPERTS,
}


def with_predictions(tensors: Mapping[str, To]) -> dict[str, To]:
    """Tensors of layers, and those of multi-token prediction."""
    inside = {
        f"{PREDICTIONS}*.transformer_layer.{name.removeprefix(LAYER)}": to
        for name, to in tensors.items()
        if name.startswith(LAYER)
    }
    around = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    outside = {f"{PREDICTIONS}*.{ours}.weight": To((f"{LAYERS}{name}.weight",)) for ours, name in around.items()}
    return {**tensors, **inside, **outside}


SHARED = {EMBEDDING: f"{LAYERS}embed_tokens.weight", OUTPUT: f"{LAYERS}shared_head.head.weight"}
"""Copies in each layer of multi-token prediction."""
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    prefix="model.",
    needs={
        **ROTARY,
        "position_embedding_type": "rope",  # of which YaRN is the `rope_type`
        "use_mup": False,
        "gated_linear_unit": True,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        # transformers has this number in the code of the norms of the compressed vectors.
        "layernorm_epsilon": _EPSILON,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    keys=(
        *SIZES,
        Key("intermediate_size", "ffn_hidden_size"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size"),
        Key("num_experts_per_tok", "moe_router_topk"),
        Key("q_lora_rank", "q_lora_rank"),
        Key("kv_lora_rank", "kv_lora_rank"),
        Key("qk_nope_head_dim", "qk_head_dim"),
        Key("qk_rope_head_dim", "qk_pos_emb_head_dim"),
        Key("v_head_dim", "v_head_dim"),
    ),
    fixed=(
        Fixed("rms_norm_eps", _EPSILON),
        Fixed("attention_bias", False),
        Fixed("rope_interleave", True),
        Fixed("moe_layer_freq", 1, unread=True),
        Fixed("scoring_func", "sigmoid", unread=True),
        Fixed("topk_method", "noaux_tc", unread=True),
    ),
    tensors=with_predictions(_TENSORS),
    # Sigmoid scores have no softmax.
    free=FREE_EXPERTS | {"moe_router_pre_softmax"},
    default_only=UNSUPPORTED | YARN | WINDOWS | {"num_query_groups", "kv_channels"},
    specials=(_Heads(), Rope(latent=True), Experts("deepseek_v3"), Predictions()),
    copies=SHARED,
    training_only=frozenset({"aux_loss_alpha", "ep_size", "seq_aux"}),
)
