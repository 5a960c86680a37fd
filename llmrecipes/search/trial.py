"""A running trial: its job, what it has reported, and how it ends."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from llmrecipes.errors import ExitCode
from llmrecipes.launch.base import JobHandle, JobState, JobStatus
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Objective
from llmrecipes.search.metrics import Reader, TrialEvaluation, TrialProgress
from llmrecipes.search.space import Values, evaluation, evaluations

if TYPE_CHECKING:
    import optuna

OUT_OF_MEMORY = re.compile(rb"error: (out of (?:GPU|host) memory[^\r\n]*)")
"""The message of a rank (`faults.out_of_memory`)."""
SLURM_OUT_OF_MEMORY = "OUT_OF_MEMORY"
LOG_TAIL = 1 << 16
"""Bytes at the end of a log that are searched."""
FINAL_CODES = (int(ExitCode.BAD_INPUT), int(ExitCode.STOP))
"""Exit codes after which the same job would fail again."""


class TrialOutcome(StrEnum):
    """How a trial ended; kept with it in the study."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    DIVERGED = "diverged"
    """A loss was not finite; samplers see a violated constraint."""
    INFEASIBLE = "infeasible"
    """Refused by the plan, or out of memory in spite of it."""
    FAILED = "failed"
    RETURNED = "given back"
    """Not ended: another process resumes it."""
    LOST = "lost"
    """Its job was interrupted, and can be resumed by this process."""


def with_seed(recipe: Recipe, number: int) -> Recipe:
    """The recipe of one of the seeds of a trial, from 0."""
    train = recipe.train.model_copy(update={"seed": recipe.train.seed + number})
    return recipe.model_copy(update={"train": train})


def mean_and_error(seeds: list[list[float]]) -> tuple[list[float], list[float]]:
    """Means of the objectives over the seeds of a trial, and the standard errors of these means; of two or more seeds.

    Args:
        seeds: values of the objectives of each.
    """
    columns = list(zip(*seeds, strict=True))
    errors = [statistics.stdev(column) / math.sqrt(len(column)) for column in columns]
    return [statistics.fmean(column) for column in columns], errors


def measured(values: Sequence[float], errors: Sequence[float]) -> list[str]:
    """Values of objectives as text, with standard errors if known."""
    if not errors:
        return [f"{value:.5g}" for value in values]
    return [f"{value:.5g} ± {error:.2g}" for value, error in zip(values, errors, strict=True)]


