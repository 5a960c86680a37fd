"""The list of runs, read from directories only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.hardware.process import start_ticks
from llmrecipes.tracking.events import EvalMetrics, StepMetrics
from llmrecipes.tracking.jsonl import JsonlSink
from llmrecipes.tracking.run_list import TAIL_BYTES, list_runs
from llmrecipes.tracking.status import StatusSink


def step(number: int, loss: float = 5.0) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        consumed_samples=1,
        consumed_tokens=1,
        step_seconds=0.1,
        tokens_per_second=1.0,
    )


def evaluation(number: int, loss: float) -> EvalMetrics:
    return EvalMetrics(step=number, valid_loss=loss, consumed_samples=1, consumed_tokens=1, eval_seconds=0.1)


def make(run_dir: Path) -> tuple[JsonlSink, StatusSink]:
    run_dir.mkdir(parents=True)
    return JsonlSink(run_dir / "metrics.jsonl", 0), StatusSink(run_dir, resumed_step=0, total_steps=100)


def only(runs_dir: Path) -> Any:
    (run,) = list_runs(runs_dir)
    return run


def test_no_directory_is_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "missing") == []


def test_a_run_in_progress_and_after(tmp_path: Path) -> None:
    metrics, status = make(tmp_path / "tiny" / "one")
    for sink in (metrics, status):
        sink.step(step(1))
        sink.eval(evaluation(1, 4.5))
        sink.step(step(2, loss=4.0))
    run = only(tmp_path)
    assert (run.recipe, run.run_id, run.state) == ("tiny", "one", "running")
    assert (run.step, run.total, run.loss, run.valid_loss) == (2, 100, 4.0, 4.5)
    status.close("KILLED")
    assert only(tmp_path).state == "saved"
    json.dumps(only(tmp_path).as_dict())


def test_a_dead_process_shows_as_interrupted(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from llmrecipes.tracking.status import StatusSink\n"
        "StatusSink(pathlib.Path(sys.argv[1]), resumed_step=0, total_steps=9)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run_dir = tmp_path / "tiny" / "one"
    run_dir.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", script, str(run_dir)], check=False)
    assert only(tmp_path).state == "interrupted"
    values = json.loads((run_dir / "status.json").read_text())

    def state(**changed: object) -> str:
        (run_dir / "status.json").write_text(json.dumps(values | changed))
        return only(tmp_path).state

    # another process with the same number is not this run
    pid, ticks = os.getpid(), start_ticks(os.getpid()) or 0
    assert state(pid=pid, pid_ticks=ticks) == "running"
    assert state(pid=pid, pid_ticks=ticks - 1) == "interrupted"
    assert state(pid=[pid], pid_ticks=ticks) == "interrupted"
    # nor is what ran before the machine was restarted, whatever has its number now
    assert state(pid=pid, pid_ticks=ticks, boot_id="an earlier one") == "interrupted"
    # what another machine or a container runs cannot be seen from here
    assert state(host="elsewhere", boot_id="of another machine") == "running"
    assert state(pid_namespace="pid:[1]") == "running"
    assert state(host="renamed") == "interrupted"


def test_a_resumed_run_keeps_its_start_and_validation_loss(tmp_path: Path) -> None:
    run_dir = tmp_path / "tiny" / "one"
    _, status = make(run_dir)
    status.eval(evaluation(10, 4.25))
    status.close("KILLED")
    started = only(tmp_path).started
    before = (run_dir / "status.json").read_text()
    StatusSink(run_dir, resumed_step=10, total_steps=100)
    run = only(tmp_path)
    assert (run.state, run.step, run.started, run.valid_loss) == ("running", 10, started, 4.25)
    # Its seconds are those of both processes, here the same one.
    first, second = (json.loads(text)["seconds"] for text in (before, (run_dir / "status.json").read_text()))
    assert 0 < 2 * first <= second < 2 * first + 60


def test_the_validation_loss_is_found_far_from_the_end_of_a_long_file(tmp_path: Path) -> None:
    metrics, status = make(tmp_path / "tiny" / "one")
    for sink in (metrics, status):
        sink.eval(evaluation(1, 4.5))
    number = 0
    while (tmp_path / "tiny" / "one" / "metrics.jsonl").stat().st_size < 2 * TAIL_BYTES:
        number += 1
        metrics.step(step(number, loss=3.0))
    run = only(tmp_path)
    assert (run.step, run.loss, run.valid_loss) == (number, 3.0, 4.5)


def test_checkpoints_are_those_with_a_manifest(tmp_path: Path) -> None:
    run_dir = tmp_path / "tiny" / "one"
    make(run_dir)
    for name in ("step-00000200", "step-00000100", ".tmp-step-00000300-x", "step-00000400", "other"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
        if "400" not in name:
            (run_dir / "checkpoints" / name / "manifest.json").touch()
    assert only(tmp_path).checkpoints == (100, 200)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"state": 7, "step": "x", "total": true, "pid": "x"}'])
def test_a_broken_status_is_shown_not_fatal(tmp_path: Path, content: bytes) -> None:
    run_dir = tmp_path / "tiny" / "one"
    metrics, _ = make(run_dir)
    metrics.step(step(3))
    (run_dir / "status.json").write_bytes(content)
    (run_dir / "metrics.jsonl").open("ab").write(b'{"torn')
    run = only(tmp_path)
    assert run.state in {"unknown", "7"}
    assert (run.step, run.total) == (3, None)


def test_other_things_in_the_directory_are_no_runs(tmp_path: Path) -> None:
    make(tmp_path / "tiny" / "one")
    (tmp_path / "mlflow.db").touch()
    (tmp_path / ".mlflow-artifacts" / "abc").mkdir(parents=True)
    (tmp_path / ".mlflow-artifacts" / "abc" / "recipe.yaml").touch()
    (tmp_path / "tiny" / "empty").mkdir()
    (tmp_path / "tiny" / "file").touch()
    assert only(tmp_path).run_id == "one"


def test_listing_runs_loads_nothing_heavy() -> None:
    code = "import sys, llmrecipes.tracking.run_list; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "mlflow", "megatron", "datasets", "rich", "pydantic"} & set(loaded)
