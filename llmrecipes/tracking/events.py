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
METRIC_NOTES = (TASKS_EVALUATED, MEASURED)
"""Events of notes whose details are metrics: trackers have them as such."""
VALID = ("valid_loss", "valid_bits_per_byte")
"""Metrics of an evaluation that trackers show as a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBalance:
    """How evenly the router of one layer spread the tokens of a step over its experts.

    Attributes:
        layer: layer number, from 1; multi-token prediction layers follow the others.
        tokens_per_expert: tokens that each expert processed, summed over ranks.
        imbalance: largest over mean tokens per expert; 1 is even, the number of experts means that one gets all.
        dropped: token-expert assignments dropped because the expert was full; a token has top-k assignments.
        entropy: of the router's distribution over all experts, in nats, mean over tokens; at most log(experts).
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
        skipped: the update was left out: the fp16 gradients overflowed (then `grad_norm` is NaN), or at a spike.
        memory_bytes: peak bytes on the GPU, or resident bytes of the process on a CPU.
        mfu: model FLOPs utilisation, 0 to 1, counting full attention; None if the peak is unknown.
        mfu_causal: the same counting only the causal half of attention.
        moe_aux_loss: auxiliary balancing loss without its coefficient, mean over layers; None if there is none.
        experts: balance of each layer with experts; None if it was not counted.
        ranks: spread of each number over ranks (`tracking.spread`), by its name; of the steps since the last report up
            to the one before this; None: no report.
        nodes: the same over nodes.
        energy: joules of these steps, and kWh, kg CO2 and tokens a joule; None: nothing is known.
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
    skipped: bool = False
    memory_bytes: int = 0
    mfu: float | None = None
    mfu_causal: float | None = None
    moe_aux_loss: float | None = None
    experts: tuple[LayerBalance, ...] | None = None
    ranks: Mapping[str, Mapping[str, Any]] | None = None
    nodes: Mapping[str, Mapping[str, Any]] | None = None
    energy: Mapping[str, Any] | None = None
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One evaluation on the validation split after `step` steps.

    Attributes:
        valid_loss: nats per token.
        valid_bits_per_byte: bits per byte of the text, comparable between tokenizers; None if the bytes are unknown.
        eval_seconds: wall-clock seconds of the evaluation.
    """

    step: int
    valid_loss: float
    consumed_samples: int
    consumed_tokens: int
    eval_seconds: float
    valid_bits_per_byte: float | None = None
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


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of a run, or of another attempt of it, from which a sink opens.

    Attributes:
        run_dir: `<runs_dir>/<recipe>/<run-id>`, with `documents` and logs/.
        resumed_step: step of the checkpoint that this attempt continues, 0 for a new run. What an earlier attempt
            recorded of later steps does not count: a sink that keeps steps drops them.
        total_steps: the last step.
        tags: of the run in a tracker, without secrets.
        documents: names of files in `run_dir` that describe the run.
        console: the user's terminal or log.
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
    shown, last = recipe.train.log_interval, recipe.train.train_iters
    every = -(-STEPS_BETWEEN // shown) * shown
    return step % every == 0 or step in (shown, last)


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
