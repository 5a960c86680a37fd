"""TensorBoard event files in the run directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Self

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
)
from llmrecipes.tracking.spread import spread_metrics

TRAIN = (
    "loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "tokens_per_second",
    "loss_scale",
    "memory_bytes",
    "mfu",
    "mfu_causal",
    "moe_aux_loss",
)


class TensorBoardSink(Sink):
    """Writes every `log_interval`-th step and all evaluations.

    Args:
        directory: created if missing.
        resumed_step: later points of an earlier attempt are hidden by TensorBoard (`purge_step`).
    """

    def __init__(self, directory: Path, *, resumed_step: int, log_interval: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._log_interval = log_interval
        self._writer = SummaryWriter(str(directory), purge_step=resumed_step + 1, flush_secs=10)

    @classmethod
    def of(cls, start: RunStart) -> Self:
        interval = start.recipe.train.log_interval
        return cls(start.run_dir / "tensorboard", resumed_step=start.resumed_step, log_interval=interval)

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step % self._log_interval == 0:
            self._write("train", TRAIN, metrics)
            experts = expert_metrics([asdict(layer) for layer in metrics.experts or ()])
            others = spread_metrics({"ranks": metrics.ranks, "nodes": metrics.nodes, "energy": metrics.energy})
            for key, value in (experts | others).items():
                self._writer.add_scalar(key, value, metrics.step, metrics.time)

    def eval(self, metrics: EvalMetrics) -> None:
        self._write("valid", VALID, metrics)

    def note(self, note: Note) -> None:
        if note.event in METRIC_NOTES:
            for key, value in note.details.items():
                self._writer.add_scalar(key, value, note.step, note.time)
        elif note.alarm:
            self._writer.add_text(note.event, str(dict(note.details)), note.step, note.time)

    def close(self, status: RunStatus) -> None:
        self._writer.close()

    def _write(self, group: str, keys: tuple[str, ...], metrics: StepMetrics | EvalMetrics) -> None:
        for key in keys:
            value = getattr(metrics, key)
            if value is not None:
                self._writer.add_scalar(f"{group}/{key}", value, metrics.step, metrics.time)
