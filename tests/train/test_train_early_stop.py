"""Runs that end by their held-out loss: the command, in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.checkpoint.manifest import MANIFEST_NAME, Monitored, dump, read_manifest
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli import app as cli
from tests.helpers import lines, require_same_checkpoints, tiny_on, train_lines, write_recipe
from tests.refusals import require_message

Command = Callable[..., tuple[int, str]]
NEVER_BETTER = {"patience": 2, "min_delta": 50.0}


@pytest.fixture
def train(tmp_path: Path, corpus: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `llmrecipes train`: keys of `train` and options to exit code and printed text."""

    def run(run_id: str, *options: str, **keys: Any) -> tuple[int, str]:
        sections = {"train": {"train_iters": 12, "eval_interval": 2, "eval_iters": 1, **keys}}
        recipe = tiny_on(corpus, "stopping", **sections, checkpoint={"save_interval": 2, "keep_best": True})
        paths = ("--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir))
        code = cli.run(["train", write_recipe(recipe, tmp_path), *options, "--run-id", run_id, "--no-sample", *paths])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "stopping"


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["valid_loss"]) for line in lines(run_dir) if "valid_loss" in line]


def monitored(run_dir: Path, step: int) -> Monitored | None:
    return read_manifest(CheckpointStore(run_dir / "checkpoints").path(step)).monitored


@pytest.mark.rotating
def test_early_stop_is_the_end_of_a_run(train: Command, runs: Path) -> None:
    code, printed = train("r", early_stop=NEVER_BETTER)
    assert code == 0
    assert "train.early_stop" in printed and "r@best" in printed
    status = json.loads((runs / "r" / "status.json").read_text())
    assert (status["state"], status["step"], status["ended_by"]["early_stop"]) == ("finished", 6, NEVER_BETTER)
    (note,) = [line for line in lines(runs / "r") if line.get("event") == "ended_early"]
    assert (note["step"], note["details"]["reason"], note["details"]["waited"]) == (6, "early_stop", 2)
    before = evaluations(runs / "r")
    assert [step for step, _ in before] == [2, 4, 6]
    # The same command has nothing to do, a longer patience goes on.
    assert train("r", early_stop=NEVER_BETTER)[0] == 0
    assert len(train_lines(runs / "r")) == 6 and evaluations(runs / "r") == before
    assert sum(line.get("event") == "started" for line in lines(runs / "r")) == 1
    assert train("r", early_stop={**NEVER_BETTER, "patience": 3})[0] == 0
    assert [step for step, _ in evaluations(runs / "r")] == [2, 4, 6, 8]
    # Back to a state from before: the same losses again.
    steps = [entry.step for entry in CheckpointStore(runs / "r" / "checkpoints").entries()]
    best = min(evaluations(runs / "r"), key=lambda each: (each[1], each[0]))[0]
    assert steps == sorted({best, 6, 8})
    after = evaluations(runs / "r")
    assert train("r", "--from-best", target_loss=0.001)[0] == 0
    assert evaluations(runs / "r")[: len(after)] == after
    assert len(train_lines(runs / "r")) == 12


def test_an_evaluation_before_the_first_step(train: Command, runs: Path) -> None:
    keys = {"eval_at_start": True, "eval_interval": 4, "early_stop": NEVER_BETTER}
    code, printed = train("r", train_iters=4, **keys)
    assert code == 0 and "eval 0/4" in printed
    assert [step for step, _ in evaluations(runs / "r")] == [0, 4]
    assert json.loads((runs / "r" / "status.json").read_text())["step"] == 4
    now = monitored(runs / "r", 4)
    assert now is not None and (now.step, now.waited) == (4, 0)  # that of step 0 does not count
    # Once: not after a resume, nor after the loss of all checkpoints.
    assert train("r", "--accept-changes", train_iters=6, **keys)[0] == 0
    assert [step for step, _ in evaluations(runs / "r")] == [0, 4, 6]


@pytest.mark.rotating
def test_a_killed_run_decides_as_one_that_was_not(train: Command, runs: Path, tmp_path: Path) -> None:
    assert train("whole", early_stop=NEVER_BETTER)[0] == 0
    whole = runs / "whole"
    for run_id, step in (("before-save", 4), ("between", 4)):
        shutil.copytree(whole, runs / run_id)
        for entry in CheckpointStore(runs / run_id / "checkpoints").entries():
            if entry.step > step:
                shutil.rmtree(entry.path)
    # A stop before the evaluation of step 4, which the next start had done when it was killed: only the save lacks it.
    path = runs / "between" / "checkpoints" / "step-00000004"
    now = monitored(whole, 4)
    assert now is not None
    earlier = now.model_copy(update={"step": 2, "waited": 0})
    (path / MANIFEST_NAME).write_bytes(dump(read_manifest(path).model_copy(update={"monitored": earlier})))
    for run_id in ("before-save", "between"):
        assert train(run_id, early_stop=NEVER_BETTER)[0] == 0
        assert monitored(runs / run_id, 6) == monitored(whole, 6)
        assert monitored(runs / run_id, 4) == now
        assert sorted(set(evaluations(runs / run_id))) == evaluations(whole)
        require_same_checkpoints(*(CheckpointStore(each / "checkpoints").path(6) for each in (whole, runs / run_id)))


def test_a_target_that_is_reached(train: Command, runs: Path) -> None:
    code, printed = train("r", target_loss=100.0, eval_interval=3)
    assert code == 0 and "train.target_loss" in printed
    # Step 3 is no multiple of save_interval; the last state is saved all the same.
    assert [entry.step for entry in CheckpointStore(runs / "r" / "checkpoints").entries()] == [2, 3]


def test_the_best_belongs_to_a_run_that_has_one(train: Command, tmp_path: Path, runs: Path) -> None:
    code, printed = train("r", "--from-best", "--from-scratch")
    assert code == 2
    require_message(printed, "--from-scratch", rule="--from-best")
    code, printed = train("r", "--from-best")  # no step was evaluated
    assert code == 2
    require_message(printed, str(runs / "r" / "checkpoints"))
