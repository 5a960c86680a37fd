"""The recipe: the definition of a run, without anything that can be derived from it.

Key names are Megatron's. Every key has an effect; none is reserved for later.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from llmrecipes.recipe.sections.adversarial import Adversarial
from llmrecipes.recipe.sections.data_steps import Steps
from llmrecipes.recipe.sections.distill import Distill
from llmrecipes.recipe.sections.faults import Faults
from llmrecipes.recipe.sections.layout_section import LayoutKeys as LayoutKeys
from llmrecipes.recipe.sections.layout_section import NamedLayout, Switch
from llmrecipes.recipe.sections.model_section import TRAINING_ONLY as TRAINING_ONLY
from llmrecipes.recipe.sections.model_section import Model as Model
from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.optimizer_section import Optimizer as Optimizer
from llmrecipes.recipe.sections.optimizer_section import Scheduler as Scheduler
from llmrecipes.recipe.sections.plugins import DataStep, MetricSink
from llmrecipes.recipe.sections.preference_section import Dpo, Preference
from llmrecipes.recipe.sections.qat import Qat
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.recipe.sections.section import (
    EXECUTION,
    AlarmVariable,
    NonNegFloat,
    NonNegInt,
    PosFloat,
    PosInt,
    Probability,
    Section,
)
from llmrecipes.recipe.sections.source import Curriculum, Fim, Sources, StdlibSource, ValidSources
from llmrecipes.recipe.sections.source import Source as Source
from llmrecipes.recipe.sections.stage_section import Stage
from llmrecipes.recipe.sections.tokenizer_section import AnyTokenizer, BpeTokenizer


class EvalTasks(Section):
    """Tasks of lm-evaluation-harness that the training engine runs; they do not affect training."""

    half = EXECUTION

    tasks: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Tasks, groups or tags of the harness, or paths to task files. Their data is loaded before training."""
    interval: PosInt
    """Steps between task evaluations; the last step is always evaluated."""
    limit: PosInt | None = None
    """Maximum number of documents per task; unset: all."""
    num_fewshot: NonNegInt | None = None
    """Examples in the prompt; unset: the task's default."""


class EarlyStop(Section):
    """End the run when the monitored held-out loss stops improving; the last state is saved."""

    patience: PosInt
    """Consecutive evaluations without an improvement after which the run ends."""
    min_delta: NonNegFloat = 0.0
    """Amount by which a loss must fall below the lowest so far to count as an improvement, in nats per token."""


class Chat(Section):
    """Sources contain conversations, which the tokenizer's chat template turns into text; the loss is computed on
    answers only."""

    messages_key: str = "messages"
    """Column of conversations: a list of objects with `role` and `content`."""
    prompt_key: str = "prompt"
    """Column of questions, in sources without `messages_key`: each row is a conversation of one question and one
    answer."""
    completion_key: str = "completion"
    """Column of the answers to `prompt_key`."""
    template: Literal["chatml", "llama3", "qwen3"] | None = None
    """Built-in chat template; the tokenizer must have its special tokens. Unset: the tokenizer's template, or ChatML
    for a `bpe` tokenizer."""
    chat_template: str | None = None
    """Jinja chat template file to use instead of `template`."""
    max_length: PosInt | None = None
    """Maximum length of a conversation, in tokens; unset: what fits in a sequence, `model.seq_length` + 1."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What to do with longer conversations: keep the first `max_length` tokens, or drop the conversation."""
    packing: bool = True
    """Pack several conversations into a sequence, without attention between them; false: one conversation per sequence,
    padded."""
    preference: Preference | None = None
    """Rows are pairs of a better and a worse answer to a prompt, for `dpo`. Unset: rows are conversations."""


Target = Literal[
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "experts.linear_fc1", "experts.linear_fc2",
]  # fmt: skip


