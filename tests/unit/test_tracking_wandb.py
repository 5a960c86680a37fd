"""Runs in W&B, through its own library and without a network; what it wrote is read back from its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrecipes.cli import app as cli
from llmrecipes.recipe.load import load
from llmrecipes.tracking.events import EvalMetrics, Note, StepMetrics
from llmrecipes.tracking.run_tracker import RunTracker
from tests.helpers import environment, not_waiting_for, tiny
from tests.refusals import refused, require_message

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def start(runs_dir: Path, resumed_step: int = 0, **tracking: Any) -> RunTracker:
    return RunTracker.open(
        tiny(tracking={"wandb": True, **tracking}, train={"log_interval": 1}),
        plan={},
        environment={},
        run_dir=runs_dir / "tiny" / "r1",
        runs_dir=runs_dir,
        resumed_step=resumed_step,
        total_steps=1000,
    )


def step(number: int, **changes: Any) -> StepMetrics:
    return StepMetrics(
        step=number, loss=9.0 - number, grad_norm=1.0, lr=1e-3, consumed_samples=number, consumed_tokens=64 * number,
        step_seconds=0.1, tokens_per_second=640.0, **changes,
    )  # fmt: skip


def sent(run_dir: Path) -> dict[str, int]:
    try:
        return dict(json.loads((run_dir / "wandb.json").read_text())["sent"])
    except FileNotFoundError:
        return {}


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def records(folder: Path) -> list[Any]:
    """What W&B wrote about one attempt, record by record, as `wandb sync` reads it."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = []
    (path,) = folder.glob("*.wandb")
    store = DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        found.append(record)
    return found


def attempts(run_dir: Path) -> list[list[Any]]:
    return [records(folder) for folder in sorted((run_dir / "wandb").glob("offline-run-*"))]


def points(found: list[Any], key: str) -> list[tuple[int, float]]:
    rows = []
    for record in found:
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if key in items:
            rows.append((items["step"], items[key]))
    return rows


def summary_keys(found: list[Any]) -> set[str]:
    return {item.key or item.nested_key[0] for record in found for item in record.summary.update}


