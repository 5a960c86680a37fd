"""What watches a training is one module and one line; loop, stage and summary name none."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrecipes.checkpoint.saver import SaveReport
from llmrecipes.engine.base import World
from llmrecipes.errors import ExitCode
from llmrecipes.faults.signals import StopRequest
from llmrecipes.launch.ranks import FIRST_STEP
from llmrecipes.plan.derive import derive
from llmrecipes.tracking.events import NoTracker, StepMetrics
from llmrecipes.train import observing, stage
from llmrecipes.train.loaders import DataLoaders
from llmrecipes.train.loop import Loop
from llmrecipes.train.observers.base import Observer
from llmrecipes.train.observers.first_step import FirstStep
from llmrecipes.train.spec import RunSpec
from tests.helpers import ROOMY, engine_of, random_batches, tiny

TRAIN = Path(stage.__file__).parent
SCRATCH = '''
"""Writes down what it is told of a training, and adds a number to the record of a step."""
from llmrecipes.train.observers.base import Observer
from llmrecipes.train.observers.first_step import FirstStep

class Diary(Observer):
    def __init__(self, spec):
        self.pages = [f"seed {spec.recipe.train.seed}"]

    @classmethod
    def wanted(cls, spec):
        return spec.anomaly

    def begin(self):
        self.pages.append(f"begin {self.loop.progress.step}")
        self.stack.callback(self.pages.append, "closed")

    def beat(self, phase, step=None):
        self.pages.append(phase)

    def fields(self, step, seconds):
        return {"energy": {"joules": 7.0 * step}}

    def after_step(self, done):
        self.pages.append(f"step {done.progress.step} after {done.before.step}")

    def evaluate(self, step, *, ended, stopping):
        self.pages.append(f"evaluate {step}")
        return True

    def written(self, seconds):
        self.pages.append(f"written in {seconds}")

    def end(self):
        self.pages.append(f"end {self.loop.progress.step}")

    def finish(self):
        self.pages.append("finish")

    def lines(self):
        print("dear diary")
'''
"""All of an observer, but for its line in `OBSERVERS`."""


class Saver:
    """Writes nothing, in two seconds."""

    def __init__(self) -> None:
        self.reports: list[SaveReport] = []

    def save(self, _state: object, info: Any) -> None:
        self.reports.append(SaveReport(info.step, 2.0, Path(), None))

    def poll(self) -> list[SaveReport]:
        ended, self.reports = self.reports, []
        return ended

    wait = poll


class Record(NoTracker):
    """Keeps the joules of steps."""

    def __init__(self) -> None:
        self.joules: list[Any] = []

    def step(self, metrics: StepMetrics) -> None:
        self.joules.append(metrics.energy and metrics.energy["joules"])


@contextmanager
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Observer]]:
    (tmp_path / "scratch_diary.py").write_text(SCRATCH)
    monkeypatch.syspath_prepend(tmp_path)
    from scratch_diary import Diary  # type: ignore[import-not-found]

    monkeypatch.setattr(observing, "OBSERVERS", (Diary,))
    yield Diary


def test_an_observer_is_a_single_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny(train={"train_iters": 2, "seed": 5}, checkpoint={"save_interval": 2})
    spec = RunSpec(recipe=recipe, data_dir=tmp_path, run_dir=tmp_path, runs_dir=tmp_path, anomaly=True)
    with diary(tmp_path, monkeypatch):
        watching = observing.observers(spec)
        assert not observing.observers(spec.model_copy(update={"anomaly": False})), "another start does not have it"
    (made,) = watching
    joined: Any = SimpleNamespace(spec=spec, observers=watching, stop=StopRequest(), platform=None, prepared=None)
    tracker, batches = Record(), lambda _: random_batches(recipe)
    begun: Any = SimpleNamespace(plan=derive(recipe, 1, ROOMY), is_due=False)

    def build(*_: Any) -> tuple[Loop, ExitStack]:
        engine, saver = engine_of(recipe), Saver()
        loaders = DataLoaders(batches, None, None)  # type: ignore[arg-type]
        loop = Loop(engine.plan, engine, world, loaders, tracker, saver, joined.stop, "", None, watching)  # type: ignore[arg-type]
        return loop, ExitStack()

    monkeypatch.setattr(stage, "begin_stage", lambda *_, **__: begun)
    monkeypatch.setattr(stage, "build_loop", build)
    monkeypatch.setattr(stage, "print_summary", lambda *_: None)
    assert stage.train_stage(joined, from_scratch=False, from_best=False) == (ExitCode.DONE, 2)
    steps = [f"step {step} after {step - 1}" for step in (1, 2)]
    assert tracker.joules == [7.0, 14.0]
    told = [page for page in vars(made)["pages"] if page not in ("data", "step", "rest", "save")]
    assert told == [
        "seed 5", "begin 0", steps[0], "evaluate 1", steps[1], "evaluate 2", "written in 2.0", "end 2", "finish",
        "closed",
    ]  # fmt: skip
    assert {"data", "step", "save"} <= set(vars(made)["pages"])
    assert "dear diary" in capsys.readouterr().out
    assert not hasattr(made, "loop"), "its engine can be freed before the next stage is built"


@cache
def parsed(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((TRAIN / name).read_text(encoding="utf-8"))))


@pytest.mark.parametrize("kind", observing.OBSERVERS, ids=lambda kind: kind.__name__)
def test_no_file_of_the_training_names_an_observer(kind: type[Observer]) -> None:
    module = kind.__module__.rpartition(".")[2]
    for name in ("loop.py", "stage.py", "summary.py", "worker.py", "saves.py"):
        modules = {str(node.module).rpartition(".")[2] for node in parsed(name) if isinstance(node, ast.ImportFrom)}
        names = {getattr(node, field, None) for node in parsed(name) for field in ("id", "attr")}
        assert module not in modules and kind.__name__ not in names, name


def test_the_launcher_is_told_of_the_first_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    anything: Any = None
    reader, writer = os.pipe()
    monkeypatch.setenv(FIRST_STEP, str(writer))
    told = FirstStep(anything)
    assert FIRST_STEP not in os.environ, "what the rank starts has no such pipe"
    for _ in range(2):
        told.after_step(anything)
    os.close(writer)
    assert os.read(reader, 9) == b"1"
    os.close(reader)
    FirstStep(anything).after_step(anything)
