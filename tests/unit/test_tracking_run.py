"""The tracker as the training loop uses it, with everything but MLflow."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import pytest
import yaml
from pydantic import create_model
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Model, Optimizer, Recipe, Tracking, Train
from llmrecipes.recipe.sections.plugins import MetricSink, declared, resolve
from llmrecipes.recipe.variants.proxy import proxy
from llmrecipes.tracking import tensorboard
from llmrecipes.tracking.events import EvalMetrics, Note, RunStart, RunStatus, Sink, StepMetrics
from llmrecipes.tracking.run_list import list_runs
from llmrecipes.tracking.run_tracker import RunTracker
from tests.refusals import refused


def recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "tiny",
        "model": Model(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, vocab_size=64),
        "train": Train(train_iters=20, global_batch_size=1),
        "optimizer": Optimizer(lr=1e-3),
        "tracking": Tracking(mlflow=False),
    }
    return Recipe(**(values | changes))


def open_tracker(runs_dir: Path, *, resumed_step: int = 0, made_from: Recipe | None = None) -> RunTracker:
    return RunTracker.open(
        made_from or recipe(),
        plan={"data_parallel_size": 1},
        environment={"python": "3"},
        run_dir=runs_dir / "tiny" / "one",
        runs_dir=runs_dir,
        resumed_step=resumed_step,
        total_steps=20,
        console=Console(file=io.StringIO()),
    )


def step(number: int, loss: float = 5.0) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        consumed_samples=number,
        consumed_tokens=8 * number,
        step_seconds=0.1,
        tokens_per_second=80.0,
    )


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_directory_records_what_was_run(tmp_path: Path) -> None:
    with open_tracker(tmp_path) as tracker:
        tracker.step(step(1))
    run_dir = tmp_path / "tiny" / "one"
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["train"]["train_iters"] == 20
    assert json.loads((run_dir / "plan.json").read_text()) == {"data_parallel_size": 1}
    assert json.loads((run_dir / "env.json").read_text()) == {"python": "3"}
    assert (run_dir / "logs").is_dir()
    assert list_runs(tmp_path)[0].state == "finished"


def test_resuming_with_other_settings_keeps_the_earlier_ones(tmp_path: Path) -> None:
    open_tracker(tmp_path).close("KILLED")
    open_tracker(tmp_path, resumed_step=5).close("KILLED")
    run_dir = tmp_path / "tiny" / "one"
    assert not list((run_dir / "logs").glob("*until*"))  # nothing changed, nothing is kept twice
    longer = recipe(train=Train(train_iters=40, global_batch_size=1))
    open_tracker(tmp_path, resumed_step=10, made_from=longer).close("KILLED")
    earlier = run_dir / "logs" / "recipe.until-step-00000010.yaml"
    assert yaml.safe_load(earlier.read_text())["train"]["train_iters"] == 20
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["train"]["train_iters"] == 40


def test_a_resumed_run_reads_as_if_never_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_tracker(tmp_path) as tracker:
        for number in range(1, 8):
            tracker.step(step(number, loss=float(number)))
        raise KeyboardInterrupt
    with open_tracker(tmp_path, resumed_step=5) as tracker:
        for number in range(6, 11):
            tracker.step(step(number, loss=10.0 * number))
        tracker.eval(
            EvalMetrics(step=10, valid_loss=1.0, consumed_samples=1, consumed_tokens=1, eval_seconds=1.0)
        )  # fmt: skip
    run_dir = tmp_path / "tiny" / "one"
    assert steps(run_dir) == [*range(1, 11), 10]
    board = EventAccumulator(str(run_dir / "tensorboard"), purge_orphaned_data=True).Reload()
    shown = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert shown == [(number, float(number) if number <= 5 else 10.0 * number) for number in range(1, 11)]
    assert [event.step for event in board.Scalars("valid/valid_loss")] == [10]


def test_log_interval_thins_tensorboard_but_not_the_record(tmp_path: Path) -> None:
    sparse = recipe(train=Train(train_iters=20, global_batch_size=1, log_interval=4))
    with open_tracker(tmp_path, made_from=sparse) as tracker:
        for number in range(1, 11):
            tracker.step(step(number))
    run_dir = tmp_path / "tiny" / "one"
    assert steps(run_dir) == list(range(1, 11))
    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [4, 8]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "finished"),
        (SystemExit(0), "finished"),
        (SystemExit(int(ExitCode.REQUEUE)), "saved"),
        (UserError("stopped", code=ExitCode.REQUEUE), "saved"),
        (KeyboardInterrupt(), "saved"),
        (SystemExit(1), "failed"),
        (UserError("loss is NaN", code=ExitCode.STOP), "failed"),
        (RuntimeError("x"), "failed"),
    ],
)
def test_the_state_follows_the_way_the_run_ended(tmp_path: Path, error: BaseException | None, state: str) -> None:
    def run() -> None:
        with open_tracker(tmp_path):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert list_runs(tmp_path)[0].state == state


def test_a_failing_sink_is_dropped_once_and_the_run_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tiny" / "one").mkdir(parents=True)
    (tmp_path / "tiny" / "one" / "tensorboard").touch()  # a file where the directory should be
    reader, writer = os.pipe()
    os.close(reader)  # `llmrecipes train | head`
    tracker = RunTracker.open(
        recipe(),
        plan={},
        environment={},
        run_dir=tmp_path / "tiny" / "one",
        runs_dir=tmp_path,
        resumed_step=0,
        total_steps=3,
        console=Console(file=os.fdopen(writer, "w", buffering=1)),
    )
    for number in (1, 2, 3):
        tracker.step(step(number))
        tracker.note(Note(step=number, event="x"))
    tracker.close("FINISHED")
    assert caplog.text.count("tracking.tensorboard is disabled") == 1
    assert caplog.text.count("progress is disabled") == 1
    assert len(steps(tmp_path / "tiny" / "one")) == 6


def test_the_error_of_tensorboards_thread_is_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhandled: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    monkeypatch.setattr(tensorboard, "FLUSH_SECONDS", 0.01)
    before = set(threading.enumerate())
    tracker = open_tracker(tmp_path)
    (writer,) = set(threading.enumerate()) - before
    (tmp_path / "tiny" / "one").rename(tmp_path / "tiny" / "two")
    tracker.step(step(10))  # log_interval's
    writer.join()
    tracker.step(step(20))
    tracker.close("FINISHED")
    assert not unhandled
    (message,) = (line for line in caplog.messages if "tensorboard is" in line)
    assert "tracking.tensorboard" in message and "FileNotFoundError" in message


def test_closing_twice_keeps_the_first_status(tmp_path: Path) -> None:
    with open_tracker(tmp_path) as tracker:
        tracker.close("KILLED")
    assert list_runs(tmp_path)[0].state == "saved"


def test_a_run_directory_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "tiny").touch()
    with refused(tmp_path / "tiny", rule="--runs-dir"):
        open_tracker(tmp_path)


def test_importing_the_tracker_loads_neither_torch_nor_mlflow() -> None:
    code = "import sys, llmrecipes.tracking.run_tracker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "mlflow", "megatron", "datasets"} & set(loaded)


@pytest.mark.parametrize("damaged", [b'{"python": "\xff"}', b"{", b""])
def test_a_damaged_document_is_kept_and_written_again(tmp_path: Path, damaged: bytes) -> None:
    open_tracker(tmp_path).close("KILLED")
    run_dir = tmp_path / "tiny" / "one"
    for name in ("env.json", "plan.json"):
        (run_dir / name).write_bytes(damaged)
    open_tracker(tmp_path, resumed_step=5).close("KILLED")
    assert json.loads((run_dir / "env.json").read_text()) == {"python": "3"}
    assert (run_dir / "logs" / "env.damaged-at-step-00000005.json").read_bytes() == damaged
    notes = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [note["details"]["file"] for note in notes if note["event"] == "document_damaged"] == [
        "plan.json",
        "env.json",
    ]


def test_a_resume_notes_what_is_missing_from_the_record(tmp_path: Path) -> None:
    with open_tracker(tmp_path) as tracker:
        tracker.step(step(1))
    open_tracker(tmp_path, resumed_step=3).close("KILLED")
    notes = [json.loads(line) for line in (tmp_path / "tiny/one/metrics.jsonl").read_text().splitlines()]
    assert notes[-1]["event"] == "metrics_damaged"
    assert notes[-1]["details"]["problems"] == ["steps 2 to 3 are missing"]


class Lines(Sink):
    """A whole sink: a file with a line for each event; `lines_name` names it."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if int(line.split()[1]) <= resumed_step))

    @classmethod
    def of(cls, start: RunStart) -> Self:
        name: str | None = start.recipe.tracking.lines_name  # type: ignore[attr-defined]
        return cls(start.run_dir / (name or "lines.txt"), start.resumed_step)

    def step(self, metrics: StepMetrics) -> None:
        self._add(f"step {metrics.step} {metrics.loss}")

    def eval(self, metrics: EvalMetrics) -> None:
        self._add(f"eval {metrics.step} {metrics.valid_loss}")

    def note(self, note: Note) -> None:
        self._add(f"note {note.step} {note.event}")

    def close(self, status: RunStatus) -> None:
        self._add(f"end {10**9} {status}")

    def _add(self, line: str) -> None:
        with self._path.open("a") as file:
            print(line, file=file)