class Lora(Section):
    """Low-rank adaptation (arXiv 2106.09685): a matrix W becomes W + `alpha` / `rank` · B · A; only A and B are trained
    and saved."""

    rank: PosInt
    """Rank of the adapters: rows of A and columns of B; at most the shorter side of every adapted matrix."""
    alpha: PosFloat | None = None
    """Numerator of the adapter scale `alpha` / `rank`; unset: `rank`."""
    dropout: Probability = 0.0
    """Dropout on the adapters' inputs."""
    target_modules: Annotated[tuple[Target, ...], Field(min_length=1, strict=False)] | None = None
    """Matrices to adapt. `linear_q_` and `linear_kv_` are those of latent attention, `experts.` of routed experts,
    with separate adapters per expert. Unset: all matrices except those of routed experts."""

    @property
    def scale(self) -> float:
        """Factor of B · A."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank


class Train(Section):
    """Length, batch, precision and memory of the run."""

    train_iters: PosInt
    """Number of optimizer steps."""
    global_batch_size: PosInt
    """Sequences per optimizer step; must be a multiple of `micro_batch_size` × data-parallel size. The quotient is the
    number of gradient-accumulation steps."""
    rampup_batch_size: Annotated[tuple[PosInt, PosInt, PosInt], Field(strict=False)] | None = None
    """Grow the global batch: first size, increment, and number of samples over which it grows to `global_batch_size`;
    the learning-rate schedule then counts samples. Unset: a constant batch size."""
    step_batch_size_schedule: str | None = None
    """Global batch size by tokens seen, in megatron-core's notation: `0:768 250B:1536`; the last size must be
    `global_batch_size`. An alternative to `rampup_batch_size`."""
    pretrained: Annotated[str, Field(min_length=1)] | None = None
    """Hugging Face model to start from: a folder, or `NAME` or `NAME@REVISION` on the Hub; unset: random
    initialisation. `model` must describe it, but may have a larger vocabulary."""
    freeze: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Name patterns of parameters that are not trained, as in `optimizer.groups`: these have no gradient and no
    optimizer state. A stage may freeze others."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Data type of weights and activations. bf16 and fp16 keep fp32 master weights; fp16 scales the loss
    dynamically."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32 even if the model is bf16 or fp16."""
    reduce_scatter_with_fp32_accumulation: Switch = None
    """Send gradients in 16 bits and accumulate them in fp32; needs `grad_reduce_in_fp32: false`. Unset: off."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """8-bit format of the GEMMs in TransformerEngine's layers, on Hopper GPUs or newer: `e4m3`, or `hybrid` with
    gradients in `e5m2`. It rounds differently from bf16 and so changes the training. Unset: off."""
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8", "delayed"] | None = None
    """With `fp8`, which values share a scale: blocks of 128 values (`blockwise`), a tensor (`tensorwise`), or 32
    values (`mxfp8`, Blackwell); `delayed` is refused. Unset: `mxfp8` on Blackwell, otherwise `blockwise`."""
    first_last_layers_bf16: Switch = None
    """With `fp8`: compute the first and the last layers in bf16. Unset: off."""
    num_layers_at_start_in_bf16: NonNegInt | None = None
    """Number of first layers in bf16, with `first_last_layers_bf16`. Unset: 1."""
    num_layers_at_end_in_bf16: NonNegInt | None = None
    """Number of last layers in bf16, with `first_last_layers_bf16`. Unset: 1."""
    zero_quantized_weights: bool = False
    """Gather parameters in int8 (ZeRO++ qwZ); stage 3 on GPUs. The result differs from an unquantized run."""
    zero_quantized_gradients: bool = False
    """Reduce gradients in int4 between nodes (ZeRO++ qgZ); stage 3 in fp16, on two or more nodes with GPUs. The result
    differs from an unquantized run."""
    seed: NonNegInt = 1234
    """Seed of initialisation, dropout and data order."""
    eval_interval: PosInt = 100
    """Steps between evaluations on the validation split; the last step is always evaluated."""
    eval_at_start: Annotated[bool, EXECUTION] = False
    """Also evaluate before the first step. It does not count for `early_stop`, `target_loss` and
    `checkpoint.keep_best`."""
    eval_iters: PosInt = 10
    """Global batches per evaluation."""
    monitor: str | None = None
    """Held-out set whose loss `early_stop`, `target_loss` and `checkpoint.keep_best` use: a label of
    `data.valid_sources`, or with `data.multiple_validation_sets` the name of a source. Unset: the validation split, or
    the first set if there is none."""
    early_stop: EarlyStop | None = None
    target_loss: PosFloat | None = None
    """End the run after an evaluation with this loss or lower, in nats per token; unset: never."""
    eval_tasks: EvalTasks | None = None
    """Tasks of lm-evaluation-harness to run during training; unset: none. Needs the extra `eval`."""
    log_interval: Annotated[PosInt, EXECUTION] = 1
    """Steps between log lines on the terminal and points in MLflow and TensorBoard; metrics.jsonl has every step."""
    label_smoothing: Probability = 0.0
    """Probability mass spread over the vocabulary in the training loss; validation losses are never smoothed."""
    z_loss_coeff: NonNegFloat = 0.0
    """Weight of the z-loss, the squared log-sum-exp of a token's logits, in training; it keeps logits small (arXiv
    2204.02311 uses 1e-4)."""
    adversarial: Adversarial | None = None
    keep_zeros: bool = False
    """Keep weights of the layers' matrices that are exactly zero at zero, such as those removed by `llmrecipes
    prune`."""
    initial_loss_scale: PosFloat = 65536.0
    """Initial fp16 loss scale."""
    min_loss_scale: PosFloat = 1.0
    """Smallest fp16 loss scale; a run that falls below it stops."""
    loss_scale_window: PosInt = 1000
    """Steps without overflow after which the fp16 loss scale doubles."""
    hysteresis: PosInt = 2
    """Overflows after which the fp16 loss scale is halved."""
    elastic: Annotated[Annotated[tuple[PosInt, PosInt], Field(strict=False)] | None, EXECUTION] = None
    """Minimum and maximum number of data-parallel replicas: each start uses as many as are available. Global batch
    size and data order stay the same. A stage with another layout uses the ranks of as many replicas of the recipe's
    layout. Unset: the number of ranks changes only by hand."""
    exit_grace_seconds: Annotated[PosFloat, EXECUTION] = 240.0
    """Seconds from a signal until ranks that have not saved and exited are killed. Should exceed the time of a step
    and a save, and be less than the scheduler's grace period (300 s for pods)."""

    def without_stops(self) -> Train:
        """The same without what ends a run before its last step."""
        return self.model_copy(update={"monitor": None, "early_stop": None, "target_loss": None})

    @property
    def stop_rules(self) -> dict[str, Any]:
        """What ends a run before its last step."""
        return self.model_dump(mode="json", include={"monitor", "early_stop", "target_loss"})


class Data(Section):
    """Sources, tokenizer and data loading."""

    sources: Sources = (StdlibSource(type="stdlib"),)
    """Sources of documents."""
    valid_sources: ValidSources = ()
    """Held-out sets in addition to the validation split, each evaluated separately; their documents are not trained
    on."""
    multiple_validation_sets: Annotated[bool, EXECUTION] = False
    """Also evaluate the validation split of every source separately, on up to `train.eval_iters` batches each;
    reported as `valid_source_loss` by label."""
    tokenizer: AnyTokenizer = BpeTokenizer()
    """Tokenizer of all sources."""
    chat: Chat | None = None
    fim: Fim = Fim()
    curriculum: Curriculum | None = None
    split: Annotated[tuple[PosFloat, NonNegFloat, NonNegFloat], Field(strict=False)] = (98.0, 1.0, 1.0)
    """Relative sizes of the train, valid and test splits. A document's split depends only on the hash of its text."""
    min_characters: Annotated[PosInt | None, DataStep(target="llmrecipes.data.steps.steps:min_characters")] = None
    """Drop documents, or conversations by all their messages, with less text than this. Unset: no minimum."""
    max_characters: Annotated[PosInt | None, DataStep(target="llmrecipes.data.steps.steps:max_characters")] = None
    """Drop documents, or conversations by all their messages, with more text than this. Unset: no maximum."""
    steps: Steps = ()
    """Cleaning steps applied to a document before it is tokenized, in order, after `min_characters` and
    `max_characters`."""
    max_unreadable: Probability = 0.0
    """Fraction of a source's files that may be damaged: the rest of a damaged file is skipped, and the file is
    counted. With more, `prepare` fails."""
    num_workers: Annotated[NonNegInt, EXECUTION] = 1
    """Loader processes per rank; 0: read in the training process."""
    prefetch_factor: Annotated[PosInt, EXECUTION] = 4
    """Micro-batches that each loader process prefetches."""
    pin_memory: Annotated[bool, EXECUTION] = True
    """Pin the memory of batches for asynchronous copies to a GPU; no effect on CPU runs."""


class Checkpoint(Section):
    """Saving. A checkpoint contains weights, optimizer, scheduler, loss scaler, random states and data position."""

    half = EXECUTION

    save_interval: PosInt = 1000
    """Steps between checkpoints; the last step is always saved."""
    async_save: bool = True
    """Write checkpoints in the background while training continues."""
    most_recent_k: PosInt = 2
    """Number of newest checkpoints to keep; at least 2, because one may turn out to be corrupt."""
    keep_interval: PosInt | None = None
    """Keep checkpoints whose step is a multiple of this permanently; unset: none."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest held-out loss (`train.monitor`); `RUN@best` names it."""
    also_export: Literal["hf"] | None = None
    """Also write saved checkpoints as Hugging Face folders, `exported/step-N` in the run's directory, in the
    background; kept as long as the checkpoints."""
    also_export_interval: Annotated[PosInt | None, OnlyWith("also_export")] = None
    """Steps between these folders, a multiple of `save_interval`; the last checkpoint is always exported. Unset: every
    checkpoint."""
    copy_to: Annotated[str, Field(max_length=1024)] | None = None
    """Copy saved checkpoints to an object store in the background, such as `s3://bucket/runs`; a run that finds newer
    ones there than in its directory continues from them."""
    max_failed_saves: PosInt = 3
    """Consecutive failed saves after which a run ends (exit code 93); every failed save raises an alarm."""
    non_persistent_save_interval: Annotated[PosInt | None, OnlyWith("non_persistent_local_ckpt_dir")] = None
    """Steps between local checkpoints: each rank writes its part to a disk of its node, with a copy on the next
    node; the newest two are kept. Unset: none."""
    non_persistent_local_ckpt_dir: Annotated[str | None, OnlyWith("non_persistent_save_interval")] = None
    """Folder for local checkpoints on a disk of each node; `{node}` is replaced by the node's number."""

    def of_short_run(self, save_interval: int) -> Checkpoint:
        """For a run that nobody goes on with: nothing is kept for long, copied or exported."""
        unused = ("keep_interval", "keep_best", "also_export", "also_export_interval", "copy_to",
                  "non_persistent_save_interval", "non_persistent_local_ckpt_dir")  # fmt: skip
        defaults = {name: type(self).model_fields[name].default for name in unused}
        return self.model_copy(update={**defaults, "save_interval": save_interval})


