"""Exact parameter counts of GPT and Llama shapes as megatron-core's `GPTModel` builds them."""

from __future__ import annotations

from dataclasses import dataclass

from llmrecipes.plan.shape import shape
from llmrecipes.recipe.schema import Model


@dataclass(frozen=True)
class Parameters:
    """Parameter counts.

    `embedding` has the (padded) word table, the learned positions and an untied output layer; `non_embedding` the
    layers and the final norm, which is the N of scaling laws (arXiv 2001.08361).
    """

    total: int
    embedding: int
    non_embedding: int
    layer: int


def count(model: Model) -> Parameters:
    """Count the parameters of one model replica."""
    s = shape(model)
    h, ffn, query, key = s.hidden_size, s.ffn_hidden_size, s.query_size, s.key_size
    norm_vectors = 2 if model.normalization == "LayerNorm" else 1  # scale and shift, or scale alone
    bias = model.add_bias_linear

    qkv_width = query + 2 * key
    attention = h * qkv_width + query * h
    attention += qkv_width if bias or model.add_qkv_bias else 0
    attention += h if bias else 0
    attention += 2 * s.kv_channels * norm_vectors if model.qk_layernorm else 0

    up_width = ffn * (2 if model.gated_linear_unit else 1)
    mlp = h * up_width + ffn * h + (up_width + h if bias else 0)

    layer = attention + mlp + 2 * h * norm_vectors
    words = s.vocab_size * h
    embedding = words if model.share_embeddings_and_output_weights else 2 * words
    embedding += s.max_position_embeddings * h if model.position_embedding_type == "learned_absolute" else 0
    non_embedding = s.num_layers * layer + h * norm_vectors
    return Parameters(embedding + non_embedding, embedding, non_embedding, layer)