LINES = MetricSink(target="tests.unit.test_tracking_run:Lines", rehearsal=False, keeps_steps=True)


def recipe_with_lines(declared: MetricSink = LINES, **tracking: Any) -> Recipe:
    """A recipe whose schema has one more key, `lines`, and its setting."""
    fields: Any = {"lines": (Annotated[bool, declared], True), "lines_name": (str | None, None)}
    section = create_model("WithLines", __base__=Tracking, **fields)
    made = recipe()
    return made.model_copy(update={"tracking": section(mlflow=False, tensorboard=False, **tracking)})


def test_a_sink_is_one_class_and_one_key(tmp_path: Path) -> None:
    used = recipe_with_lines(lines_name="mine.txt")
    with pytest.raises(KeyboardInterrupt), open_tracker(tmp_path, made_from=used) as tracker:
        for number in range(1, 8):
            tracker.step(step(number))
        raise KeyboardInterrupt
    with open_tracker(tmp_path, resumed_step=5, made_from=used) as tracker:
        tracker.step(step(6, loss=6.0))
        tracker.eval(EvalMetrics(step=6, valid_loss=1.0, consumed_samples=1, consumed_tokens=1, eval_seconds=1.0))
        tracker.note(Note(step=6, event="checkpoint_saved"))
    assert (tmp_path / "tiny" / "one" / "mine.txt").read_text().splitlines() == [
        *(f"step {number} 5.0" for number in range(1, 6)),
        "step 6 6.0",
        "eval 6 1.0",
        "note 6 checkpoint_saved",
        "end 1000000000 FINISHED",
    ]
    open_tracker(tmp_path / "off", made_from=recipe_with_lines(lines=False)).close("FINISHED")
    assert not list((tmp_path / "off").rglob("lines.txt"))
    assert "tracking.lines_name" in {problem.key for problem in check(recipe_with_lines(lines=False, lines_name="a"))}


