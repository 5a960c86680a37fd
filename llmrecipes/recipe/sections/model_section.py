"""The `model` section of a recipe: the shape and the arithmetic of the transformer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.section import (
    EXECUTION,
    JsonObject,
    NonNegFloat,
    NonNegInt,
    PosFloat,
    PosInt,
    Probability,
    Section,
)


class Model(Section):
    """Shape and arithmetic of the transformer (megatron-core `TransformerConfig` and `HybridModel`)."""

    num_layers: PosInt
    """Number of transformer layers; required unless `hybrid_layer_pattern` gives it."""
    hybrid_layer_pattern: str | None = Field(default=None, exclude=True)
    """The layers in Megatron's notation, read as `num_layers`, `moe_layer_freq`, `mtp_num_layers` and the keys of
    pipeline stages. A layer is attention (`*`, or `+` if latent) and an MLP (`-`) or experts (`E`); `|` begins a
    pipeline stage, `/` a layer of multi-token prediction: `"*-*-|*E*E/*E"`."""
    hidden_size: PosInt
    """Width of the residual stream."""
    num_attention_heads: PosInt
    """Number of query heads; must divide `hidden_size` unless `kv_channels` is set."""
    seq_length: PosInt
    """Tokens per training sequence."""
    vocab_size: PosInt
    """Size to which a `bpe` tokenizer is trained, an upper bound for a Hugging Face tokenizer. The embedding is
    padded to a multiple of `make_vocab_size_divisible_by`."""
    ffn_hidden_size: PosInt | None = None
    """Width of the MLP; unset: 4 × `hidden_size`."""
    num_query_groups: PosInt | None = None
    """Key/value heads of grouped-query attention (arXiv 2305.13245); unset: one per query head."""
    kv_channels: PosInt | None = None
    """Channels per head; unset: `hidden_size` / `num_attention_heads`."""
    max_position_embeddings: PosInt | None = None
    """Maximum number of positions; unset: `seq_length`."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn"] = "learned_absolute"
    """A learned table, rotary (arXiv 2104.09864), or rotary scaled to longer contexts with YaRN (arXiv 2309.00071).
    With latent attention, set `rope` here and select YaRN with `rope_type`."""
    rotary_base: PosFloat = 10000.0
    """Base period of the rotary embedding."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a head's channels that is rotated."""
    no_rope_freq: Annotated[int, Field(ge=2)] | Annotated[list[Literal[0, 1]], Field(min_length=1)] | None = None
    """Layers without rotary embedding (NoPE): every N-th, or a list with 1 (without) or 0 per layer; unset: none."""
    rope_scaling: bool = False
    """Scale the rotary frequencies for longer contexts, as Llama 3.1 does."""
    rope_scaling_factor: PosFloat = 8.0
    """Scaling factor of `rope_scaling`."""
    rotary_seq_len_interpolation_factor: PosFloat | None = None
    """Divide positions by this factor before the rotary embedding (linear interpolation, arXiv 2306.15595); unset:
    1."""
    yarn_rotary_scaling_factor: PosFloat | None = None
    """YaRN: factor by which the context is extended; needs `position_embedding_type: yarn`, like the other `yarn_`
    keys."""
    yarn_original_max_position_embeddings: PosInt | None = None
    """YaRN: context length before the extension."""
    yarn_beta_fast: PosFloat = 32.0
    """YaRN: channels that rotate more often than this over the original context are not interpolated."""
    yarn_beta_slow: PosFloat = 1.0
    """YaRN: channels that rotate less often than this over the original context are fully interpolated."""
    yarn_mscale: NonNegFloat = 1.0
    """YaRN: multiply queries and keys by m(`yarn_mscale`) / m(`yarn_mscale_all_dim`), where m(x) = 0.1 x
    ln(`yarn_rotary_scaling_factor`) + 1."""
    yarn_mscale_all_dim: NonNegFloat = 0.0
    """YaRN: x in the divisor above; see `yarn_mscale`."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: round the bounds given by `yarn_beta_fast` and `yarn_beta_slow` to whole channels."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalisation before attention, MLP and output layer."""
    layernorm_epsilon: PosFloat = 1e-5
    """Added to the variance before taking the square root."""
    activation_func: Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "squared_relu"] = "gelu"
    """Activation function of the MLP; `gelu_tanh` is the tanh approximation that GPT-2 uses, `quick_gelu` that with a
    sigmoid."""
    gated_linear_unit: bool = False
    """Gate the MLP (arXiv 2002.05202); with `activation_func: silu` this is SwiGLU."""
    activation_func_clamp_value: Annotated[PosFloat | None, OnlyWith("gated_linear_unit")] = None
    """Largest gate, and largest magnitude of what it multiplies; unset: any."""
    glu_linear_offset: Annotated[float, OnlyWith("gated_linear_unit")] = 0.0
    """Added to what the gate multiplies."""
    add_bias_linear: bool = True
    """Add biases to all linear layers."""
    add_qkv_bias: bool = False
    """Add a bias to the query-key-value projection only; `add_bias_linear` includes it."""
    window_size: Annotated[tuple[NonNegInt, Literal[0]], Field(strict=False)] | None = None
    """Sliding window: with `[n, 0]` a token attends to itself and the n before it (transformers' `sliding_window` of
    n + 1); unset: to all."""
    window_attn_skip_freq: Annotated[
        Annotated[int, Field(ge=2)] | Annotated[list[Literal[0, 1]], Field(min_length=1)] | None,
        OnlyWith("window_size"),
    ] = None
    """Layers without the window: every N-th, or a list with 1 (window) or 0 per layer; unset: none."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Sink of attention: a key without a value, whose score is 0 (`off-by-one`) or learned by each head."""
    qk_layernorm: bool = False
    """Normalise queries and keys before their dot product."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output layer to the word embedding."""
    attention_dropout: Probability = 0.0
    """Dropout of attention probabilities."""
    hidden_dropout: Probability = 0.0
    """Dropout of the residual branches and the embedding."""
    layer_drop: Probability = 0.0
    """Probability of skipping the last layer for a micro-batch in training (stochastic depth, arXiv 1603.09382);
    layer l of L is skipped with l / L times this probability."""
    init_method: Literal["normal", "xavier_uniform", "kaiming_normal"] = "normal"
    """Initialisation of weight matrices. Output projections are always scaled by 1/sqrt(2 × `num_layers`) (GPT-2);
    embeddings are always normal."""
    init_method_std: PosFloat = 0.02
    """Standard deviation of `normal` initialisation and of the embeddings."""
    use_mup: bool = False
    """Maximal-update parametrisation (arXiv 2203.03466): scale initialisation, learning rates, attention scores and
    logits with width, so that a learning rate tuned on a narrow model transfers to a wide one."""
    mup_base_hidden_size: PosInt | None = None
    """`hidden_size` of the narrow model that was tuned; unset: this model's `hidden_size`."""
    mup_embedding_mult: PosFloat = 1.0
    """Factor applied to the embedding's output."""
    mup_output_mult: PosFloat = 1.0
    """Factor applied to the logits. With the default of 1, the factor is `mup_base_hidden_size` / `hidden_size`."""
    mup_base_head_dim: PosFloat | None = None
    """Channels per head of the narrow model. Attention scores are scaled by sqrt(`mup_base_head_dim`) /
    `kv_channels`^`mup_attn_scale_power`; unset: 1."""
    mup_attn_scale_power: PosFloat = 1.0
    """Exponent of `kv_channels` in the scale of attention scores; 0.5 is standard attention."""
    num_moe_experts: PosInt | None = None
    """Experts per mixture-of-experts layer (arXiv 1701.06538), over all ranks; unset: a dense model."""
    moe_router_topk: PosInt = 2
    """Experts per token."""
    moe_ffn_hidden_size: PosInt | None = None
    """Width of each expert; unset: `ffn_hidden_size`."""
    moe_shared_expert_intermediate_size: PosInt | None = None
    """Total width of the shared experts, which process every token in addition to the routed ones (DeepSeekMoE, arXiv
    2401.06066); unset: none."""
    moe_layer_freq: PosInt | Annotated[list[Literal[0, 1]], Field(min_length=1)] = 1
    """Layers with experts: every N-th, starting with the first, or a list with 1 (experts) or 0 (dense) per layer."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = "aux_loss"
    """Tokens over which the auxiliary load-balancing loss is computed: a micro-batch (`aux_loss`; GShard, arXiv
    2006.16668), each sequence (`seq_aux_loss`; DeepSeek-V3, arXiv 2412.19437), or the global batch so far
    (`global_aux_loss`; arXiv 2501.11873). `none`: no auxiliary loss."""
    moe_aux_loss_coeff: NonNegFloat = 0.0
    """Weight of the auxiliary loss beside the mean loss of a token, however many tokens are masked; Switch Transformer
    (arXiv 2101.03961) uses 0.01."""
    moe_z_loss_coeff: NonNegFloat | None = None
    """Weight of the router z-loss, which keeps router logits small (ST-MoE, arXiv 2202.08906, uses 0.001); unset:
    none."""
    moe_router_enable_expert_bias: bool = False
    """Balance experts without a loss: a bias per expert, used only for the top-k selection, rises for underloaded
    and falls for overloaded experts (arXiv 2408.15664); needs `moe_router_score_function: sigmoid`."""
    moe_router_bias_update_rate: NonNegFloat = 1e-3
    """Update step of the expert bias; 0 keeps it constant."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into scores; DeepSeek-V3 uses sigmoid."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax over all experts before the top-k selection, instead of over the selected experts after it."""
    moe_router_topk_scaling_factor: PosFloat | None = None
    """Factor applied to the selected scores; unset: none."""
    moe_router_num_groups: Annotated[PosInt | None, OnlyWith("moe_router_group_topk")] = None
    """Number of expert groups for group-limited routing (DeepSeek-V2, arXiv 2405.04434); unset: routing is not
    limited."""
    moe_router_group_topk: Annotated[PosInt | None, OnlyWith("moe_router_num_groups")] = None
    """Number of groups from which a token's experts are selected; needs `moe_router_num_groups`."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Precision of routing and of combining the experts' outputs; null: the model's precision."""
    moe_input_jitter_eps: Probability | None = None
    """Multiply the router's input by random factors from 1 - eps to 1 + eps in training (Switch Transformer); unset:
    off."""
    moe_expert_capacity_factor: PosFloat | None = None
    """Capacity of an expert, as a multiple of an even share of the tokens; tokens beyond it are dropped (GShard).
    Unset: none are."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity, so that shapes do not depend on routing."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # noqa: S105 - no password
    """Tokens that a full expert drops: those with the lowest scores (`probs`), or the last ones (`position`)."""
    moe_token_dispatcher_type: Annotated[Literal["alltoall", "allgather", "flex"], EXECUTION] = "alltoall"  # noqa: S105 - no password
    """How tokens reach experts on other ranks: `alltoall` sends each token to its experts only, `allgather` gathers
    all tokens on every rank, `flex` uses DeepEP's kernels (`layout.moe_flex_dispatcher_backend`)."""
    multi_latent_attention: bool = False
    """Use multi-head latent attention: keys and values are computed from a compressed vector (DeepSeek-V2, arXiv
    2405.04434). The keys below set its head sizes; needs `position_embedding_type: rope`."""
    q_lora_rank: PosInt | None = None
    """Width of the compressed query; unset: queries are not compressed."""
    kv_lora_rank: PosInt = 512
    """Width of the compressed keys and values."""
    qk_head_dim: PosInt = 128
    """Query and key channels per head without position embedding."""
    qk_pos_emb_head_dim: PosInt = 64
    """Rotated channels per query head, and of the rotated key that all heads share."""
    v_head_dim: PosInt = 128
    """Value channels per head."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """Rotary embedding of latent attention: unscaled, or scaled to longer contexts with YaRN (arXiv 2309.00071)."""
    rotary_scaling_factor: PosFloat = 40.0
    """YaRN of latent attention: factor by which the context is extended; needs `rope_type: yarn`, like the YaRN keys
    below."""
    original_max_position_embeddings: PosInt = 4096
    """YaRN of latent attention: context length before the extension."""
    beta_fast: PosFloat = 32.0
    """YaRN of latent attention: see `yarn_beta_fast`."""
    beta_slow: PosFloat = 1.0
    """YaRN of latent attention: see `yarn_beta_slow`."""
    mscale: NonNegFloat = 1.0
    """YaRN of latent attention: multiply rotated queries and keys by m(`mscale`) / m(`mscale_all_dim`), where m(x) =
    0.1 x ln(`rotary_scaling_factor`) + 1."""
    mscale_all_dim: NonNegFloat = 0.0
    """YaRN of latent attention: multiply attention scores by m(`mscale_all_dim`)²."""
    mtp_num_layers: PosInt | None = None
    """Number of multi-token prediction layers after the last layer, each predicting one token further ahead, in
    training only (DeepSeek-V3, arXiv 2412.19437); unset: none."""
    mtp_loss_scaling_factor: PosFloat = 0.1
    """Weight of the mean loss of the multi-token prediction layers. A token predicted *k* further has the factor
    `seq_length` / (`seq_length` - *k*), as in Megatron-core."""
    make_vocab_size_divisible_by: PosInt = 128
    """Pad the rows of the embedding to a multiple of this, which keeps GEMMs aligned."""
    transformer_impl: Annotated[Literal["auto", "local", "transformer_engine"], EXECUTION] = "auto"
    """Layer implementation. `auto`: TransformerEngine if it is installed and the GPU supports it, but `local` with
    DeepSpeed and in fp32, which TransformerEngine would compute in TF32."""
    extra: JsonObject = Field(default={})
    """Further fields of megatron-core's `TransformerConfig`; those that the recipe already determines are refused."""


TRAINING_ONLY = frozenset(
    {
        "hybrid_layer_pattern",
        "seq_length", "make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout", "layer_drop",
        "init_method", "init_method_std", "transformer_impl", "mtp_loss_scaling_factor",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_router_dtype",
        "moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy", "moe_token_dispatcher_type",
    }
)  # fmt: skip
"""Keys of `Model` that say how it is trained, not what its weights compute: a model that is imported or exported may
have any value. `hybrid_layer_pattern` is read as other keys. Every other key needs an account in `hf/families/` and in
`recipe/rules/megatron_lm.py`."""
