"""`llmrecipes grow`: a run that `train` continues with, complete or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli.app import run
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import join
from llmrecipes.models.create import create_run, write_checkpoint
from llmrecipes.models.merge import Boxes
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load, to_yaml
from tests.helpers import ROOMY, close_engines, engine_of, tiny_on
from tests.refusals import require_message
from tests.unit.test_model_grow import Small


@pytest.fixture
def small_run(tmp_path: Path, corpus: Path) -> Path:
    """A run with a checkpoint of step 0."""
    recipe = tiny_on(corpus, train={"train_iters": 2}, data={"num_workers": 0}, layout={"micro_batch_size": 8})
    platform = select()
    platform.install()
    with join(platform, recipe.train.seed, recipe.layout):
        source = Boxes(Small(engine_of(recipe), torch.float32))
        close_engines()
    folder = tmp_path / "runs" / "tiny" / "small"

    def write(path: Path) -> dict[str, Any]:
        write_checkpoint(recipe, source, path)
        return {}

    create_run(folder, recipe, write, text=to_yaml(recipe))
    return folder


def test_training_continues_from_the_grown_run(
    small_run: Path, data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = small_run.parents[1]
    command = ["grow", "tiny/small@0", "--runs-dir", str(runs), "--layers", "4"]
    assert run([*command, "--hidden-size", "128", "--run-id", "wide", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["preserves"] and said["new_layers"] == [1, 3] and said["sizes"]["hidden_size"] == [64, 128]
    folder = runs / "tiny-grown" / "wide"
    recipe = load(str(folder / "recipe.yaml")).recipe
    assert said["parameters"] == derive(recipe, 1, ROOMY).num_parameters.total
    train = ["train", str(folder / "recipe.yaml"), "--run-id", "wide", "--no-sample", "--runs-dir", str(runs)]
    assert run([*train, "--data-dir", str(data_dir)]) == 0
    assert CheckpointStore(folder / "checkpoints").entries()[-1].step == 2
    capsys.readouterr()
    monkeypatch.setattr("llmrecipes.tracking.progress.SECONDS_BEFORE_COUNTING", 0.0)
    assert run([*command, "--by", "stack", "--run-id", "deep"]) == 0
    printed = capsys.readouterr()
    assert "llmrecipes train" in printed.out and "parameters  " in printed.err
    before = sorted(runs.rglob("*"))
    assert run([*command, "--run-id", "deep"]) == 2
    require_message(capsys.readouterr().err, runs / "tiny-grown" / "deep", rule="--run-id")
    assert run(["grow", "tiny/small@7", "--layers", "4", "--runs-dir", str(runs)]) == 2
    require_message(capsys.readouterr().err, small_run / "checkpoints")
    assert sorted(runs.rglob("*")) == before
