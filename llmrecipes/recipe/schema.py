"""The recipe: what a run is, and nothing that can be derived from it.

Key names are Megatron's. Every key here changes what the program does; there are none for later.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PosInt = Annotated[int, Field(gt=0)]
NonNegInt = Annotated[int, Field(ge=0)]
PosFloat = Annotated[float, Field(gt=0)]
NonNegFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Beta = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Common rules: frozen, no unknown keys, no coercion between types, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


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
    """Longest sequence the model can place; unset: `seq_length`."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """How positions enter: a learned table, or rotary embeddings (arXiv 2104.09864)."""
    rotary_base: PosFloat = 10000.0
    """Base period of the rotary embedding."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's channels that is rotated."""
    rope_scaling: bool = False
    """Llama 3.1's frequency scaling of the rotary embedding for longer contexts."""
    rope_scaling_factor: PosFloat = 8.0
    """Factor of `rope_scaling`."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalisation in front of attention, MLP and output layer."""
    layernorm_epsilon: PosFloat = 1e-5
    """Added to the variance before the root."""
    activation_func: Literal["gelu", "silu", "squared_relu"] = "gelu"
    """Activation of the MLP."""
    gated_linear_unit: bool = False
    """Gate the MLP (arXiv 2002.05202); with `activation_func: silu` this is SwiGLU."""
    add_bias_linear: bool = True
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """Bias in the query-key-value projection alone (`add_bias_linear` gives it one anyway)."""
    qk_layernorm: bool = False
    """Normalise queries and keys before the product."""
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
    make_vocab_size_divisible_by: PosInt = 128
    """The embedding has the next multiple of this as rows, which keeps matrix products aligned."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation: TransformerEngine where it is installed and the GPU supports it (`auto`), or one by
    name. The one in use is printed and recorded."""


class Parallelism(Section):
    """How the work is spread over ranks. Data-parallel size is derived: world size over the model-parallel degrees."""

    use_distributed_optimizer: bool = True
    """Shard optimizer state and master weights over data-parallel ranks (ZeRO-1, arXiv 1910.02054)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass already runs; needs `overlap_grad_reduce` and the
    distributed optimizer."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32 also where the model is bf16 or fp16."""


class Train(Section):
    """Length, batch, precision and memory of the run."""

    train_iters: PosInt
    """Optimizer steps of the whole run."""
    micro_batch_size: PosInt
    """Sequences in one forward pass on one data-parallel rank."""
    global_batch_size: PosInt
    """Sequences in one optimizer step; a multiple of `micro_batch_size` × data-parallel size. The quotient is the
    gradient-accumulation count."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of weights and activations. bf16 and fp16 keep fp32 master weights; fp16 scales the loss dynamically."""
    seed: NonNegInt = 1234
    """Seed of initialisation, dropout and data order."""
    eval_interval: PosInt = 100
    """Steps between evaluations on the validation split; the last step is always evaluated."""
    eval_iters: PosInt = 10
    """Global batches of one evaluation."""
    log_interval: PosInt = 1
    """Steps between lines on the terminal and points in MLflow and TensorBoard; metrics.jsonl has every step."""
    label_smoothing: Probability = 0.0
    """Probability mass spread over the vocabulary in the training loss; the validation loss is never smoothed."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """Recompute core attention (`selective`) or whole layers (`full`) in the backward pass instead of keeping
    activations (arXiv 2205.05198)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """For `full`: recompute all layers in chunks (`uniform`) or the first ones only (`block`)."""
    recompute_num_layers: PosInt | None = None
    """For `full`: layers in a chunk (`uniform`) or recomputed layers (`block`)."""
    torch_compile: bool = False
    """Compile the transformer layers and the loss with torch.compile."""
    initial_loss_scale: PosFloat = 65536.0
    """First loss scale of fp16."""
    min_loss_scale: PosFloat = 1.0
    """Smallest loss scale of fp16; a run that falls below it stops."""
    loss_scale_window: PosInt = 1000
    """Steps without overflow after which the fp16 loss scale doubles."""
    hysteresis: PosInt = 2
    """Overflows after which the fp16 loss scale halves."""


class Optimizer(Section):
    """AdamW (arXiv 1711.05101); weight decay is left off norms and biases."""

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
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""


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

    type: Literal["stdlib", "text", "jsonl", "parquet", "hub"]
    """`stdlib`: the Python standard library's own source, one file a document, no network. `text`: a file a
    document. `jsonl`, `parquet`: a row a document. `hub`: a Hugging Face dataset."""
    path: str | None = None
    """File, folder or glob (`text`, `jsonl`, `parquet`), relative to the working directory; dataset name (`hub`)."""
    name: str | None = None
    """Configuration of a `hub` dataset."""
    split: str | None = None
    """Split of a `hub` dataset; unset: `train`. Our own train, valid and test splits are made from it by document
    hash."""
    revision: str | None = None
    """Commit of a `hub` dataset."""
    text_key: str = "text"
    """Column that holds the text (`jsonl`, `parquet`, `hub`)."""
    weight: PosFloat = 1.0
    """Share of training samples drawn from this source, relative to the other sources' weights."""


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
    """What is read, how it is tokenized, and how batches reach the model."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1, strict=False)] = (Source(type="stdlib"),)
    """Sources of documents."""
    tokenizer: Tokenizer = Tokenizer()
    """Tokenizer of all sources."""
    split: Annotated[tuple[PosFloat, NonNegFloat, NonNegFloat], Field(strict=False)] = (98.0, 1.0, 1.0)
    """Relative sizes of the train, valid and test splits. A document's split depends only on the hash of its text."""
    num_workers: NonNegInt = 1
    """Loader processes a rank; 0 reads in the training process."""
    prefetch_factor: PosInt = 4
    """Micro-batches each loader process keeps ready."""
    pin_memory: bool = True
    """Page-locked batches for asynchronous copies to a GPU; no effect on a CPU run."""


class Checkpoint(Section):
    """Saving. A checkpoint has weights, optimizer, scheduler, loss scaler, random states and data position."""

    save_interval: PosInt = 1000
    """Steps between checkpoints; the last step is always saved."""
    async_save: bool = True
    """Write in the background while training goes on."""
    most_recent_k: PosInt = 2
    """Newest checkpoints to keep."""
    keep_interval: PosInt | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""


class Tracking(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    mlflow: bool = True
    """Log to MLflow: `MLFLOW_TRACKING_URI` where it is set, else SQLite in the runs directory."""
    experiment: str | None = None
    """MLflow experiment; unset: the recipe's name."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    system_metrics_interval: PosFloat | None = 10.0
    """Seconds between samples of processor, memory, disk, network and GPU load in MLflow; null turns them off."""


class Recipe(Section):
    """One pretraining run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the recipe: lower-case letters, digits, `.`, `_` and `-`; runs are kept under it."""
    description: str = ""
    """One line for `llmrecipes list`."""
    model: Model
    parallelism: Parallelism = Parallelism()
    train: Train
    optimizer: Optimizer
    scheduler: Scheduler = Scheduler()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
