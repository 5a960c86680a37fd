"""The model's sizes, with unset keys derived, in one place; and the factors of maximal-update parametrisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Model, Recipe


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
    window: int | None
    """Tokens that a token attends to in layers with a sliding window, itself included."""
    window_skips: int | tuple[int, ...] | None
    """Which layers have it, as `window_attn_skip_freq`."""

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

    def keys_seen(self, *, causal: bool) -> float:
        """Tokens that attention multiplies a token with, in all layers together, on average over a sequence.

        As in megatron-core, the n-th layer of multi-token prediction has the window of the n-th layer.

        Args:
            causal: count those that a token sees, else also those after it that only a mask hides.
        """
        whole = self.seq_length / 2 if causal else float(self.seq_length)
        near = min(self.window or self.seq_length, self.seq_length)
        inside = near * (1 - near / (2 * self.seq_length)) if causal else float(near)
        further = min(self.mtp_num_layers, self.num_layers)
        windows = self._windows(self.num_layers) + self._windows(further)
        return inside * windows + whole * (self.num_layers + further - windows)

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Which layers have the window, as megatron-core's `is_layer_window_attention`."""
        return tuple(self._windows(layer + 1) > self._windows(layer) for layer in range(self.num_layers))

    def _windows(self, layers: int) -> int:
        """Layers with the window among the first ones."""
        if self.window is None or self.window_skips is None:
            return 0 if self.window is None else layers
        skips = self.window_skips
        return layers - layers // skips if isinstance(skips, int) else skips[:layers].count(1)

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
        window=None if model.window_size is None else model.window_size[0] + 1,
        window_skips=tuple(skips) if isinstance(skips := model.window_attn_skip_freq, list) else skips,
    )


def unrotated(model: Model) -> list[bool]:
    """Which layers have no rotary embedding, as megatron-core's `TransformerConfig` reads `no_rope_freq`."""
    left_out = model.no_rope_freq
    if isinstance(left_out, list):
        return [bool(entry) for entry in left_out]
    return [left_out is not None and (layer + 1) % left_out == 0 for layer in range(model.num_layers)]


@dataclass(frozen=True)
class Mup:
    """Factors of a model, as megatron-core 0.19 computes them.

    With m = `width_mult`, hidden matrices start with a standard deviation of `init_method_std` / √m, and their learning
    rate and Adam's epsilon are divided by m. Embeddings, output layer, norms and biases keep theirs.
    """

    width_mult: float
    """`hidden_size` / `mup_base_hidden_size`."""
    embedding_mult: float
    """Factor of the embedding's output."""
    output_mult: float
    """Factor of the logits."""
    softmax_scale: float
    """Factor of attention scores."""


def mup(model: Model) -> Mup | None:
    """The factors of a model with `use_mup`; None without it."""
    if not model.use_mup:
        return None
    width = model.hidden_size / (model.mup_base_hidden_size or model.hidden_size)
    # megatron-core replaces the default, and only the default.
    output = 1.0 / width if model.mup_output_mult == 1.0 else model.mup_output_mult
    base = 1.0 if model.mup_base_head_dim is None else model.mup_base_head_dim**0.5
    return Mup(width, model.mup_embedding_mult, output, base / shape(model).kv_channels ** model.mup_attn_scale_power)


def mup_rules(recipe: Recipe) -> Iterator[Problem]:
    """Keys of the parametrisation need it, and it needs what megatron-core can scale."""
    model = recipe.model
    if not model.use_mup:
        for name, field in Model.model_fields.items():
            if name.startswith("mup_") and getattr(model, name) != field.default:
                yield Problem(
                    f"model.{name}",
                    "set without use_mup",
                    f"{name} is only used with the maximal-update parametrisation",
                    f"model.use_mup true, or remove {name}",
                )
        return
    if model.init_method != "normal":
        yield Problem(
            "model.init_method",
            f"{model.init_method} with use_mup",
            "the maximal-update parametrisation scales init_method_std, which only init_method normal uses",
            "init_method normal with init_method_std",
        )
    if model.multi_latent_attention:
        yield Problem(
            "model.use_mup",
            "true with multi_latent_attention",
            "megatron-core does not scale attention scores of latent attention for it",
            "use_mup false, or multi_latent_attention false",
        )