def words(process: psutil.Process) -> str:
    """The command line; empty for a process that has ended meanwhile, as those of earlier tests may."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.rotating
def test_a_resumed_run_is_the_same_wandb_run_and_leaves_no_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "tiny" / "r1"
    with start(tmp_path, wandb_project="mine", wandb_exp_name="first try") as tracker:
        counts = {"low": -2, "negative": [5, 0], "zero": 1, "positive": [2, 3]}
        for number in (1, 2, 3):
            tracker.step(step(number, histograms={"weight": {"mlp_fc1": counts}} if number == 2 else None))
        tracker.eval(EvalMetrics(step=3, valid_loss=4.5, consumed_samples=3, consumed_tokens=192, eval_seconds=0.1))
        tracker.note(Note(step=3, event="checkpoint_saved", details={"seconds": 0.1}))
        wait_for(lambda: sent(run_dir).get("event") == 3)
        services = [child for child in psutil.Process().children(recursive=True) if "wandb" in words(child)]
        assert len(services) >= 2  # the mirror, and the library's own service
    assert not psutil.wait_procs(services, timeout=60)[1]
    # From a checkpoint of step 2: step 3 is computed again, and W&B has it already.
    with start(tmp_path, resumed_step=2, wandb_project="mine", wandb_exp_name="first try") as tracker:
        tracker.step(step(3))
        tracker.step(step(4))
        tracker.note(Note(step=2, event="restarted"))
        wait_for(lambda: sent(run_dir).get("event") == 2)  # closing gives a busy machine only some seconds
    first, second = attempts(run_dir)
    runs = [next(each.run for each in found if each.HasField("run")) for found in (first, second)]
    assert runs[0].run_id == runs[1].run_id == json.loads((run_dir / "wandb.json").read_text())["id"]
    assert {(run.project, run.display_name) for run in runs} == {("mine", "first try")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["recipe"]["model"]["hidden_size"] == 64
    assert points(first, "train/loss") == [(1, 8.0), (2, 7.0), (3, 6.0)]
    assert points(first, "valid/valid_loss") == [(3, 4.5)]
    parts = {
        item.nested_key[1]: json.loads(item.value_json)
        for record in first
        for item in record.history.item
        if len(item.nested_key) > 1 and item.nested_key[0] == "histograms/weight/mlp_fc1"
    }
    bins = {"values": [0, 5, 1, 2, 3], "bins": [-1.0, -0.5, -0.25, 0.25, 0.5, 1.0]}
    assert parts == {"_type": "histogram", **bins}
    assert points(second, "train/loss") == [(4, 5.0)]
    rows = [[each.history.step.num for each in found if each.HasField("history")] for found in (first, second)]
    assert rows == [[0, 1, 2, 3], [4]], "what W&B calls steps goes on, so that an upload can append"
    assert "note/restarted" in summary_keys(second) and "note/checkpoint_saved" in summary_keys(first)
    assert [each.exit.exit_code for each in first if each.HasField("exit")] == [0]
    shown = capfd.readouterr().out
    folders = [str(folder) for folder in sorted((run_dir / "wandb").glob("offline-run-*"))]
    assert f"wandb sync {folders[0]}" in shown and f"wandb sync --append {folders[1]}" in shown


DIES = """
import pathlib, sys
from llmrecipes.recipe.load import load
from llmrecipes.tracking.events import StepMetrics
from llmrecipes.tracking.run_tracker import RunTracker
runs_dir = pathlib.Path(sys.argv[1])
off = ["tracking.mlflow=false", "tracking.tensorboard=false"]
tracker = RunTracker.open(
    load("gpt-tiny", ["tracking.wandb=true", "train.log_interval=1", *off]).recipe, plan={}, environment={},
    run_dir=runs_dir / "tiny" / "r1", runs_dir=runs_dir, resumed_step=0, total_steps=1000,
)
tracker.step(StepMetrics(
    step=1, loss=8.0, grad_norm=1.0, lr=1e-3, consumed_samples=1, consumed_tokens=64, step_seconds=0.1,
    tokens_per_second=640.0,
))
sys.stdin.read()
"""  # without torch, which takes longer to load than all that is tested here


@pytest.mark.rotating
def test_a_run_killed_outright_leaves_no_process_and_is_preempted(tmp_path: Path) -> None:
    run_dir = tmp_path / "tiny" / "r1"
    with subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: sent(run_dir).get("loss") == 1)
        started = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    assert len(started) >= 2
    assert not psutil.wait_procs(started, timeout=60)[1]
    (found,) = attempts(run_dir)
    assert [each.exit.exit_code for each in found if each.HasField("exit")] == [1]
    assert any(each.HasField("preempting") for each in found)


@pytest.mark.rotating
def test_no_network_and_no_key_cost_a_warning_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": ""}
    nobody = {"NETRC": str(tmp_path / "none"), "HOME": str(tmp_path)}
    for name, value in (network | nobody).items():
        monkeypatch.setenv(name, value)
    with start(tmp_path) as tracker:
        mirrors = [child for child in psutil.Process().children() if "llmrecipes.tracking.wandb" in words(child)]
        # On a busy machine it may have given up by now, and then nobody waits for it either.
        with not_waiting_for(mirrors[0]) if mirrors else nullcontext():
            for number in range(1, 51):
                tracker.step(step(number))
        wait_for(lambda: "W&B does not accept metrics" in caplog.text)
    assert "metrics.jsonl" in caplog.text
    assert len((tmp_path / "tiny/r1/metrics.jsonl").read_text().splitlines()) == 50


@pytest.mark.rotating
def test_a_key_is_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123456789abcdef" * 2 + "deadbeef"
    monkeypatch.setenv("WANDB_API_KEY", key)
    with start(tmp_path) as tracker:
        tracker.step(step(1))
        wait_for(lambda: sent(tmp_path / "tiny" / "r1").get("loss") == 1)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    assert not [path for path in written if key.encode() in path.read_bytes()]


def test_a_missing_library_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        "llmrecipes.tracking.run_tracker.find_spec", lambda name: None if name == "wandb" else found(name)
    )
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "gpt-tiny", "tracking.wandb=true"]) == 2
    require_message(capsys.readouterr().err, "tracking.wandb", rule="'.[wandb]'")
    assert not list(tmp_path.iterdir())
    with refused("tracking.wandb"):
        start(tmp_path)
    assert not list(tmp_path.iterdir())


def test_keys_of_wandb_without_wandb_are_refused() -> None:
    with refused("tracking.wandb_project"):
        load("gpt-tiny", ["tracking.wandb_project=mine"])
    assert load("gpt-tiny", ["tracking.wandb=true", "tracking.wandb_project=mine"]).recipe.tracking.wandb
