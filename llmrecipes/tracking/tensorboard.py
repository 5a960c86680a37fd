"""TensorBoard event files in the run directory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from llmrecipes.tracking.events import (
    METRIC_NOTES,
    VALID,
    EvalMetrics,
    Note,
    RunStart,
    RunStatus,
    Sink,
    StepMetrics,
    expert_metrics,
    note_metrics,
    source_metrics,
)
from llmrecipes.tracking.histograms import edges, lowest
from llmrecipes.tracking.spread import spread_metrics

TRAIN = (
    "loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "tokens_per_second",
    "loss_scale",
    "global_batch_size",
    "stage",
    "memory_bytes",
    "mfu",
    "mfu_causal",
    "moe_aux_loss",
    "token_accuracy",
    "hidden_distance",
)

FLUSH_SECONDS = 10


class TensorBoardSink(Sink):
    """Writes every `log_interval`-th step and all evaluations.

    Args:
        directory: created if missing.
        resumed_step: later points of an earlier attempt are hidden by TensorBoard (`purge_step`).
    """

    def __init__(self, directory: Path, *, resumed_step: int, log_interval: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._log_interval = log_interval
        self._writer = SummaryWriter(str(directory), purge_step=resumed_step + 1, flush_secs=FLUSH_SECONDS)
        self._hook = threading.excepthook
        threading.excepthook = self._on_thread_error

    @classmethod
    def of(cls, start: RunStart) -> Self:
        interval = start.recipe.train.log_interval
        return cls(start.run_dir / "tensorboard", resumed_step=start.resumed_step, log_interval=interval)

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step % self._log_interval == 0:
            self._write("train", TRAIN, metrics)
            experts = expert_metrics([asdict(layer) for layer in metrics.experts or ()])
            nested = ("ranks", "nodes", "energy", "layers")
            others = spread_metrics({name: getattr(metrics, name) for name in nested})
            named = source_metrics({"rewards": metrics.rewards, "source_loss": metrics.source_loss})
            for key, value in (experts | others | named).items():
                self._writer.add_scalar(key, value, metrics.step, metrics.time)
            for measure, kinds in (metrics.histograms or {}).items():
                for kind, bins in kinds.items():
                    self._histogram(f"histograms/{measure}/{kind}", bins, metrics)

    def _histogram(self, key: str, bins: Mapping[str, Any], metrics: StepMetrics) -> None:
        limits, counts = edges(bins)
        least = lowest(bins, limits)
        centres = [(low + high) / 2 for low, high in zip([least, *limits], limits, strict=False)]
        self._writer.add_histogram_raw(
            key,
            min=least,
            max=limits[-1],
            num=sum(counts),
            sum=sum(count * at for count, at in zip(counts, centres, strict=True)),
            sum_squares=sum(count * at * at for count, at in zip(counts, centres, strict=True)),
            bucket_limits=limits,
            bucket_counts=counts,
            global_step=metrics.step,
            walltime=metrics.time,
        )

    def eval(self, metrics: EvalMetrics) -> None:
        self._write("valid", VALID, metrics)
        for key, value in source_metrics(asdict(metrics)).items():
            self._writer.add_scalar(key, value, metrics.step, metrics.time)

    def note(self, note: Note) -> None:
        if note.event in METRIC_NOTES:
            for key, value in note_metrics(note.details).items():
                self._writer.add_scalar(key, value, note.step, note.time)
        elif note.alarm:
            self._writer.add_text(note.event, str(dict(note.details)), note.step, note.time)

    def close(self, status: RunStatus) -> None:
        self._writer.close()
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self._hook

    def _on_thread_error(self, error: threading.ExceptHookArgs, /) -> None:
        # The writer's thread keeps its error, which the next call raises and the tracker reports.
        if type(error.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
            self._hook(error)

    def _write(self, group: str, keys: tuple[str, ...], metrics: StepMetrics | EvalMetrics) -> None:
        for key in keys:
            value = getattr(metrics, key)
            if value is not None:
                self._writer.add_scalar(f"{group}/{key}", value, metrics.step, metrics.time)
