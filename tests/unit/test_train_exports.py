"""Exports beside a training run (`checkpoint.also_export`): which checkpoints, one at a time, and what may go wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli import app as cli
from llmrecipes.faults.signals import StopRequest
from llmrecipes.models.also_export import tidy
from llmrecipes.recipe.load import load
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import Note
from llmrecipes.train.observers import exports
from llmrecipes.train.observers.exports import Exports
from llmrecipes.workflow.run import plan_run
from tests.helpers import LLAMA, ROOMY, lines, tiny, tiny_on, write_recipe
from tests.observing import observer
from tests.refusals import refused
from tests.unit.test_train_stopping import with_losses

STUB = """
import json, pathlib, sys, time
run, step = pathlib.Path(sys.argv[1]), sys.argv[2]
while not (run / f"go-{step}").exists(): time.sleep(0.01)
how = (run / f"go-{step}").read_text()
if how == "crash": sys.exit(7)
if how: print(json.dumps({"error": how})); sys.exit(2)
print(json.dumps({"path": step, "seconds": 1.0}))
"""


class Trained:
    """A run with checkpoints, whose exports end when a test says so."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        self.run, self.store = Run(folder / "r"), CheckpointStore(folder / "r" / "checkpoints")
        wanted = {"save_interval": 1, "also_export": "hf", **checkpoint}
        recipe = tiny(checkpoint=wanted)
        self.stop, self.pruned = StopRequest(), list[set[int]]()
        saver = SimpleNamespace(prune=lambda: self.pruned.append(set(self.store.held)))
        made = observer(Exports, recipe, self.run.path, stop=self.stop, saver=saver)
        self.exports = made.__enter__()
        self.exports.joined = SimpleNamespace(store=self.store)  # type: ignore[assignment]

    def save(self, *steps: int) -> None:
        with_losses(self.store, dict.fromkeys(steps))
        for step in steps:
            self.exports.saved(step)

    def end(self, step: int, how: str = "") -> None:
        (self.run.path / f"go-{step}").write_text(how)

    def notes(self) -> list[Note]:
        """Of the export that is ending."""
        while not (found := self.exports.poll()):
            time.sleep(0.01)
        return found


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    (tmp_path / "stub_export.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(exports, "MODULE", "stub_export")
    return lambda **checkpoint: Trained(tmp_path, **checkpoint)


def test_one_at_a_time_and_then_the_newest(trained: Callable[..., Trained]) -> None:
    run = trained()
    run.save(1)
    assert run.exports.poll() == []
    run.save(2, 3, 4)
    assert run.exports.poll() == []
    assert run.store.held == {1, 4}
    assert run.store.prune(2) == [2]  # 1 is being read, 3 and 4 are the newest
    run.end(1)
    (note,) = run.notes()
    assert (note.step, note.event, note.alarm, note.details["left_out"]) == (1, "exported", False, [2, 3])
    run.save(5)
    run.end(4)
    run.end(5)
    notes = run.exports.export_last(5)
    assert [(note.step, note.event, "left_out" in note.details) for note in notes] == [
        (4, "exported", False), (5, "exported", False),
    ]  # fmt: skip
    assert run.pruned == [{5}] and not run.store.held


def test_a_failure_is_an_alarm_and_the_next_is_tried(trained: Callable[..., Trained]) -> None:
    run = trained()
    for step, how, said in ((1, "disk full", "disk full"), (2, "crash", "7")):
        run.save(step)
        run.end(step, how)
        (note,) = run.notes()
        assert (note.step, note.event, note.alarm) == (step, "export_failed", True)
        assert said in note.details["error"]
    run.save(3)
    run.store.withdraw(2)  # the run goes back while the third is read
    run.end(3, "gone")
    assert run.exports.export_last(3) == []


def test_a_run_that_stops_leaves_its_export_to_the_next_start(trained: Callable[..., Trained]) -> None:
    run = trained()
    run.save(1)
    run.exports.poll()
    began = time.monotonic()
    run.stop.signal = signal.SIGTERM
    (note,) = run.exports.export_last(1)
    assert note.alarm and time.monotonic() - began < 5 and not run.store.held
    run.exports.resume()
    run.end(1)
    assert [note.event for note in run.notes()] == ["exported"]
    run.run.exported(1).mkdir(parents=True)
    run.exports.resume()
    assert run.exports.poll() == [] and not run.store.held


def test_an_interval_and_the_last_step(trained: Callable[..., Trained]) -> None:
    run = trained(also_export_interval=4)
    for step in (1, 4, 6, 12):
        run.exports.saved(step)
    assert run.store.held == {4, 12}  # the recipe has 12 steps
    run.exports.cancel()
    run.save(9)  # a run that ends early by its held-out loss
    run.end(9)
    assert [note.step for note in run.exports.export_last(9)] == [9]


def test_folders_are_kept_as_long_as_their_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    with_losses(run.store(), {1: None, 2: None, 3: None})
    for step in (1, 2, 3, 4):
        run.exported(step).mkdir(parents=True)
    os.utime(run.exported(2), (1, 1))  # its checkpoint was saved again since
    (run.exports / ".step-00000003.part").mkdir()
    (run.exports / "notes").mkdir()
    tidy(run)
    assert sorted(path.name for path in run.exports.iterdir()) == ["notes", "step-00000001", "step-00000003"]


def test_a_model_without_a_form_is_refused_before_the_start() -> None:
    recipe = load("gpt-tiny", ["checkpoint.also_export=hf", "model.add_qkv_bias=true"]).recipe
    with refused("model.qk_layernorm", rule="checkpoint.also_export"):
        plan_run(recipe, ROOMY, 1)


@pytest.mark.rotating
def test_a_run_exports_its_last_checkpoint(tmp_path: Path, corpus: Path, data_dir: Path) -> None:
    recipe = tiny_on(
        corpus, "exporting", model=LLAMA, train={"train_iters": 6},
        checkpoint={"save_interval": 2, "also_export": "hf"},
    )  # fmt: skip
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    assert cli.run(["train", write_recipe(recipe, tmp_path), "--run-id", "r", "--no-sample", *paths]) == 0
    run = Run(tmp_path / "runs" / "exporting" / "r")
    notes = [line for line in lines(run.path) if line.get("event") == "exported"]
    done = [note["step"] for note in notes] + [step for note in notes for step in note["details"].get("left_out", [])]
    assert sorted(done) == [2, 4, 6] and notes[-1]["step"] == 6
    out = tmp_path / "by-hand"
    assert cli.run(["export", f"{run.path}@6", "--to", "hf", "--out", str(out), *paths]) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (run.exported(6) / name).read_bytes() == (out / name).read_bytes()
    assert json.loads((run.exported(6) / "config.json").read_text())["model_type"]
    kept = {entry.step for entry in run.store().entries()}
    assert len(kept) == 2 and {int(path.name[5:]) for path in run.exports.iterdir()} <= kept
