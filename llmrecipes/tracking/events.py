"""Events that the training loop reports, and the base class of their sinks."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console

    from llmrecipes.recipe.schema import Recipe


RunStatus = Literal["FINISHED", "KILLED", "FAILED"]
"""How a run ends, in MLflow's terms: finished, stopped from outside with its state saved, or failed."""


TASKS_EVALUATED = "tasks_evaluated"
"""Event of the note with `eval/<task>/<metric>`."""
MEASURED = "measured"
"""Event of the note at the end of a start: `measured/…` beside `predicted/…` of the plan."""
STARTED = "started"
"""Event of the note that a start, or going back to a checkpoint, begins with: what the earlier attempt had reached."""
DECONTAMINATED = "decontaminated"
"""Event of the note with `decontaminated/<file>`: documents dropped, because they have text of an evaluation file."""
ENERGY = "energy"
"""Event of the note at the end of a start: what the run has used (`tracking.energy`)."""
ENDED_EARLY = "ended_early"
"""Event of the note of a run that ends before its last step by its held-out loss."""
METRIC_NOTES = (TASKS_EVALUATED, MEASURED, DECONTAMINATED, ENERGY)
"""Events of notes whose details are metrics: trackers have their numbers as such."""
VALID = ("valid_loss", "valid_bits_per_byte", "valid_token_accuracy")
"""Metrics of an evaluation that trackers show as a group."""


BY_SOURCE = (
    "source_loss",
    "valid_source_loss",
    "valid_source_bits_per_byte",
    "valid_source_token_accuracy",
    "rewards",
    "valid_rewards",
)
"""Metrics by the label of a source or held-out set, and rewards of pairs by TRL's names."""


