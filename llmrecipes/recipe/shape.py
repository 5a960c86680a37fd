"""The model's numbers with every unset key derived, once."""

from __future__ import annotations

from dataclasses import dataclass

from llmrecipes.recipe.schema import Model


@dataclass(frozen=True)
class Shape:
    """Sizes of the transformer.

    `query_size` and `key_size` are the widths of all query heads and of all key (or value) heads together;
    `vocab_size` is the padded one, the rows of the embedding.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        return self.num_query_groups * self.kv_channels


def shape(model: Model) -> Shape:
    """Derive the sizes as megatron-core's `TransformerConfig` does."""
    step = model.make_vocab_size_divisible_by
    return Shape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.kv_channels or model.hidden_size // model.num_attention_heads,
        seq_length=model.seq_length,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        vocab_size=-(-model.vocab_size // step) * step,
    )
