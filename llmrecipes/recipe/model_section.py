"""The `model` section of a recipe: the shape and the arithmetic of the transformer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import NonNegFloat, PosFloat, PosInt, Probability, Section


class Model(Section):
    """Shape and arithmetic of the transformer (megatron-core `TransformerConfig` and `GPTModel`)."""

    num_layers: PosInt
    """Transformer layers."""
    hidden_size: PosInt
    """Width of the residual stream."""
    num_attention_heads: PosInt
    """Query heads; must divide `hidden_size` unless `kv_channels` is set."""
    seq_length: PosInt
    """Tokens in one training sequence."""
    vocab_size: PosInt
    """Token ids of the tokenizer: the size a `bpe` tokenizer is trained to, an upper bound for a Hugging Face
    one. The embedding is padded up to `make_vocab_size_divisible_by`."""
    ffn_hidden_size: PosInt | None = None
    """Width of the MLP; unset: 4 × `hidden_size`."""
    num_query_groups: PosInt | None = None
    """Key/value heads of grouped-query attention (arXiv 2305.13245); unset: one for every query head."""
    kv_channels: PosInt | None = None
    """Channels of one head; unset: `hidden_size` / `num_attention_heads`."""
    max_position_embeddings: PosInt | None = None
    """Largest number of positions; unset: `seq_length`."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn"] = "learned_absolute"
    """Position embedding: a learned table, rotary embeddings (arXiv 2104.09864), or rotary embeddings scaled to longer
    contexts by YaRN (arXiv 2309.00071). Latent attention has `rope` here, and YaRN as `rope_type`."""
    rotary_base: PosFloat = 10000.0
    """Base period of the rotary embedding."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's channels that is rotated."""
    rope_scaling: bool = False
    """Llama 3.1's frequency scaling of the rotary embedding for longer contexts."""
    rope_scaling_factor: PosFloat = 8.0
    """Factor of `rope_scaling`."""
    rotary_seq_len_interpolation_factor: PosFloat | None = None
    """Positions are divided by this before the rotary embedding (linear interpolation, arXiv 2306.15595)."""
    yarn_rotary_scaling_factor: PosFloat | None = None
    """YaRN: the context is this many times longer; needs `position_embedding_type: yarn`, as the keys below."""
    yarn_original_max_position_embeddings: PosInt | None = None
    """YaRN: longest sequences before the extension."""
    yarn_beta_fast: PosFloat = 32.0
    """YaRN: channels that turn more often than this in the original context are left as they are."""
    yarn_beta_slow: PosFloat = 1.0
    """YaRN: channels that turn less often than this in the original context are fully interpolated."""
    yarn_mscale: NonNegFloat = 1.0
    """YaRN: queries and keys are multiplied by m(`yarn_mscale`) / m(`yarn_mscale_all_dim`), where m(x) = 0.1 x
    ln(`yarn_rotary_scaling_factor`) + 1."""
    yarn_mscale_all_dim: NonNegFloat = 0.0
    """YaRN: the divisor of `yarn_mscale`."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: round the bounds that follow from `yarn_beta_fast` and `yarn_beta_slow` to whole channels."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalisation in front of attention, MLP and output layer."""
    layernorm_epsilon: PosFloat = 1e-5
    """Added to the variance before the root."""
    activation_func: Literal["gelu", "gelu_tanh", "silu", "squared_relu"] = "gelu"
    """Activation of the MLP; `gelu_tanh` is the approximation that GPT-2 was trained with."""
    gated_linear_unit: bool = False
    """Gate the MLP (arXiv 2002.05202); with `activation_func: silu` this is SwiGLU."""
    add_bias_linear: bool = True
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """Bias in the query-key-value projection only (`add_bias_linear` includes it)."""
    qk_layernorm: bool = False
    """Normalise queries and keys before their dot product."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output layer to the word embedding."""
    attention_dropout: Probability = 0.0
    """Dropout of attention probabilities."""
    hidden_dropout: Probability = 0.0
    """Dropout of the residual branches and the embedding."""
    layer_drop: Probability = 0.0
    """Probability that a micro-batch leaves out the last layer in training (stochastic depth, arXiv 1603.09382;
    LayerDrop, arXiv 1909.11556); of layer l of L it is l / L of this."""
    init_method: Literal["normal", "xavier_uniform", "kaiming_normal"] = "normal"
    """Initialisation of weight matrices; output projections are always scaled by 1/sqrt(2 × `num_layers`)
    (GPT-2). Embeddings are normal."""
    init_method_std: PosFloat = 0.02
    """Standard deviation of `normal` and of the embeddings."""
    use_mup: bool = False
    """Maximal-update parametrisation (arXiv 2203.03466): initialisation, learning rates, Adam's epsilon, attention
    scores and logits are scaled by width, so that a learning rate found on a narrow model serves a wide one."""
    mup_base_hidden_size: PosInt | None = None
    """`hidden_size` of the narrow model that was tuned; unset: this model's own."""
    mup_embedding_mult: PosFloat = 1.0
    """Factor of the embedding's output."""
    mup_output_mult: PosFloat = 1.0
    """Factor of the logits; 1: `mup_base_hidden_size` / `hidden_size`."""
    mup_base_head_dim: PosFloat | None = None
    """Channels of a head of the narrow model: attention scores are scaled by sqrt(`mup_base_head_dim`) /
    `kv_channels`^`mup_attn_scale_power`, which is the usual scale at that width; unset: 1."""
    mup_attn_scale_power: PosFloat = 1.0
    """Power of `kv_channels` in the scale of attention scores; 0.5 is the usual one."""
    num_moe_experts: PosInt | None = None
    """Experts of a mixture-of-experts layer (arXiv 1701.06538), over all ranks; unset: a dense model."""
    moe_router_topk: PosInt = 2
    """Experts per token."""
    moe_ffn_hidden_size: PosInt | None = None
    """Width of one expert; unset: `ffn_hidden_size`."""
    moe_shared_expert_intermediate_size: PosInt | None = None
    """Total width of the shared experts, which process every token in addition to the routed ones (DeepSeekMoE, arXiv
    2401.06066); unset: none."""
    moe_layer_freq: PosInt | Annotated[list[Literal[0, 1]], Field(min_length=1)] = 1
    """Which layers have experts: every N-th, from the first; or a list with 1 (experts) or 0 (dense) for each layer."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = "aux_loss"
    """Tokens over which the auxiliary balancing loss is computed: a micro-batch (`aux_loss`; GShard, arXiv
    2006.16668), each sequence (`seq_aux_loss`; DeepSeek-V3, arXiv 2412.19437, section 2.1.2), the global batch
    so far (`global_aux_loss`; arXiv 2501.11873); or `none`."""
    moe_aux_loss_coeff: NonNegFloat = 0.0
    """Weight of the auxiliary loss; Switch Transformer (arXiv 2101.03961) uses 0.01."""
    moe_z_loss_coeff: NonNegFloat | None = None
    """Weight of the router z-loss, which keeps its logits small (ST-MoE, arXiv 2202.08906, which uses 0.001); unset:
    none."""
    moe_router_enable_expert_bias: bool = False
    """Balance without a loss: a bias per expert, used only for the top-k selection, is increased for underloaded and
    decreased for overloaded experts (arXiv 2408.15664); needs `moe_router_score_function: sigmoid`."""
    moe_router_bias_update_rate: NonNegFloat = 1e-3
    """Update step of the expert bias; 0: it stays as it is."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Maps router logits to scores; sigmoid as in DeepSeek-V3."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax over all experts before the top-k selection, not over the selected ones after it."""
    moe_router_topk_scaling_factor: PosFloat | None = None
    """Factor of the selected scores; unset: none."""
    moe_router_num_groups: PosInt | None = None
    """Groups of experts for group-limited routing (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)."""
    moe_router_group_topk: PosInt | None = None
    """Groups from which a token's experts are selected; needs `moe_router_num_groups`."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Precision of routing and of combining the experts' outputs; null: the model's."""
    moe_input_jitter_eps: Probability | None = None
    """Multiply the router's input by random factors from 1 - eps to 1 + eps in training (Switch Transformer)."""
    moe_expert_capacity_factor: PosFloat | None = None
    """Capacity of an expert, as a multiple of an even share of tokens; tokens beyond it are dropped (GShard). Unset: no
    token is dropped."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity, so that all shapes are known before routing."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # noqa: S105 - no password
    """Which tokens a full expert drops: those with the smallest scores, or the last ones."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"  # noqa: S105 - no password
    """How tokens reach experts on other ranks: each is sent to its experts only, or all are gathered everywhere; `flex`
    sends them with DeepEP's kernels (`speed.moe_flex_dispatcher_backend`), which the image must have."""
    multi_latent_attention: bool = False
    """Multi-head latent attention: keys and values from a compressed vector (DeepSeek-V2, arXiv 2405.04434, section
    2.1). Its heads have their own sizes, below; needs `position_embedding_type: rope`."""
    q_lora_rank: PosInt | None = None
    """Width of the compressed query; unset: queries are not compressed."""
    kv_lora_rank: PosInt = 512
    """Width of the compressed keys and values."""
    qk_head_dim: PosInt = 128
    """Channels of a query or key head without position embedding."""
    qk_pos_emb_head_dim: PosInt = 64
    """Rotated channels of a query head, and of the rotated key that all heads share."""
    v_head_dim: PosInt = 128
    """Channels of a value head."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """Rotation of latent attention: unscaled, or scaled to longer contexts by YaRN (arXiv 2309.00071)."""
    rotary_scaling_factor: PosFloat = 40.0
    """YaRN of latent attention: the context is this many times longer; needs `rope_type: yarn`, as the keys below."""
    original_max_position_embeddings: PosInt = 4096
    """YaRN of latent attention: longest sequences before the extension."""
    beta_fast: PosFloat = 32.0
    """YaRN of latent attention: as `yarn_beta_fast`."""
    beta_slow: PosFloat = 1.0
    """YaRN of latent attention: as `yarn_beta_slow`."""
    mscale: NonNegFloat = 1.0
    """YaRN of latent attention: rotated queries and keys are multiplied by m(`mscale`) / m(`mscale_all_dim`), where
    m(x) = 0.1 x ln(`rotary_scaling_factor`) + 1."""
    mscale_all_dim: NonNegFloat = 0.0
    """YaRN of latent attention: attention scores are multiplied by m(`mscale_all_dim`)²."""
    mtp_num_layers: PosInt | None = None
    """Multi-token prediction: extra layers after the last that each predict one token further, in training only
    (DeepSeek-V3, arXiv 2412.19437, section 2.2); unset: none."""
    mtp_loss_scaling_factor: PosFloat = 0.1
    """Weight of the mean loss of the multi-token prediction layers."""
    make_vocab_size_divisible_by: PosInt = 128
    """Rows of the embedding are rounded up to a multiple of this, which keeps GEMMs aligned."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation: `auto` is TransformerEngine if it is installed and the GPU supports it, but `local` with
    DeepSpeed and in fp32, which TransformerEngine multiplies in TF32. The one in use is printed and recorded."""


TRAINING_ONLY = frozenset(
    {
        "seq_length", "make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout", "layer_drop",
        "init_method", "init_method_std", "transformer_impl", "mtp_loss_scaling_factor",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_router_dtype",
        "moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy", "moe_token_dispatcher_type",
    }
)  # fmt: skip
"""Keys of `Model` that say how it is trained, not what its weights compute: a model that is imported or exported may
have any value. Every other key needs an account in `hf/families/` and in `recipe/megatron_lm.py`."""
