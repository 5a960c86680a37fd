"""A second engine is a folder and one line: loop, saver, tracker, resume, NaN checks, verify and generate drive it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli.app import run
from llmrecipes.recipe.engines import ENGINES, EngineEntry
from tests.engines.plain import PlainEngine
from tests.helpers import curve, lines, tiny_on, write_recipe


@pytest.fixture
def arguments(corpus: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A recipe of the second engine, which is known by one line, and where runs and data are."""
    monkeypatch.setitem(ENGINES, "plain", EngineEntry("tests.engines.plain:PlainBackend"))
    recipe = tiny_on(corpus, checkpoint={"save_interval": 4}).with_layout(engine="plain")
    return [write_recipe(recipe, tmp_path), "--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]


def train(arguments: list[str], run_id: str, *more: str) -> int:
    return run(["train", *arguments, "--nproc", "1", "--run-id", run_id, *more])


def losses(run_dir: Path) -> list[tuple[Any, ...]]:
    """The training steps of a curve; the shorter run was evaluated at its end too."""
    return [line for line in curve(run_dir) if line[1] is not None]


@pytest.mark.rotating
def test_a_resumed_run_is_the_uninterrupted_one(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs/tiny"
    assert train(arguments, "whole") == 0
    assert "torch layers" in capsys.readouterr().out
    assert train(arguments, "cut", "train.train_iters=8", "scheduler.lr_decay_iters=12") == 0
    assert train(arguments, "cut", "train.train_iters=12", "scheduler.lr_decay_iters=12", "--no-sample") == 0
    assert losses(runs / "cut") == losses(runs / "whole")
    assert any("valid_loss" in line for line in lines(runs / "whole"))
    assert [entry.step for entry in CheckpointStore(runs / "cut/checkpoints").entries()] == [8, 12]
    assert run(["generate", str(runs / "whole"), "--data-dir", arguments[-1], "--max-new-tokens", "5"]) == 0


def test_a_number_that_is_not_finite_stops_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = PlainEngine.train_step

    def poisoned(engine: PlainEngine, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            dict(engine.named_tensors())["1.bias"][3] = math.nan
        return step(engine, *args, **kwargs)

    monkeypatch.setattr(PlainEngine, "train_step", poisoned)
    assert train(arguments, "bad") == 93
    assert "1.bias" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(arguments, "none", "layout.engine=apex") == 2
    message = capsys.readouterr().err
    assert "engine" in message
    assert "plain" in message


def test_a_checkpoint_of_another_engine_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(arguments, "r", "--no-sample") == 0
    assert train(arguments, "r", "layout.engine=megatron", "train.train_iters=14", "--accept-changes") == 2
    assert "plain" in capsys.readouterr().err
