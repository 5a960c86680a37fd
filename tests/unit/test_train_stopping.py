"""When a run ends by its held-out loss, and which checkpoint is its best."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrecipes.checkpoint.manifest import CheckpointInfo, Monitored, read_manifest
from llmrecipes.checkpoint.store import CheckpointStore, require_best
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Train
from llmrecipes.search.metrics import TrialEvaluation, TrialProgress
from llmrecipes.search.trial import Running, TrialOutcome
from llmrecipes.train.stopping import after_evaluation, stop_reason
from llmrecipes.workflow.model_source import find_checkpoint
from tests.helpers import ROOMY, tiny
from tests.refusals import refused

NAN = math.nan


def ends(losses: list[float], **keys: Any) -> tuple[int | None, str | None]:
    """The evaluation after which a run ends, and why."""
    train: Train = tiny(train=keys).train
    now = Monitored()
    for step, loss in enumerate(losses, start=1):
        now = after_evaluation(now, step, {"": loss}, train)
        # What a checkpoint keeps is all that the next decision needs.
        now = Monitored.model_validate_json(now.model_dump_json())
        if (reason := stop_reason(now, train)) is not None:
            return step, reason
    return None, None


@pytest.mark.parametrize(
    ("losses", "stop", "step"),
    [
        ([3, 2, 1, 0.5], {"patience": 1}, None),
        ([3, 2, 2, 1], {"patience": 1}, 3),  # as good is not better
        ([3, 2, 2.5, 1.9, 2.5, 2.4], {"patience": 2}, 6),
        ([3, 2.9, 2.8, 2.7, 2.6], {"patience": 2, "min_delta": 0.15}, None),  # three small steps are a large one
        ([3, 2.9, 2.85, 2.7], {"patience": 2, "min_delta": 0.2}, 3),
        ([3, NAN, NAN, 2], {"patience": 2}, 3),
        ([NAN, NAN], {"patience": 3}, None),
    ],
)
def test_patience(losses: list[float], stop: dict[str, Any], step: int | None) -> None:
    assert ends(losses, early_stop=stop) == (step, None if step is None else "early_stop")


def test_a_target_ends_the_run_at_once() -> None:
    assert ends([3, 2.0, 1], target_loss=2.0) == (2, "target_loss")
    assert ends([3, NAN, 2.5], target_loss=2.0) == (None, None)


def test_the_same_evaluation_counts_once() -> None:
    train = tiny(train={"early_stop": {"patience": 2}}).train
    once = after_evaluation(Monitored(step=1, loss=1.0, reference=1.0), 2, {"": 2.0}, train)
    assert after_evaluation(once, 2, {"": 2.0}, train) == once
    assert once.waited == 1


def test_which_loss_is_monitored() -> None:
    losses = {"": 3.0, "near": 2.0, "far": 4.0}
    unset, far = tiny().train, tiny().train.model_copy(update={"monitor": "far"})
    assert after_evaluation(Monitored(), 1, losses, unset).loss == 3.0
    assert after_evaluation(Monitored(), 1, losses, far).loss == 4.0
    assert after_evaluation(Monitored(), 1, {"near": 2.0, "far": 4.0}, unset).loss == 2.0


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("train.monitor", ["train.monitor=near", "train.target_loss=1.0"]),
        ("train.early_stop", ["data.split=[1,0,0]", "train.early_stop={patience: 1}"]),
        ("checkpoint.keep_best", ["data.split=[1,0,0]", "checkpoint.keep_best=true"]),
        ("train.monitor", ["data.valid_sources=[{type: text, path: x, label: near}]", "train.monitor=near"]),
        ("train.monitor", ["train.monitor=stdlib", "train.target_loss=1.0"]),
        ("train.early_stop.patience", ["train.early_stop={patience: 0}"]),
        ("train.target_loss", ["train.target_loss=0"]),
    ],
)
def test_what_has_no_effect_is_refused(key: str, overrides: list[str]) -> None:
    with refused(key):
        load("gpt-tiny", overrides)


def test_a_source_is_monitored() -> None:
    keys = ["data.multiple_validation_sets=true", "train.monitor=stdlib", "train.target_loss=1.0"]
    assert load("gpt-tiny", keys).recipe.train.monitor == "stdlib"


def publish(store: CheckpointStore, step: int, now: Monitored | None) -> None:
    temporary = store.temporary(step)
    (temporary / "weights.bin").write_bytes(b"w")
    info = CheckpointInfo(
        step=step, consumed_samples=0, consumed_tokens=0, layout={}, recipe_hash="r", monitored=now
    )  # fmt: skip
    store.publish(temporary, info, versions={})


def with_losses(store: CheckpointStore, losses: dict[int, float | None]) -> None:
    """A checkpoint of each step; None: it was not evaluated."""
    now, train = Monitored(), tiny().train
    for step, loss in losses.items():
        now = now if loss is None else after_evaluation(now, step, {"": loss}, train)
        publish(store, step, now)


def test_retention_keeps_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "r" / "checkpoints")
    with_losses(store, {1: 3.0, 2: 1.0, 3: None, 4: NAN, 5: 1.0, 6: 2.0})
    assert store.prune(2, keep_best=True) == [1, 3, 4]
    assert require_best(store).step == 2  # of equal ones the first
    (tmp_path / "r" / "recipe.yaml").touch()
    assert find_checkpoint(f"{tmp_path / 'r'}@best", tmp_path)[1].step == 2
    with refused(f"{tmp_path / 'r'}@better"):
        find_checkpoint(f"{tmp_path / 'r'}@better", tmp_path)
    assert read_manifest(store.path(5)).monitored == Monitored(
        step=5, loss=1.0, best=1.0, best_step=2, reference=1.0, waited=2
    )


def test_a_best_that_was_not_kept_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    with_losses(store, {1: 1.0, 2: 3.0, 3: 2.0})
    assert store.prune(2) == [1]
    with caplog.at_level(logging.WARNING):
        assert require_best(store).step == 3
    assert "step 1," in caplog.text
    with refused(str(tmp_path / "none")):
        require_best(CheckpointStore(tmp_path / "none"))


@pytest.mark.parametrize(
    ("train", "keep_best", "outcome"),
    [
        ({}, False, (TrialOutcome.FAILED, [])),
        ({"early_stop": {"patience": 1}}, False, (TrialOutcome.COMPLETE, [2.5])),
        ({"early_stop": {"patience": 1}}, True, (TrialOutcome.COMPLETE, [2.0])),
        ({"target_loss": 2.5}, False, (TrialOutcome.COMPLETE, [2.5])),
        ({"train_iters": 30}, True, (TrialOutcome.COMPLETE, [2.0])),
    ],
)
def test_the_value_of_a_trial_that_ended_early(train: dict[str, Any], keep_best: bool, outcome: Any) -> None:
    recipe = tiny(train={"train_iters": 40, "eval_interval": 10, **train}, checkpoint={"keep_best": keep_best})
    losses = {10: 3.0, 20: 2.0, 30: 2.5}
    progress = TrialProgress(evaluations={step: TrialEvaluation(step, loss, None) for step, loss in losses.items()})
    nothing: Any = SimpleNamespace(read=lambda: progress)
    trial = Running(nothing, {}, recipe, derive_run(recipe, 1, ROOMY), "r", 0, nothing, nothing)
    assert trial.outcome(JobStatus(JobState.COMPLETED, 0), ("valid_loss",)) == outcome