def test_a_rehearsal_writes_only_the_sinks_that_declare_it() -> None:
    small: Any = proxy(recipe_with_lines(lines_name="a")).tracking
    assert (small.lines, small.lines_name) == (False, None)
    kept: Any = proxy(recipe_with_lines(replace(LINES, rehearsal=True), lines_name="a")).tracking
    assert (kept.lines, kept.lines_name) == (True, "a")


RESUMED = {
    "mlflow": "test_tracking_mlflow: test_resumed_runs_are_one_mlflow_run_without_duplicate_points",
    "tensorboard": "test_tracking_run: test_a_resumed_run_reads_as_if_never_interrupted",
    "wandb": "test_tracking_wandb: test_a_resumed_run_is_the_same_wandb_run_and_leaves_no_process",
}
"""For each sink that keeps steps, the test of what a resumed run has in it."""


def test_every_sink_is_declared_and_its_resume_is_tested() -> None:
    sinks = declared(Tracking, MetricSink)
    switches = {name for name, key in Tracking.model_fields.items() if key.annotation is bool} - {"loss_by_source"}
    assert switches == set(sinks), "a key of `Tracking` that is true or false declares its MetricSink"
    for sink in sinks.values():
        assert issubclass(resolve(sink.target), Sink)
    kept = {name for name, sink in sinks.items() if sink.keeps_steps}
    assert kept == set(RESUMED), "a sink that keeps steps has a test of a resumed run, named in RESUMED"
    for place in RESUMED.values():
        module, test = place.split(": ")
        assert f"\ndef {test}(" in Path(__file__).with_name(f"{module}.py").read_text()