def source_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name: `valid_source_loss/code`, `rewards/margins` …

    Args:
        values: a line of metrics.jsonl, or the fields of `StepMetrics` or `EvalMetrics`.
    """
    return {
        f"{key}/{label}": float("nan") if value is None else float(value)
        for key in BY_SOURCE
        for label, value in (values.get(key) or {}).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBalance:
    """How evenly the router of one layer spread the tokens of a step over its experts.

    Attributes:
        layer: layer number, from 1; multi-token prediction layers follow the others.
        tokens_per_expert: tokens that each expert processed, summed over ranks.
        imbalance: largest over mean tokens per expert; 1 is even, the number of experts means that one gets all.
        dropped: token-expert assignments dropped because the expert was full; a token has top-k assignments.
        entropy: entropy of the router's distribution over all experts, in nats, mean over tokens; at most log(experts).
        z_loss: squared log-sum-exp of the router's logits, mean over tokens (arXiv 2202.08906), without coefficient.
    """

    layer: int
    tokens_per_expert: tuple[int, ...]
    imbalance: float
    dropped: int
    entropy: float
    z_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        step: optimizer steps done, counted from 1.
        loss: training loss in nats per token, averaged over the tokens of the global batch.
        grad_norm: global L2 norm of the gradients before clipping.
        lr: learning rate this step used.
        consumed_samples: place in the order of sequences: those consumed since step 0, and those left out.
        consumed_tokens: tokens consumed since step 0.
        step_seconds: wall-clock seconds of this step.
        tokens_per_second: tokens of the global batch over `step_seconds`.
        loss_scale: fp16 loss scale; None for other types.
        global_batch_size: samples of the step; None: all steps of the run have the recipe's.
        stage: its number, from 1; None: the run has none.
        skipped: the update was left out: the fp16 gradients overflowed (then `grad_norm` is NaN), or at a spike.
        memory_bytes: peak bytes on the GPU, or resident bytes of the process on a CPU.
        mfu: model FLOPs utilisation, 0 to 1, counting full attention; None if the peak is unknown.
        mfu_causal: the same counting only the causal half of attention.
        moe_aux_loss: auxiliary balancing loss without its coefficient, mean over layers; None if there is none.
        experts: balance of each layer with experts; None if it was not counted.
        token_accuracy: share of the tokens whose label was the likeliest token, 0 to 1; None if it was not counted.
        hidden_distance: between the hidden states of student and teacher (`distill.layers`), without its weight, mean
            over pairs of layers and tokens; None if there is none, or the step does not report it.
        source_loss: `loss` of each source by label, averaged over its tokens in the steps since the last that has it
            (`tracking.loss_by_source`); a source without a token is missing; None: not reported in this step.
        rewards: of pairs (`dpo`), means over the global batch: `chosen` and `rejected`, beta times what an answer has
            gained on the reference, `margins` between them, and `accuracies`, the share of pairs with a positive one.
        ranks: spread of each number over ranks (`tracking.spread`), by its name; of the steps since the last report up
            to the one before this; None: no report.
        nodes: the same over nodes.
        energy: joules and tokens a joule of these steps, and of the run so far joules, kWh and kg CO2
            (`tracking.energy`); None: nothing is known.
        layers: `grad_norm` (before clipping), `weight_norm` (before the update), `update_norm`, `activation_rms` and
            `attention_logit` of the step before this one: of each kind of parameter a value for each layer, None where
            there is none, and of `embedding`, `output`, `final_norm` a value; None: they were not measured.
        histograms: of the same step, `gradient` (before clipping) and `weight` (before the update): of each kind over
            all layers, counts by sign and power of two (`negative`, `zero`, `positive`, the first of 2^`low`).
        time: seconds since the epoch.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    consumed_tokens: int
    step_seconds: float
    tokens_per_second: float
    loss_scale: float | None = None
    global_batch_size: int | None = None
    stage: int | None = None
    skipped: bool = False
    memory_bytes: int = 0
    mfu: float | None = None
    mfu_causal: float | None = None
    moe_aux_loss: float | None = None
    experts: tuple[LayerBalance, ...] | None = None
    token_accuracy: float | None = None
    hidden_distance: float | None = None
    source_loss: Mapping[str, float] | None = None
    rewards: Mapping[str, float] | None = None
    ranks: Mapping[str, Mapping[str, Any]] | None = None
    nodes: Mapping[str, Mapping[str, Any]] | None = None
    energy: Mapping[str, Any] | None = None
    layers: Mapping[str, Mapping[str, Any]] | None = None
    histograms: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One evaluation on the validation split after `step` steps.

    Attributes:
        valid_loss: nats per token.
        valid_bits_per_byte: bits per byte of the text, comparable between tokenizers; None if the bytes are unknown.
        eval_seconds: wall-clock seconds of the evaluation.
        valid_source_loss: nats per token of each set of `data.valid_sources`, by label, and with
            `data.multiple_validation_sets` of the valid split of each source. Without a valid split the first of them
            is `valid_loss` too.
        valid_source_bits_per_byte: the same in bits per byte.
        valid_token_accuracy: share of the tokens whose label was the likeliest token; None: the engine does not count.
        valid_source_token_accuracy: the same of each set.
        valid_rewards: as `StepMetrics.rewards`.
    """

    step: int
    valid_loss: float
    consumed_samples: int
    consumed_tokens: int
    eval_seconds: float
    valid_bits_per_byte: float | None = None
    valid_source_loss: Mapping[str, float] | None = None
    valid_source_bits_per_byte: Mapping[str, float] | None = None
    valid_token_accuracy: float | None = None
    valid_source_token_accuracy: Mapping[str, float] | None = None
    valid_rewards: Mapping[str, float] | None = None
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An event at a step: a checkpoint, a failed save, a skipped update.

    Attributes:
        event: short name in snake case, such as `checkpoint_saved`.
        details: JSON-compatible values.
        alarm: needs the user's attention.
    """

    step: int
    event: str
    details: Mapping[str, Any] = field(default_factory=dict)
    alarm: bool = False
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class DatasetUse:
    """Documents of a source that a run reads.

    Attributes:
        name: of the source, as in metrics by source.
        digest: of its tokens, in hexadecimal digits.
        use: `training` or `validation`.
        source: path, URL or name of its dataset, without secrets; empty for what is on every machine.
        kind: type of the source in a recipe.
        counts: documents, tokens and bytes of text; and for training the weight in the blend.
    """

    name: str
    digest: str
    use: str
    source: str
    kind: str
    counts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of a run, or of another attempt of it, from which a sink opens.

    Attributes:
        run_dir: `<runs_dir>/<recipe>/<run-id>`, with `documents` and logs/.
        resumed_step: step of the checkpoint that this attempt continues, 0 for a new run. What an earlier attempt
            recorded of later steps does not count: a sink that keeps steps drops them.
        total_steps: the last step.
        tags: tags of the run in a tracker, without secrets.
        documents: names of files in `run_dir` that describe the run.
        console: the user's terminal or log.
        datasets: what it reads, in the order of the recipe.
        messages: lines for the user from other threads, which must not print into a progress bar.
    """

    recipe: Recipe
    run_dir: Path
    runs_dir: Path
    resumed_step: int
    total_steps: int
    tags: Mapping[str, str]
    documents: tuple[str, ...]
    console: Console
    messages: SimpleQueue[str]
    datasets: tuple[DatasetUse, ...] = ()


