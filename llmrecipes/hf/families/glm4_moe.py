"""GLM-4.5: DeepSeek-V3's experts and multi-token prediction, with attention as Llama's and a share of it rotated."""

from __future__ import annotations

from llmrecipes.hf.families.deepseek import EXPERTS, SHARED, Experts, Predictions, with_predictions
from llmrecipes.hf.families.parts import (
    AROUND,
    ATTENTION,
    FREE_EXPERTS,
    LATENT,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    SIZES,
    UNSUPPORTED,
    WINDOWS,
    Heads,
    Rope,
)
from llmrecipes.hf.table import Family, Key

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    prefix="model.",
    needs={
        "use_mup": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "multi_latent_attention": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    keys=(
        *SIZES,
        Key("rms_norm_eps", "layernorm_epsilon"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size"),
        Key("num_experts_per_tok", "moe_router_topk"),
        Key("attention_bias", "add_qkv_bias"),
        Key("use_qk_norm", "qk_layernorm"),
    ),
    fixed=(),
    tensors=with_predictions({**AROUND, **NORMS, **ATTENTION, **QKV_BIAS, **QK_NORM, **EXPERTS}),
    # Sigmoid scores have no softmax.
    free=FREE_EXPERTS | {"moe_router_pre_softmax"},
    default_only=UNSUPPORTED | LATENT | WINDOWS,
    specials=(Heads(), Rope(plain=True), Experts("glm4_moe"), Predictions()),
    copies=SHARED,
)
