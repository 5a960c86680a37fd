"""The recipe: the definition of a run, without anything that can be derived from it.

Key names are Megatron's. Every key has an effect; none is reserved for later.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.data_steps import Steps
from llmrecipes.recipe.faults import Faults
from llmrecipes.recipe.plugins import DataStep, MetricSink
from llmrecipes.recipe.search_section import Search
from llmrecipes.recipe.section import (
    AlarmVariable,
    Beta,
    NonNegFloat,
    NonNegInt,
    PosFloat,
    PosInt,
    Probability,
    Section,
)
from llmrecipes.recipe.speed import Speed
from llmrecipes.recipe.zero import Zero


class EvalTasks(Section):
    """Tasks of lm-evaluation-harness that the training engine runs; training is not affected."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Tasks, groups or tags of the harness, or paths of task files. Their data is read before training starts."""
    interval: PosInt
    """Steps between these evaluations; the last step is always evaluated."""
    limit: PosInt | None = None
    """Documents of each task; unset: all."""
    num_fewshot: NonNegInt | None = None
    """Examples in the context; unset: the task's default."""


class Chat(Section):
    """Sources hold conversations, which the tokenizer's chat template turns into text; the loss is on answers only."""

    messages_key: str = "messages"
    """Column of conversations: a list of objects with `role` and `content`."""
    prompt_key: str = "prompt"
    """Column of questions, in a source without `messages_key`: a conversation of one question and its answer."""
    completion_key: str = "completion"
    """Column of the answers to `prompt_key`."""
    template: Literal["chatml", "llama3", "qwen3"] | None = None
    """Built-in chat template with marked answers, whose special tokens the tokenizer has; unset: that of the tokenizer,
    and ChatML for a `bpe` tokenizer."""
    chat_template: str | None = None
    """File of a Jinja chat template, in place of `template`."""
    max_length: PosInt | None = None
    """Longest conversation, in tokens; unset: what a sequence holds, `model.seq_length` + 1."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """Longer conversations: keep the first `max_length` tokens, or drop the whole conversation."""
    packing: bool = True
    """Several conversations in one sequence, none of which sees another; else one conversation in a sequence, and
    padding."""


Target = Literal[
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "experts.linear_fc1", "experts.linear_fc2",
]  # fmt: skip


class Lora(Section):
    """Low-rank adaptation (arXiv 2106.09685): a matrix W becomes W + `alpha` / `rank` · B · A, of which only A and B
    are trained and saved."""

    rank: PosInt
    """Rows of A and columns of B; at most the shorter side of every adapted matrix."""
    alpha: PosFloat | None = None
    """Scale of the adapters, divided by `rank`; unset: `rank`."""
    dropout: Probability = 0.0
    """Dropout of the adapters' inputs."""
    target_modules: Annotated[tuple[Target, ...], Field(min_length=1, strict=False)] | None = None
    """Adapted matrices, by Megatron's names: `linear_qkv`, `linear_proj`, `linear_fc1` and `linear_fc2` (of dense MLPs
    and shared experts), `linear_q_proj` or `linear_q_down_proj` and `linear_q_up_proj`, `linear_kv_down_proj` and
    `linear_kv_up_proj` of latent attention, `experts.linear_fc1` and `experts.linear_fc2` of routed experts, with
    separate adapters for every expert. Unset: all matrices of the model except those of routed experts."""

    @property
    def scale(self) -> float:
        """Factor of B · A."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank


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
    moe_router_bias_update_rate: PosFloat = 1e-3
    """Update step of the expert bias."""
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
        "seq_length", "make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout", "init_method",
        "init_method_std", "transformer_impl", "mtp_loss_scaling_factor", "moe_router_load_balancing_type",
        "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_router_dtype",
        "moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy", "moe_token_dispatcher_type",
    }
)  # fmt: skip
"""Keys of `Model` that say how it is trained, not what its weights compute: a model that is imported or exported may
have any value. Every other key needs an account in `hf/families/` and in `recipe/megatron_lm.py`."""


class Parallelism(Section):
    """How the work is spread over ranks. Data-parallel size is derived: world size over the model-parallel degrees."""

    tensor_model_parallel_size: PosInt = 1
    """Ranks that share every layer's matrices and heads (Megatron-LM, arXiv 1909.08053)."""
    pipeline_model_parallel_size: PosInt = 1
    """Stages that the layers are split into; micro-batches are pipelined through them (1F1B, arXiv 2104.04473,
    section 2.2.1)."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(gt=1)] | None = None
    """Interleaved chunks of layers per stage: a smaller bubble at the cost of more messages (interleaved schedule,
    arXiv 2104.04473, section 2.2.2); unset: one."""
    context_parallel_size: PosInt = 1
    """Ranks that share every sequence, each with two chunks of it (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    expert_model_parallel_size: PosInt = 1
    """Ranks that share the experts of a layer (GShard, arXiv 2006.16668). They are the tensor-, context- and
    data-parallel ranks, not additional ones (arXiv 2504.14960)."""
    expert_tensor_parallel_size: PosInt | None = None
    """Ranks that share each expert's matrices; unset: `tensor_model_parallel_size`."""
    sequence_parallel: bool = False
    """Split norms, dropout and the residual stream by tokens over the tensor-parallel ranks (arXiv 2205.05198)."""
    num_layers_in_first_pipeline_stage: PosInt | None = None
    """Layers of the first stage; stages without an explicit number share the remaining layers evenly."""
    num_layers_in_last_pipeline_stage: PosInt | None = None
    """Layers of the last stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage, which then has one layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer of the last stage, which then has one layer less."""
    pipeline_model_parallel_layout: Annotated[str, Field(min_length=1)] | None = None
    """What every stage has, in megatron-core's notation: stages are separated by `|`, with virtual stages chunk by
    chunk; `E` is the embedding, `t` a transformer layer, `m` a layer of multi-token prediction, `L` the loss, `t*3` is
    `ttt` and `(tt|)*2` is `tt|tt|`; unset: by the keys above, or evenly."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state and master weights over data-parallel ranks (ZeRO-1, arXiv 1910.02054)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass already runs; needs `overlap_grad_reduce` and the
    distributed optimizer."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32 even if the model is bf16 or fp16."""


RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe"]
"""What `recipe/recompute.py` has rules for."""


class Train(Section):
    """Length, batch, precision and memory of the run."""

    train_iters: PosInt
    """Optimizer steps of the run."""
    micro_batch_size: PosInt
    """Sequences in one forward pass on one data-parallel rank."""
    global_batch_size: PosInt
    """Sequences in one optimizer step; a multiple of `micro_batch_size` × data-parallel size. The quotient is the
    gradient-accumulation count."""
    pretrained: Annotated[str, Field(min_length=1)] | None = None
    """Start from the weights of a Hugging Face model: a folder, or `NAME` or `NAME@REVISION` on the Hub; unset: from
    initial values. `model` has to describe it, but may have a larger vocabulary."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of weights and activations. bf16 and fp16 keep fp32 master weights; fp16 scales the loss dynamically."""
    seed: NonNegInt = 1234
    """Seed of initialisation, dropout and data order."""
    eval_interval: PosInt = 100
    """Steps between evaluations on the validation split; the last step is always evaluated."""
    eval_iters: PosInt = 10
    """Global batches of one evaluation."""
    eval_tasks: EvalTasks | None = None
    """Tasks of lm-evaluation-harness during training; unset: none. Needs the extra `eval`."""
    log_interval: PosInt = 1
    """Steps between lines on the terminal and points in MLflow and TensorBoard; metrics.jsonl has every step."""
    label_smoothing: Probability = 0.0
    """Probability mass spread over the vocabulary in the training loss; the validation loss is never smoothed."""
    recompute_granularity: Literal["selective", "full", "auto"] | None = None
    """Recompute parts of layers (`selective`, see `recompute_modules`) or whole layers (`full`) in the backward pass
    instead of keeping activations (arXiv 2205.05198). Core attention is not recomputed where its kernel keeps no
    scores, as on all GPUs. `auto`: the least that fits the machine with 5% of its memory free."""
    recompute_method: Literal["uniform", "block"] | None = None
    """For `full`: recompute all layers in chunks (`uniform`) or the first ones only (`block`)."""
    recompute_num_layers: PosInt | None = None
    """For `full`: layers in a chunk (`uniform`) or recomputed layers (`block`)."""
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(min_length=1, strict=False)] | None = None
    """For `selective`: what is recomputed of each layer; unset: `core_attn`. `layernorm`: the norms before attention
    and MLP, where they are not fused with the next product. `mla_up_proj`: queries, keys and values of latent
    attention. `mlp`: dense MLPs. `moe_act`: the activation of experts (TransformerEngine only). `shared_experts`,
    `moe`: shared experts, or all of a layer's experts with router and dispatch."""
    torch_compile: bool = False
    """Compile the transformer layers and the loss with torch.compile; of layers with experts, the attention."""
    loss_chunk_tokens: NonNegInt | None = None
    """Tokens of which the output layer and the loss are computed at a time, with their gradients, so that the logits of
    a micro-batch are never in memory together; 0: all. Unset: all, unless their logits would take more than 1/16 of a
    GPU's memory."""
    initial_loss_scale: PosFloat = 65536.0
    """First loss scale of fp16."""
    min_loss_scale: PosFloat = 1.0
    """Smallest loss scale of fp16; a run that falls below it stops."""
    loss_scale_window: PosInt = 1000
    """Steps without overflow after which the fp16 loss scale doubles."""
    hysteresis: PosInt = 2
    """Overflows after which the fp16 loss scale halves."""
    exit_grace_seconds: PosFloat = 240.0
    """Seconds after a signal until ranks that have not saved and exited are killed; should be less than the scheduler's
    grace period (Kubernetes pods have 300 here) and more than a step and a save take. Slurm kills its tasks itself."""