class Sink(ABC):
    """Receives a run's events, called from the training loop on one rank: it must not block.

    `recipe.plugins.MetricSink` declares a sink with its key in a recipe.
    """

    @classmethod
    @abstractmethod
    def of(cls, start: RunStart) -> Self:
        """Open it. An error disables the sink for this attempt, with one warning."""

    @abstractmethod
    def step(self, metrics: StepMetrics) -> None:
        """Every optimizer step; the sink applies `train.log_interval` itself."""

    @abstractmethod
    def eval(self, metrics: EvalMetrics) -> None:
        """An evaluation on the validation split."""

    @abstractmethod
    def note(self, note: Note) -> None:
        """An event, without secrets."""

    def end(self, status: RunStatus) -> None:  # noqa: B027 - most sinks have nothing to begin
        """Start the work that `close` waits for; called for all sinks before the first `close`."""

    @abstractmethod
    def close(self, status: RunStatus) -> None:
        """The last call."""


STEPS_BETWEEN = 10
"""Steps between measurements, which compute every router's probabilities once more and sum counts over all ranks."""
MOST_CURVES = 16
"""Up to this many experts of a layer get a curve each; with more, only minimum and maximum are drawn."""


def is_measured(step: int, recipe: Recipe) -> bool:
    """Whether the balance is measured in a step: in every tenth, in the first and in the last.

    With a `train.log_interval` only steps that are logged count: every tenth is then the next multiple of it.
    """
    shown = recipe.train.log_interval
    last = recipe.train.train_iters
    stride = -(-STEPS_BETWEEN // shown) * shown
    return step % stride == 0 or step in (shown, last)


def is_sampled(step: int, recipe: Recipe) -> bool:
    """Whether layers are measured in a step, for the record of the next: one that is logged, as in `is_measured`."""
    interval = recipe.tracking.layers_interval
    shown = recipe.train.log_interval
    return interval is not None and (step + 1) % (-(-interval // shown) * shown) == 0


def expert_metrics(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics by name: `moe/imbalance_max`, `moe/dropped`, `moe/layer_01/entropy`, `moe/layer_01/expert_00/tokens` …

    Args:
        layers: `LayerBalance` of each layer with experts, as metrics.jsonl has it; may be empty.
    """
    if not layers:
        return {}
    metrics = {
        "moe/imbalance_max": max(_number(layer["imbalance"]) for layer in layers),
        "moe/dropped": math.fsum(layer["dropped"] for layer in layers),
    }
    for layer in layers:
        name = f"moe/layer_{layer['layer']:02d}"
        metrics |= {f"{name}/{key}": _number(layer[key]) for key in ("imbalance", "dropped", "entropy", "z_loss")}
        tokens = layer["tokens_per_expert"]
        if len(tokens) <= MOST_CURVES:
            metrics |= {f"{name}/expert_{number:02d}/tokens": float(count) for number, count in enumerate(tokens)}
        else:
            metrics |= {f"{name}/tokens_min": float(min(tokens)), f"{name}/tokens_max": float(max(tokens))}
    return metrics


def _number(value: float | str) -> float:
    # JSON has no NaN: metrics.jsonl has its name instead.
    return float(value)


def note_metrics(details: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name of a note of `METRIC_NOTES`, without its words."""
    return {name: float(value) for name, value in details.items() if isinstance(value, int | float)}


class Tracker(Protocol):
    """Receives metrics and notes of the loop."""

    def step(self, metrics: StepMetrics) -> None: ...

    def eval(self, metrics: EvalMetrics) -> None: ...

    def note(self, note: Note) -> None: ...

    def close(self, status: RunStatus) -> None: ...


class NoTracker:
    """The ranks that do not report."""

    def step(self, metrics: StepMetrics) -> None: ...

    def eval(self, metrics: EvalMetrics) -> None: ...

    def note(self, note: Note) -> None: ...

    def close(self, status: RunStatus) -> None: ...
