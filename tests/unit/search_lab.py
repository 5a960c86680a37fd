"""A launcher whose jobs are curves: each status query is one evaluation, so that a study takes milliseconds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest

from llmrecipes.errors import ExitCode
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.launch import registry
from llmrecipes.launch.base import (
    JobHandle,
    JobRef,
    JobState,
    JobStatus,
    LauncherOptions,
    Logs,
    Rendering,
    Submission,
)
from llmrecipes.launch.job import Job
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search.best import Keeper
from llmrecipes.search.command import quiet
from llmrecipes.search.study import open_study, place_of, require_section
from llmrecipes.search.target import Target
from llmrecipes.search.tracking import StudyTracker
from llmrecipes.search.worker import Worker
from llmrecipes.workflow.run import Paths
from tests.helpers import ROOMY, tiny

LR: dict[str, Any] = {"key": "optimizer.lr", "low": 1e-4, "high": 1.0, "log": True}
STEP_SECONDS = 0.25


def searched(*space: dict[str, Any], name: str = "lab", **keys: Any) -> Recipe:
    """The tiny recipe with a search, by default over the learning rate; 12 steps, an evaluation after every third."""
    section = {"space": list(space or (LR,)), "n_trials": 6, "sampler": {"seed": 1}, "heartbeat_interval": 1000, **keys}
    return tiny(name, train={"eval_interval": 3}, search={key: value for key, value in section.items() if value != ()})


def bowl(recipe: Recipe, evaluation: int) -> float:
    """Best at a learning rate of 0.01; the same order of learning rates at every evaluation."""
    return 3 + (math.log10(recipe.optimizer.lr) + 2) ** 2 + 1 / evaluation


@dataclass
class Curves:
    """The launcher.

    `loss` says what a job reports: a number, NaN for a divergence, infinity for a validation loss that is not finite,
    or the status in which it ends.
    """

    takes: ClassVar = frozenset[str]()
    needs_cluster: ClassVar = False
    shares_disk: ClassVar = True
    poll_seconds: ClassVar = 0.001
    loss: ClassVar[Callable[[Recipe, int], float | JobStatus]] = staticmethod(bowl)
    jobs: ClassVar[dict[str, _Curve]] = {}
    most_at_once: ClassVar[int] = 0
    submitted: ClassVar[list[str]] = []
    """Run ids, in order."""

    def render(self, submission: Submission, given: LauncherOptions) -> Rendering:
        return Rendering(("curves",))

    def require(self) -> None: ...

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        name = f"curve-{len(self.submitted)}"
        Curves.submitted.append(submission.run_id)
        self.jobs[name] = _Curve(submission.planned.recipe, submission.run_dir)
        Curves.most_at_once = max(self.most_at_once, sum(not job.status.state.ended for job in self.jobs.values()))
        return Job(self, JobRef("curves", name, submission.run_dir))

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        known = [ref for ref in refs if ref.job_id in self.jobs]  # those of another process are forgotten
        for ref in known:
            self.jobs[ref.job_id].advance()
        return {ref: self.jobs[ref.job_id].status for ref in known}

    def cancel(self, ref: JobRef) -> None:
        self.jobs[ref.job_id].status = JobStatus(JobState.SAVED, int(ExitCode.REQUEUE))

    def logs(self, ref: JobRef) -> Logs:
        return Logs(files=(ref.run_dir / "log",))

    def names_job(self, text: str) -> bool:
        return text.startswith("curve-")


@dataclass
class _Curve:
    recipe: Recipe
    run_dir: Path
    status: JobStatus = field(default_factory=lambda: JobStatus(JobState.RUNNING))

    def advance(self) -> None:
        if self.status.state.ended:
            return
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        train = self.recipe.train
        step = len(lines) // 2 * train.eval_interval + train.eval_interval
        if step > train.train_iters:  # it was resumed after its last step
            self.status = JobStatus(JobState.COMPLETED, 0)
            return
        found = Curves.loss(self.recipe, step // train.eval_interval)
        if isinstance(found, JobStatus):
            self.status = found
            return
        tokens = step * train.global_batch_size * self.recipe.model.seq_length
        told: dict[str, Any] = {"step": step, "step_seconds": STEP_SECONDS, "consumed_tokens": tokens}
        if math.isnan(found):
            told |= {"loss": None, "non_finite": ["loss"]}
            self.status = JobStatus(JobState.FAILED, int(ExitCode.STOP))
        with path.open("a") as file:
            file.write(json.dumps({"loss": 1.0, **told}) + "\n")
            if not math.isnan(found):
                loss, bits = (found, found / 2) if math.isfinite(found) else (None, None)
                file.write(json.dumps({"step": step, "valid_loss": loss, "valid_bits_per_byte": bits}) + "\n")
        (self.run_dir / "checkpoints").mkdir(exist_ok=True)
        if step >= train.train_iters:
            self.status = JobStatus(JobState.COMPLETED, 0)


def worker(
    recipe: Recipe, folder: Path, *, workers: int = 1, resume: bool = False, site: Cluster = ROOMY, ranks: int = 1
) -> Worker:
    """A search process that has opened its study."""
    paths = Paths(folder / "runs", folder / "data")
    place = place_of(recipe, require_section(recipe), paths.runs_dir)
    target = Target(Curves(), {}, paths, workers, site, ranks=ranks)
    study = open_study(recipe, place, resume=resume)
    lines: list[str] = []
    tracker = StudyTracker.open(study, recipe, place)
    return Worker(study, recipe, place, target, lines.append, Keeper(recipe, place), tracker)


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    use_curves(monkeypatch)


def use_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of curves is one line of the table."""
    quiet()
    monkeypatch.setitem(registry.LAUNCHERS, "curves", f"{__name__}:Curves")
    monkeypatch.setattr("llmrecipes.search.worker.LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Curves, "loss", staticmethod(bowl))
    monkeypatch.setattr(Curves, "most_at_once", 0)
    Curves.jobs.clear()
    Curves.submitted.clear()


def states(study: optuna.Study) -> list[str]:
    """The state of each trial."""
    return [trial.state.name for trial in study.trials]


def ran(recipe: Recipe, folder: Path, **options: Any) -> optuna.Study:
    """The study after a search."""
    made = worker(recipe, folder, **options)
    assert made.run() == ExitCode.DONE
    return made.study