class Optimizer(Section):
    """AdamW (arXiv 1711.05101); norms and biases have no weight decay."""

    lr: PosFloat
    """Peak learning rate."""
    min_lr: NonNegFloat = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NonNegFloat = 0.1
    """Decoupled weight decay."""
    adam_beta1: Beta = 0.9
    """Decay of the first moment."""
    adam_beta2: Beta = 0.95
    """Decay of the second moment."""
    adam_eps: PosFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 disables clipping."""
    ema_decay: Beta | None = None
    """Keep a moving average of the weights in fp32, which has this weight after each update, and the new weights the
    rest; saved in checkpoints, for `export --ema` and `generate --ema`. Unset: none."""


class Scheduler(Section):
    """Learning rate over steps: linear warm-up, then decay (megatron-core `OptimizerParamScheduler`)."""

    lr_decay_style: Literal["cosine", "linear", "constant", "WSD"] = "cosine"
    """Shape of the decay; WSD (arXiv 2404.06395) holds the peak and decays in the last `lr_wsd_decay_iters`."""
    lr_warmup_iters: NonNegInt = 0
    """Steps of linear warm-up from zero."""
    lr_decay_iters: PosInt | None = None
    """Step at which `optimizer.min_lr` is reached; unset: `train.train_iters`."""
    lr_wsd_decay_iters: PosInt | None = None
    """Length of WSD's final decay; needed for WSD."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "minus_sqrt"
    """Shape of WSD's final decay."""


