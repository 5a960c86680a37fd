"""Names of a layer's weights in checkpoints, and in megatron-core's local layers."""

from __future__ import annotations

FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
}
"""TransformerEngine fuses a norm into the linear layer after it, and checkpoints have its name there."""


def unfused(name: str) -> str:
    """Name in a local layer of what a checkpoint calls `name`; both without the number of the layer."""
    module, _, kind = name.rpartition(".layer_norm_")
    return f"{FUSED_NORMS[module]}.{kind}" if module in FUSED_NORMS else name
