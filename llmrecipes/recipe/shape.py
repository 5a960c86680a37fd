"""The model's sizes, with unset keys derived, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from llmrecipes.recipe.schema import Model


@dataclass(frozen=True)
class Shape:
    """Sizes of the transformer.

    `query_channels` are those of one query or key head, `value_channels` those of one value head (the same except for
    latent attention); `vocab_size` is the padded one, the rows of the embedding. A dense model has 0 experts, a model
    without shared experts a shared width of 0.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    query_channels: int
    value_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    num_moe_experts: int
    moe_ffn_hidden_size: int
    moe_shared_ffn_hidden_size: int
    moe_pattern: int | tuple[int, ...]
    mtp_num_layers: int

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.query_channels

    @property
    def key_size(self) -> int:
        """Width of all key heads together; with latent attention every query head has its own key."""
        return self.num_query_groups * self.query_channels

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.num_query_groups * self.value_channels

    @property
    def context_size(self) -> int:
        """Width of the input of attention's output projection."""
        return self.num_attention_heads * self.value_channels

    def moe_layers(self, first: int, last: int) -> int:
        """Number of MoE layers among `first` to `last` - 1, counted from 0."""
        if not self.num_moe_experts:
            return 0
        if isinstance(self.moe_pattern, int):
            return -(-last // self.moe_pattern) - -(-first // self.moe_pattern)
        return sum(self.moe_pattern[first:last])

    @property
    def mtp_moe_layers(self) -> int:
        """Number of multi-token prediction layers with experts: they are built like the last layer."""
        return self.mtp_num_layers * self.moe_layers(self.num_layers - 1, self.num_layers)


def shape(model: Model) -> Shape:
    """Derive the sizes as megatron-core's `TransformerConfig` does."""
    step = model.make_vocab_size_divisible_by
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    latent = model.multi_latent_attention
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    pattern = model.moe_layer_freq
    return Shape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.v_head_dim if latent else channels,
        query_channels=model.qk_head_dim + model.qk_pos_emb_head_dim if latent else channels,
        value_channels=model.v_head_dim if latent else channels,
        seq_length=model.seq_length,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        vocab_size=-(-model.vocab_size // step) * step,
        num_moe_experts=model.num_moe_experts or 0,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size or ffn,
        moe_shared_ffn_hidden_size=model.moe_shared_expert_intermediate_size or 0,
        moe_pattern=pattern if isinstance(pattern, int) else tuple(pattern),
        mtp_num_layers=model.mtp_num_layers or 0,
    )