@dataclass
class Running:
    """A trial whose job has been submitted.

    Attributes:
        trial: Optuna's.
        values: values of the searched keys.
        recipe: recipe of the trial.
        plan: plan of the trial.
        run_id: id of its run.
        slot: its share of this machine.
        job: the newest job of its run.
        reader: reader of its metrics.
        reported: evaluations that Optuna knows.
        ending: why this process has cancelled the job; None: it has not.
        rank_seconds: seconds in which its jobs ran, times ranks.
        earlier_seeds: the same, of the seeds that are complete.
        continued: numbers of the trials that it continues, parts of the same run.
        seeds: values of the objectives of the seeds that are complete.
        tokens: tokens of these seeds.
        errors: standard errors of the objectives; empty with one seed.
    """

    trial: optuna.Trial
    values: Values
    recipe: Recipe
    plan: RunPlan
    run_id: str
    slot: int
    job: JobHandle
    reader: Reader
    reported: set[int] = field(default_factory=set)
    ending: TrialOutcome | None = None
    rank_seconds: float = 0.0
    earlier_seeds: float = 0.0
    continued: tuple[int, ...] = ()
    seeds: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    errors: list[float] = field(default_factory=list)
    resumed: int = 0
    looked: float = field(default_factory=time.monotonic)
    counted: float = 0.0
    """When its GPU-hours were last written to the study, by the monotonic clock."""
    is_bad: bool = False
    """Whether the pruner wants it to end."""
    tracked: bool = False
    """Whether its run in MLflow has its parent."""

    @property
    def number(self) -> int:
        return self.trial.number

    def clock(self, status: JobStatus) -> None:
        """Count the time since the last look if the job is running."""
        now = time.monotonic()
        if status.state == JobState.RUNNING:
            self.rank_seconds += (now - self.looked) * self.plan.world_size
        self.looked = now

    def new_values(self, objective: Objective) -> list[tuple[int, float]]:
        """(number of the evaluation, value) of evaluations that have not been reported, and mark them as such."""
        values_by = []
        for step, metrics in sorted(self.reader.read().evaluations.items()):
            number = evaluation(self.recipe, step)
            value = metrics.valid_bits_per_byte if objective == "valid_bits_per_byte" else metrics.valid_loss
            if number not in self.reported and value is not None:
                self.reported.add(number)
                values_by.append((number, value))
        return values_by

    @property
    def may_be_pruned(self) -> bool:
        """Whether ending it now would save anything."""
        return self.ending is None and max(self.reported, default=0) < evaluations(self.recipe)

    def outcome(self, status: JobStatus, objectives: tuple[Objective, ...]) -> tuple[TrialOutcome, list[float]]:
        """Outcome of a trial from the final status of its job; with the values of its objectives if complete."""
        progress = self.reader.read()
        values = self._objectives(progress, objectives)
        if status.state == JobState.COMPLETED and values is not None:
            return TrialOutcome.COMPLETE, values
        if progress.diverged and status.state == JobState.FAILED and status.exit_code in (None, ExitCode.STOP):
            return TrialOutcome.DIVERGED, []
        if status.state == JobState.COMPLETED and self._has_no_finite_loss(progress):
            return TrialOutcome.DIVERGED, []
        if self._out_of_memory(status):
            return TrialOutcome.INFEASIBLE, []
        if self.ending is not None and status.state != JobState.COMPLETED:
            return self.ending, []
        if status.state in (JobState.SAVED, JobState.UNKNOWN):
            return TrialOutcome.LOST, []
        return TrialOutcome.FAILED, []

    def reason(self, status: JobStatus) -> str:
        """Why it ended without a result, from the final status of its job."""
        if status.state == JobState.COMPLETED and self._has_no_finite_loss(self.reader.progress):
            return "the validation loss is not finite"
        logs = self.job.logs()
        where = f"exit code {status.exit_code}, see {' '.join(map(str, logs.files or logs.command))}"
        return self._out_of_memory(status) or status.reason or where

    def _has_no_finite_loss(self, progress: TrialProgress) -> bool:
        last = self._final(progress)
        return last is not None and last.valid_loss is None

    def _out_of_memory(self, status: JobStatus) -> str:
        """Message of a job that ran out of memory; empty if it did not, or if its logs cannot be read."""
        if status.state != JobState.FAILED:
            return ""
        if SLURM_OUT_OF_MEMORY in status.reason:
            return status.reason
        if status.exit_code not in (None, ExitCode.STOP):
            return ""
        for path in self.job.logs().files:
            with suppress(OSError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_TAIL))
                if match := OUT_OF_MEMORY.search(file.read()):
                    return match[1].decode(errors="replace")
        return ""

    def _final(self, progress: TrialProgress) -> TrialEvaluation | None:
        """The evaluation of a complete trial that counts: of its best checkpoint, if that is kept, else the last."""
        train = self.recipe.train
        by_step = progress.evaluations
        ends_early = train.early_stop is not None or train.target_loss is not None
        last = by_step.get(train.train_iters) or (by_step[max(by_step)] if ends_early and by_step else None)
        finite = [result for result in by_step.values() if result.valid_loss is not None]
        if last is None or not self.recipe.checkpoint.keep_best or not finite:
            return last
        return min(finite, key=lambda result: (result.valid_loss or 0.0, result.step))

    def _objectives(self, progress: TrialProgress, names: tuple[Objective, ...]) -> list[float] | None:
        last = self._final(progress)
        if last is None:
            return None
        values_by: dict[Objective, float | None] = {
            "valid_loss": last.valid_loss,
            "valid_bits_per_byte": last.valid_bits_per_byte,
            "train_seconds": progress.seconds,
            "num_parameters": float(self.plan.num_parameters.total),
        }
        values = [value for name in names if (value := values_by[name]) is not None]
        return values if len(values) == len(names) else None


def shown(values: Values) -> str:
    """Values in short."""
    return " ".join(f"{key}={f'{value:.4g}' if isinstance(value, float) else value}" for key, value in values.items())