class Source(Section):
    """One source of documents. Several are blended by weight."""

    type: Literal["stdlib", "docstrings", "text", "jsonl", "parquet", "hub"]
    """`stdlib`: the source code of Python's standard library, one document per file, no network. `docstrings`: its
    functions and what they do, as questions and answers (`data.chat`). `text`: one document per file. `jsonl`,
    `parquet`: one document per row. `hub`: a Hugging Face dataset."""
    path: str | None = None
    """File, folder or glob (`text`, `jsonl`, `parquet`), relative to the working directory; dataset name (`hub`)."""
    name: str | None = None
    """Configuration of a `hub` dataset."""
    split: str | None = None
    """Split of a `hub` dataset; unset: `train`. It is divided into our own train, valid and test splits by document
    hash."""
    revision: str | None = None
    """Commit of a `hub` dataset."""
    text_key: str = "text"
    """Column that holds the text (`jsonl`, `parquet`, `hub`)."""
    weight: PosFloat = 1.0
    """Share of training samples drawn from this source, relative to the other sources' weights."""
    max_tokens: PosInt | None = None
    """Tokens, of all splits, after which the source is not read further; a `hub` dataset is then streamed, not
    downloaded whole. Unset: all of it."""


class Tokenizer(Section):
    """How text becomes token ids."""

    type: Literal["bpe", "huggingface"] = "bpe"
    """`bpe`: a byte-level BPE of `model.vocab_size` tokens trained on the training split. `huggingface`: an
    existing one."""
    path: str | None = None
    """Name or folder of a Hugging Face tokenizer."""
    revision: str | None = None
    """Commit of a Hugging Face tokenizer."""


