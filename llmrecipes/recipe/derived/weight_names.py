"""Names and shapes of a recipe's weights in megatron-core: those of one process, layer by layer, expert by expert.

A checkpoint stacks layers and experts of the same kind into one tensor; here every one has a name, because
Hugging Face stores them so, and little is read at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.schema import Model

Named = Iterator[tuple[str, tuple[int, ...]]]


def weights(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name, in the order of the model."""
    return dict(_weights(model, shape(model)))


def moe_layers(model: Model) -> list[bool]:
    """Which layers have experts."""
    sizes = shape(model)
    return [bool(sizes.moe_layers(layer, layer + 1)) for layer in range(sizes.num_layers)]


def _weights(model: Model, sizes: Shape) -> Named:
    hidden = sizes.hidden_size
    yield "embedding.word_embeddings.weight", (sizes.vocab_size, hidden)
    if model.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", (sizes.max_position_embeddings, hidden)
    for layer, has_experts in enumerate(moe_layers(model)):
        for name, size in _layer(model, sizes, has_experts):
            yield f"decoder.layers.{layer}.{name}", size
    yield from _norm(model, "decoder.final_layernorm", hidden)
    for depth in range(sizes.mtp_num_layers):
        yield from _prediction(model, sizes, f"mtp.layers.{depth}")
    if not model.share_embeddings_and_output_weights:
        yield "output_layer.weight", (sizes.vocab_size, hidden)


def _prediction(model: Model, sizes: Shape, name: str) -> Named:
    """A layer of multi-token prediction, around a layer like the model's last one."""
    hidden = sizes.hidden_size
    yield from _norm(model, f"{name}.enorm", hidden)
    yield from _norm(model, f"{name}.hnorm", hidden)
    yield f"{name}.eh_proj.weight", (hidden, 2 * hidden)
    for inner, size in _layer(model, sizes, moe_layers(model)[-1]):
        yield f"{name}.transformer_layer.{inner}", size
    yield from _norm(model, f"{name}.final_layernorm", hidden)


def _layer(model: Model, sizes: Shape, has_experts: bool) -> Named:
    yield from _norm(model, "input_layernorm", sizes.hidden_size)
    yield from _latent(model, sizes) if model.multi_latent_attention else _attention(model, sizes)
    yield from _linear(model, "self_attention.linear_proj", sizes.hidden_size, sizes.context_size)
    yield from _norm(model, "pre_mlp_layernorm", sizes.hidden_size)
    if not has_experts:
        yield from _mlp(model, "mlp", sizes.hidden_size, sizes.ffn_hidden_size)
        return
    yield from _linear(model, "mlp.router", sizes.num_moe_experts, sizes.hidden_size)
    if model.moe_router_enable_expert_bias:
        yield "mlp.router.expert_bias", (sizes.num_moe_experts,)
    for expert in range(sizes.num_moe_experts):
        yield from _mlp(model, f"mlp.experts.local_experts.{expert}", sizes.hidden_size, sizes.moe_ffn_hidden_size)
    if sizes.moe_shared_ffn_hidden_size:
        yield from _mlp(model, "mlp.shared_experts", sizes.hidden_size, sizes.moe_shared_ffn_hidden_size)


def _attention(model: Model, sizes: Shape) -> Named:
    rows = sizes.query_size + sizes.key_size + sizes.value_size
    yield "self_attention.linear_qkv.weight", (rows, sizes.hidden_size)
    if model.add_bias_linear or model.add_qkv_bias:
        yield "self_attention.linear_qkv.bias", (rows,)
    if model.softmax_type == "learnable":
        yield "self_attention.core_attention.softmax_offset", (sizes.num_attention_heads,)
    if model.qk_layernorm:
        yield from _norm(model, "self_attention.q_layernorm", sizes.kv_channels)
        yield from _norm(model, "self_attention.k_layernorm", sizes.kv_channels)


def _latent(model: Model, sizes: Shape) -> Named:
    """See arXiv 2405.04434, section 2.1."""
    rank = model.q_lora_rank
    if rank is None:
        yield "self_attention.linear_q_proj.weight", (sizes.query_size, sizes.hidden_size)
    else:
        yield "self_attention.linear_q_down_proj.weight", (rank, sizes.hidden_size)
        yield "self_attention.linear_q_up_proj.weight", (sizes.query_size, rank)
    compressed = model.kv_lora_rank + model.qk_pos_emb_head_dim
    yield "self_attention.linear_kv_down_proj.weight", (compressed, sizes.hidden_size)
    rows = model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)
    yield "self_attention.linear_kv_up_proj.weight", (rows, model.kv_lora_rank)
    if model.qk_layernorm:
        if rank is not None:
            yield from _norm(model, "self_attention.q_layernorm", rank)
        yield from _norm(model, "self_attention.kv_layernorm", model.kv_lora_rank)


def _mlp(model: Model, name: str, hidden: int, ffn: int) -> Named:
    yield from _linear(model, f"{name}.linear_fc1", ffn * (2 if model.gated_linear_unit else 1), hidden)
    yield from _linear(model, f"{name}.linear_fc2", hidden, ffn)


def _linear(model: Model, name: str, rows: int, columns: int) -> Named:
    yield f"{name}.weight", (rows, columns)
    if model.add_bias_linear:
        yield f"{name}.bias", (rows,)


def _norm(model: Model, name: str, size: int) -> Named:
    yield f"{name}.weight", (size,)
    if model.normalization == "LayerNorm":
        yield f"{name}.bias", (size,)


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