class Tracking(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    half = EXECUTION

    mlflow: Annotated[
        bool, MetricSink(target="llmrecipes.tracking.mlflow.sink:MlflowSink", rehearsal=False, keeps_steps=True)
    ] = True
    """Log to MLflow: to `MLFLOW_TRACKING_URI` if set, otherwise to SQLite in the runs directory."""
    experiment: str | None = None
    """MLflow experiment; unset: the recipe's name."""
    tensorboard: Annotated[
        bool, MetricSink(target="llmrecipes.tracking.tensorboard:TensorBoardSink", rehearsal=False, keeps_steps=True)
    ] = True
    """Write TensorBoard event files into the run directory."""
    wandb: Annotated[
        bool,
        MetricSink(
            target="llmrecipes.tracking.wandb:WandbSink", rehearsal=False, keeps_steps=True,
            extra="wandb", package="wandb",
        ),
    ] = False  # fmt: skip
    """Log to Weights & Biases. Needs the extra `wandb`; the API key comes from `WANDB_API_KEY`, never from a recipe."""
    wandb_project: str | None = None
    """W&B project; unset: the recipe's name."""
    wandb_exp_name: str | None = None
    """Name of the W&B run; unset: the run id."""
    wandb_entity: str | None = None
    """W&B user or team; unset: the default of the API key."""
    wandb_save_dir: str | None = None
    """Folder for W&B's local files; unset: the run directory."""
    prometheus: Annotated[
        bool,
        MetricSink(
            target="llmrecipes.tracking.prometheus:PrometheusSink", rehearsal=False, keeps_steps=False,
            extra="prometheus", package="prometheus_client",
        ),
    ] = False  # fmt: skip
    """Serve the latest values to Prometheus at 127.0.0.1, from the first rank. Needs the extra `prometheus`."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] = 9464
    """Port of `http://127.0.0.1:PORT/metrics`; concurrent runs on a machine need different ports."""
    alarms: Annotated[
        bool, MetricSink(target="llmrecipes.tracking.alarms:AlarmSink", rehearsal=False, keeps_steps=False)
    ] = True
    """Send alarms to a webhook or a command, if its environment variable is set."""
    alarms_webhook: AlarmVariable | None = "LLMRECIPES_ALARM_WEBHOOK"
    """Environment variable with the URL of a Slack or Teams webhook, or a compatible one; null: none."""
    alarms_command: AlarmVariable | None = "LLMRECIPES_ALARM_COMMAND"
    """Environment variable with a command that receives alarms on standard input, such as `mail -s alarm me@host`,
    run without a shell; null: none."""
    alarms_interval: PosFloat = 300.0
    """Minimum number of seconds between messages; alarms in between are collected in the next one."""
    energy_model: Literal["codecarbon"] | None = None
    """Model that estimates the energy of memory, and of processors without an energy counter; needs the extra `energy`.
    Unset: no estimate."""
    kg_co2_per_kwh: PosFloat | None = None
    """Carbon intensity of the electricity, if the cluster profile's `costs` has none; unset: no emissions are
    reported then."""
    system_metrics_interval: PosFloat | None = 10.0
    """Seconds between samples of CPU, memory, disk, network and GPU load in MLflow and W&B; null: none."""
    loss_by_source: bool = False
    """Also report the training loss by source, as `source_loss` by label, over about ten steps at a time."""
    layers_interval: PosInt | None = None
    """Steps between measurements of every layer: norms of gradients, weights and updates, size of its output,
    largest attention logit, histograms. Rounded up to a multiple of `train.log_interval`; unset: none."""


NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
MOST_LAYOUTS = 64
"""Each is checked whenever the recipe is read."""


class Recipe(Section):
    """One pretraining run."""

    name: Annotated[str, Field(pattern=NAME), EXECUTION]
    """Name of the recipe: lower-case letters, digits, `.`, `_` and `-`. Also the folder of its runs."""
    description: Annotated[str, EXECUTION] = ""
    """One-line description for `llmrecipes list`."""
    model: Model
    lora: Lora | None = None
    distill: Distill | None = None
    dpo: Dpo | None = None
    qat: Qat | None = None
    train: Train
    optimizer: Optimizer
    scheduler: Scheduler = Scheduler()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    tracking: Tracking = Tracking()
    search: Search | None = None
    stages: Annotated[tuple[Stage, ...], Field(strict=False)] = ()
    """Parts of the run with different values of some keys, in order; unset: a single stage."""
    layout: LayoutKeys = LayoutKeys()
    layouts: Annotated[dict[Annotated[str, Field(pattern=NAME)], NamedLayout], EXECUTION] = Field(
        default={}, max_length=MOST_LAYOUTS
    )
    """Named layouts: keys of `layout`. `layout=NAME` on the command line replaces degrees, micro-batch and
    recomputation of the file by those of the layout."""

    def with_layout(self, **keys: Any) -> Self:
        """The same with other values of keys of `layout`."""
        return self.model_copy(update={"layout": self.layout.model_copy(update=keys)})