class Data(Section):
    """Sources, tokenizer and data loading."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1, strict=False)] = (Source(type="stdlib"),)
    """Sources of documents."""
    tokenizer: Tokenizer = Tokenizer()
    """Tokenizer of all sources."""
    chat: Chat | None = None
    split: Annotated[tuple[PosFloat, NonNegFloat, NonNegFloat], Field(strict=False)] = (98.0, 1.0, 1.0)
    """Relative sizes of the train, valid and test splits. A document's split depends only on the hash of its text."""
    min_characters: Annotated[PosInt | None, DataStep(target="llmrecipes.data.steps:min_characters")] = None
    """Drop documents with less text, of a conversation that of all its messages; unset: none."""
    max_characters: Annotated[PosInt | None, DataStep(target="llmrecipes.data.steps:max_characters")] = None
    """Drop documents with more text, of a conversation that of all its messages; unset: none."""
    steps: Steps = ()
    """What happens to a document before it is tokenized, in order; behind `min_characters` and `max_characters`."""
    num_workers: NonNegInt = 1
    """Loader processes per rank; 0 reads in the training process."""
    prefetch_factor: PosInt = 4
    """Micro-batches that each loader process prefetches."""
    pin_memory: bool = True
    """Pin the memory of batches for asynchronous copies to a GPU; no effect on a CPU run."""


class Checkpoint(Section):
    """Saving. A checkpoint has weights, optimizer, scheduler, loss scaler, random states and data position."""

    save_interval: PosInt = 1000
    """Steps between checkpoints; the last step is always saved."""
    async_save: bool = True
    """Write in the background while training continues."""
    most_recent_k: PosInt = 2
    """Newest checkpoints to keep, at least two, because one may turn out to be corrupt."""
    keep_interval: PosInt | None = None
    """Checkpoints whose step is a multiple of this are kept permanently."""
    max_failed_saves: PosInt = 3
    """Failed saves in a row after which a run ends (exit code 93); each of them is an alarm."""


class Tracking(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    mlflow: Annotated[
        bool, MetricSink(target="llmrecipes.tracking.mlflow.sink:MlflowSink", rehearsal=False, keeps_steps=True)
    ] = True
    """Log to MLflow: to `MLFLOW_TRACKING_URI` if set, else to SQLite in the runs directory."""
    experiment: str | None = None
    """MLflow experiment; unset: the recipe's name."""
    tensorboard: Annotated[
        bool, MetricSink(target="llmrecipes.tracking.tensorboard:TensorBoardSink", rehearsal=False, keeps_steps=True)
    ] = True
    """Write TensorBoard event files into the run directory."""
    wandb: Annotated[
        bool,
        MetricSink(
            target="llmrecipes.tracking.wandb:WandbSink",
            rehearsal=False,
            keeps_steps=True,
            extra="wandb",
            package="wandb",
        ),
    ] = False
    """Log to Weights & Biases. Needs the extra `wandb`; the API key comes from `WANDB_API_KEY`, never from a recipe."""
    wandb_project: str | None = None
    """W&B project; unset: the recipe's name."""
    wandb_exp_name: str | None = None
    """Name of the W&B run; unset: the run id."""
    wandb_entity: str | None = None
    """W&B user or team; unset: that of the API key."""
    wandb_save_dir: str | None = None
    """Folder for W&B's own files; unset: the run directory."""
    alarms: Annotated[
        bool, MetricSink(target="llmrecipes.tracking.alarms:AlarmSink", rehearsal=False, keeps_steps=False)
    ] = True
    """Send alarms to a webhook or a command, if the variable of one is set."""
    alarms_webhook: AlarmVariable | None = "LLMRECIPES_ALARM_WEBHOOK"
    """Environment variable with the URL of a webhook of Slack, Teams or what takes the same; null: none."""
    alarms_command: AlarmVariable | None = "LLMRECIPES_ALARM_COMMAND"
    """Environment variable with a command that gets alarms on its standard input, such as `mail -s alarm me@host`, and
    is run without a shell; null: none."""
    alarms_interval: PosFloat = 300.0
    """Seconds between two messages; alarms in between are gathered into the next."""
    system_metrics_interval: PosFloat | None = 10.0
    """Seconds between samples of CPU, memory, disk, network and GPU load in MLflow and W&B; null disables them."""


NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"


class Recipe(Section):
    """One pretraining run."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the recipe: lower-case letters, digits, `.`, `_` and `-`; runs are kept under it."""
    description: str = ""
    """One line for `llmrecipes list`."""
    engine: str = "auto"
    """Training engine: `auto`, `megatron` or `deepspeed`. `auto` selects deepspeed for `zero.stage` 2 and 3 and for
    offload, else megatron."""
    model: Model
    parallelism: Parallelism = Parallelism()
    zero: Zero | None = None
    lora: Lora | None = None
    train: Train
    speed: Speed = Speed()
    optimizer: Optimizer
    scheduler: Scheduler = Scheduler()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    tracking: Tracking = Tracking()
    search: Search | None = None
