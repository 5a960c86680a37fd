"""Small random models of each family, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, LENGTH, HIDDEN, EXPERTS = 300, 64, 64, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=HIDDEN, n_layer=2, n_head=4, activation_function="gelu",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "ministral": lambda: transformers.MinistralConfig(
        **SIZES, head_dim=16, sliding_window=16, layer_types=["full_attention", "sliding_attention"],
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(
        **SIZES, head_dim=32, attention_dropout=0.0, residual_dropout=0.0, pad_token_id=0,
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, eos_token_id=0),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=16, pad_token_id=0,
    ),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**SIZES, head_dim=32),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **ROUTED, num_experts=EXPERTS, head_dim=16),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, **ROUTED, head_dim=32, attention_bias=True, use_qk_norm=True, first_k_dense_replace=1,
        n_routed_experts=EXPERTS, n_shared_experts=1, routed_scaling_factor=2.5, num_nextn_predict_layers=0,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_experts_per_tok=2, num_local_experts=EXPERTS, head_dim=32, sliding_window=16, swiglu_limit=0.7,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, **ROUTED, **LATENT, q_lora_rank=24, first_k_dense_replace=1,
        n_routed_experts=EXPERTS, n_shared_experts=1, n_group=2, topk_group=1, routed_scaling_factor=2.5,
    ),
}  # fmt: skip
"""One of each family, by its `model_type`."""


def saved(
    kind: str | transformers.PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> torch.nn.Module:
    """A random model whose norms and biases are random too; saved to a folder.

    Args:
        kind: of `CONFIGS`, or a configuration.
        folder: to save to.
        dtype: of the weights.
        options: of `save_pretrained`.
    """
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]() if isinstance(kind, str) else kind)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.add_(torch.randn(buffer.shape, generator=random), alpha=0.1)
    model.to(dtype).eval().save_pretrained(folder, **options)
    return model
