"""Real MLflow: SQLite, and a real server on loopback that dies in the middle."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psutil
import pytest
import yaml
from rich.console import Console

from llmrecipes.hardware.process import STARTED_FOR
from llmrecipes.recipe.schema import Model, Optimizer, Recipe, Tracking, Train
from llmrecipes.tracking import web
from llmrecipes.tracking.events import DatasetUse, EvalMetrics, Note, StepMetrics
from llmrecipes.tracking.mlflow.database import (
    KEY_TAG,
    artifact_root,
    redact,
    require_database,
    sqlite_uri,
    tracking_uri,
)
from llmrecipes.tracking.mlflow.sink import LOCK
from llmrecipes.tracking.run_tracker import RunTracker
from tests.helpers import ROOT, not_waiting_for
from tests.refusals import refused

TOTAL = 1000
DATASETS = (
    DatasetUse("books", "ab12", "training", "corpora/books", "text", {"documents": 3, "tokens": 90, "weight": 0.5}),
    DatasetUse("books", "cd34", "validation", "corpora/books", "text", {"documents": 1, "tokens": 9}),
    DatasetUse("web", "ef56", "training", "s3://bucket/web/", "jsonl", {"documents": 2}),
    DatasetUse("page", "0123", "training", "https://example.org/page.jsonl", "jsonl", {"documents": 2}),
    DatasetUse("wiki", "4567", "training", "org/wiki", "hub", {"documents": 2}),
    DatasetUse("stdlib", "89ab", "training", "", "stdlib", {"documents": 2}),
)
HISTOGRAMS = {"gradient": {"mlp_fc1": {"low": -9, "zero": 7, "negative": [5, 1], "positive": [2, 3]}}}


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests, as in life; with a name that needs care in addresses and SQL."""
    return tmp_path_factory.mktemp("it's runs%20 #1")


@pytest.fixture(autouse=True)
def local_store(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if "runs_dir" in request.fixturenames:  # there is no server that may be dead, and a busy machine may need longer
        monkeypatch.setattr("llmrecipes.tracking.mirror.CLOSE_SECONDS", 200.0)


def recipe(experiment: str, *, description: str = "", **tracking: Any) -> Recipe:
    return Recipe(
        name="tiny",
        description=description,
        model=Model(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, vocab_size=64),
        train=Train(train_iters=TOTAL, global_batch_size=1),
        optimizer=Optimizer(lr=1e-3),
        tracking=Tracking(experiment=experiment, tensorboard=False, **tracking),
    )


def start(
    runs_dir: Path, made_from: Recipe, run_id: str, resumed_step: int = 0, shown: io.StringIO | None = None
) -> RunTracker:
    return RunTracker.open(
        made_from,
        plan={"data_parallel_size": 1},
        environment={"git": {"commit": "abc", "dirty": False}, "packages": {"llmrecipes": "0.1"}},
        run_dir=runs_dir / "tiny" / run_id,
        runs_dir=runs_dir,
        resumed_step=resumed_step,
        total_steps=TOTAL,
        tags={"layout": "dp1"},
        datasets=DATASETS,
        console=Console(file=shown or io.StringIO()),
    )


def step(number: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": number,
        "loss": 5.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "consumed_samples": number,
        "consumed_tokens": 8 * number,
        "step_seconds": 0.1,
        "tokens_per_second": 80.0,
    }
    return StepMetrics(**(values | changes))


def evaluation(number: int) -> EvalMetrics:
    return EvalMetrics(step=number, valid_loss=4.5, consumed_samples=1, consumed_tokens=1, eval_seconds=0.1)


def client_of(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def only_run(uri: str, experiment: str) -> Any:
    client = client_of(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return run


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client_of(uri).get_metric_history(run_id, key))


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_a_run_is_recorded_with_all_that_belongs_to_it(runs_dir: Path, tmp_path: Path) -> None:
    experiment = 'it\'s "quoted" `and` / ünïcode'
    long = "x'\";DROP TABLE runs;--" * 400
    made_from = recipe(experiment, description=long, system_metrics_interval=0.2)
    with start(runs_dir, made_from, "full") as tracker:
        tracker.step(step(1, loss=float("nan"), grad_norm=float("inf"), consumed_tokens=10**25))
        tracker.step(step(2, loss_scale=1024.0, skipped=True, histograms=HISTOGRAMS))
        tracker.eval(evaluation(2))
        tracker.note(Note(step=2, event="checkpoint_saved", details={"seconds": 1.5}))
        wait_for(lambda: (runs_dir / "mlflow.db").exists() and "run_id" in identity(runs_dir / "tiny" / "full"))
    uri = tracking_uri(runs_dir)
    run = only_run(uri, experiment)
    assert run.info.status == "FINISHED" and run.info.run_name == "full"

    assert run.data.params["optimizer.lr"] == "0.001"
    assert run.data.params["data.sources.0.type"] == "stdlib"
    assert len(run.data.params["description"]) == 6000
    assert run.data.params["description"].startswith("x'\";DROP") and "[cut:" in run.data.params["description"]
    expected = {"git.commit": "abc", "llmrecipes.version": "0.1", "layout": "dp1"}
    assert expected.items() <= run.data.tags.items()
    assert json.loads(run.data.tags["note.checkpoint_saved"]) == {"step": 2, "seconds": 1.5}

    losses = history(uri, run.info.run_id, "train/loss")
    assert math.isnan(losses[0][1]) and losses[1] == (2, 5.0)
    assert history(uri, run.info.run_id, "usage/consumed_tokens") == [(1, 1e25), (2, 16.0)]
    assert history(uri, run.info.run_id, "train/skipped") == [(1, 0.0), (2, 1.0)]
    assert history(uri, run.info.run_id, "valid/valid_loss") == [(2, 4.5)]
    # The same names as TensorBoard's; what it does not have comes in a group of its own.
    assert {"train/loss", "train/lr", "valid/valid_loss", "valid/eval_seconds"} <= run.data.metrics.keys()
    assert all("/" in name for name in run.data.metrics)
    (only,) = client_of(uri).search_experiments()  # no empty `Default`, neither now nor after another start
    assert only.name == experiment and only.tags["mlflow.experimentKind"] == "custom_model_development"
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 0

    assert unquote(urlsplit(run.info.artifact_uri).path).startswith(str(runs_dir))
    stored = Path(client_of(uri).download_artifacts(run.info.run_id, "recipe.yaml", str(tmp_path)))
    assert yaml.safe_load(stored.read_text())["description"] == long  # in full
    assert {file.path for file in client_of(uri).list_artifacts(run.info.run_id)} == {
        "recipe.yaml",
        "plan.json",
        "env.json",
        "histograms",
    }
    require_histograms(uri, run.info.run_id, tmp_path, [2])
    require_datasets(run)


def require_datasets(run: Any) -> None:
    """Those of the run, each once, whose sources MLflow's own classes read."""
    from mlflow.data import get_source

    inputs = {each.dataset.digest: each for each in run.inputs.dataset_inputs}
    assert len(run.inputs.dataset_inputs) == len(inputs) == len(DATASETS)
    for use in DATASETS:
        dataset, (tag,) = inputs[use.digest].dataset, inputs[use.digest].tags
        assert (dataset.name, tag.key, tag.value) == (use.name, "mlflow.data.context", use.use)
        assert json.loads(dataset.profile) == use.counts
        source = get_source(dataset).to_dict()
        assert use.source in source.values() or source == {"tags": {"llmrecipes.source": "stdlib"}}


def require_histograms(uri: str, run_id: str, folder: Path, steps: list[int]) -> None:
    from matplotlib.image import imread

    folder = Path(client_of(uri).download_artifacts(run_id, "histograms", str(folder)))
    assert {path.name for path in folder.iterdir()} == {"histograms.json", "gradient.png"}
    kinds = json.loads((folder / "histograms.json").read_text())["gradient"]
    assert kinds == {"mlp_fc1": [{"step": number, **HISTOGRAMS["gradient"]["mlp_fc1"]} for number in steps]}
    picture = imread(folder / "gradient.png")
    assert picture.shape[1] > 500 and picture[..., 0].std() > 0.01, "something is drawn"


def identity(run_dir: Path) -> dict[str, str]:
    try:
        return dict(json.loads((run_dir / "mlflow.json").read_text()))
    except FileNotFoundError:
        return {}


@pytest.mark.rotating
def test_resumed_runs_are_one_mlflow_run_without_duplicate_points(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pods, where the database is on their own disk and copied at the end: the next pod starts from the copy.

    SQLite on a file system of the network relies on its locks.
    """
    runs, experiment = runs_dir / "pods", "resume"
    kept = runs / "tiny" / "r" / "mlflow.db"
    uri = sqlite_uri(kept)
    monkeypatch.setenv("LLMRECIPES_LOCAL_DISK", str(tmp_path / "first"))
    with pytest.raises(KeyboardInterrupt), start(runs, recipe(experiment), "r") as tracker:
        for number in range(1, 121):
            tracker.step(step(number))
        tracker.eval(evaluation(100))
        # Its process has 30 s to finish, and creates the database first.
        wait_for(lambda: "run_id" in identity(runs / "tiny" / "r"), 240)
        raise KeyboardInterrupt
    with closing(sqlite3.connect(kept)) as database:  # a client would keep this file open, which is replaced
        assert database.execute("select status from runs").fetchall() == [("KILLED",)]
    first_copy = kept.read_bytes()

    longer = recipe(experiment, description="now longer")
    monkeypatch.setenv("LLMRECIPES_LOCAL_DISK", str(tmp_path / "second"))
    with start(runs, longer, "r", resumed_step=100) as tracker:
        for number in range(101, 151):
            tracker.step(step(number, tokens_per_second=99.0))
        tracker.eval(evaluation(150))
    run = only_run(uri, experiment)
    assert run.info.status == "FINISHED"
    assert [number for number, _ in history(uri, run.info.run_id, "train/loss")] == list(range(1, 151))
    assert [number for number, _ in history(uri, run.info.run_id, "train/tokens_per_second")] == list(range(1, 151))
    assert [number for number, _ in history(uri, run.info.run_id, "valid/valid_loss")] == [100, 150]
    assert run.data.params["description"] == ""  # MLflow never changes a parameter
    assert run.data.tags["changed.description"] == "now longer"

    assert kept.read_bytes() != first_copy
    assert not list(kept.parent.glob(".mlflow.db*"))
    assert not (runs / "mlflow.db").exists()
    for disk in ("first", "second"):
        assert [path.name for path in (tmp_path / disk).glob("tiny/r/*.db")] == ["mlflow.db"]


@pytest.mark.rotating
def test_a_process_that_is_killed_while_it_creates_the_database_leaves_none(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    code = f"""
import os, signal
from sqlalchemy import event
from sqlalchemy.engine import Engine
from llmrecipes.tracking.mlflow.database import require_database

created = []

@event.listens_for(Engine, "before_cursor_execute")
def die(_connection, _cursor, statement, *_):
    if "CREATE TABLE" in statement:
        created.append(statement)
        if len(created) == 20:
            os.kill(os.getpid(), signal.SIGKILL)

require_database({uri!r}, {str(tmp_path)!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "mlflow.db").exists()
    require_database(uri, str(tmp_path))
    assert client_of(uri).create_experiment("first")
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.rotating
def test_a_run_continues_in_its_mlflow_run(runs_dir: Path) -> None:
    uri, run_dir = tracking_uri(runs_dir), runs_dir / "tiny" / "old"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {at}, "loss": 5.0}}\n' for at in (1, 2, 3)))
    require_database(uri, artifact_root(runs_dir))
    client = client_of(uri)
    key = uuid.uuid4().hex
    experiment = client.create_experiment("before", artifact_root(runs_dir))
    run = client.create_run(experiment, run_name="old", tags={KEY_TAG: key}).info
    for at in (1, 2):
        client.log_metric(run.run_id, "train/loss", 5.0, step=at)
    known = {"tracking_uri": uri, "experiment": "before", "key": key, "run_id": run.run_id}
    (run_dir / "mlflow.json").write_text(json.dumps(known))
    shown = io.StringIO()
    with start(runs_dir, recipe("before", system_metrics_interval=None), "old", resumed_step=3, shown=shown) as tracker:
        tracker.step(step(4))
    (line,) = (line for line in shown.getvalue().splitlines() if "MLflow" in line)
    command, _, place = line.partition(": ")
    assert shlex.split(command) == ["MLflow", "llmrecipes", "ui", "--runs-dir", str(runs_dir)]
    assert place == "experiment before, run old"
    assert only_run(uri, "before").info.run_id == run.run_id
    assert [at for at, _ in history(uri, run.run_id, "train/loss")] == [1, 2, 3, 4]
    assert client.get_experiment(run.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.slow
def test_log_interval_thins_mlflow(runs_dir: Path) -> None:
    made_from = recipe("sparse")
    made_from = made_from.model_copy(update={"train": made_from.train.model_copy(update={"log_interval": 50})})
    with start(runs_dir, made_from, "sparse", resumed_step=900) as tracker:
        for number in range(901, TOTAL - 1):
            tracker.step(step(number))
    run = only_run(tracking_uri(runs_dir), "sparse")
    assert [number for number, _ in history(tracking_uri(runs_dir), run.info.run_id, "train/loss")] == [950]


def train_and_die(runs_dir: Path, name: str) -> None:
    """Ten steps in a process that then gets SIGKILL."""
    script = (
        "import os, pathlib, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import test_tracking_mlflow as t\n"
        "tracker = t.start(pathlib.Path(sys.argv[1]), t.recipe(sys.argv[3]), sys.argv[3])\n"
        "for number in range(1, 11): tracker.step(t.step(number))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", script, str(runs_dir), here, name]
    done = subprocess.run(command, check=False, env={**os.environ, STARTED_FOR: "here"})
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_killed_outright_is_closed_in_mlflow_all_the_same(runs_dir: Path) -> None:
    train_and_die(runs_dir, "killed")
    uri = tracking_uri(runs_dir)
    wait_for(lambda: "run_id" in identity(runs_dir / "tiny" / "killed"))  # two that create the database fail

    def closed() -> bool:
        found = client_of(uri).get_experiment_by_name("killed")
        runs = client_of(uri).search_runs([found.experiment_id]) if found else []
        return bool(runs) and runs[0].info.status == "KILLED"

    wait_for(closed)
    assert len(history(uri, only_run(uri, "killed").info.run_id, "train/loss")) == 10


def mirrors(run_dir: Path) -> list[psutil.Process]:
    """The mirror processes that have a run's lock file open."""
    lock = str(run_dir / LOCK)
    found = psutil.process_iter(["cmdline", "open_files"])
    return [
        process
        for process in found
        if "llmrecipes.tracking.mlflow.sender" in (process.info["cmdline"] or ())
        and any(file.path == lock for file in process.info["open_files"] or ())
    ]


@pytest.mark.slow
def test_the_last_state_wins_however_long_mirrors_of_killed_starts_wait(runs_dir: Path) -> None:
    run_dir = runs_dir / "tiny" / "quick-kills"
    run_dir.mkdir(parents=True)
    with (run_dir / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        train_and_die(runs_dir, "quick-kills")
        wait_for(lambda: len(mirrors(run_dir)) == 1)
        (left_behind,) = mirrors(run_dir)
        assert STARTED_FOR not in left_behind.environ(), "a next start does not end it"
        left_behind.suspend()  # so that it is the last one to get the lock
        wait_for(lambda: left_behind.status() == psutil.STATUS_STOPPED)
    with start(runs_dir, recipe("quick-kills"), "quick-kills", resumed_step=8) as tracker:
        for number in range(9, 13):
            tracker.step(step(number))
    uri = tracking_uri(runs_dir)
    assert only_run(uri, "quick-kills").info.status == "FINISHED"
    left_behind.resume()
    left_behind.wait(60)
    run = only_run(uri, "quick-kills")
    assert run.info.status == "FINISHED"
    assert [number for number, _ in history(uri, run.info.run_id, "train/loss")] == list(range(1, 13))


@pytest.mark.slow
def test_resuming_at_once_after_a_kill_waits_for_the_mirror_left_behind(runs_dir: Path) -> None:
    train_and_die(runs_dir, "at-once")
    with start(runs_dir, recipe("at-once"), "at-once", resumed_step=8) as tracker:
        for number in range(9, 13):
            tracker.step(step(number))
    uri = tracking_uri(runs_dir)
    run = only_run(uri, "at-once")
    assert run.info.status == "FINISHED"
    assert [number for number, _ in history(uri, run.info.run_id, "train/loss")] == list(range(1, 13))


def test_a_reserved_port_is_for_its_server_only() -> None:
    with web.reserved(0) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((web.HOST, port))
        with socket.create_server((web.HOST, port)), web.reserved(port) as another:  # create_server sets SO_REUSEADDR
            assert another != port


@pytest.mark.slow
def test_a_dead_server_neither_stops_nor_delays_training_and_gets_missed_points_on_resume(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    experiment, server_dir, runs = "remote", tmp_path / "server", tmp_path / "runs"
    server_dir.mkdir()
    with web.mlflow_server(server_dir, 0) as (address, process):
        printed = capfd.readouterr()
        # Neither notices of libraries nor an address that does not answer yet.
        assert not printed.out and {line.split()[0] for line in printed.err.splitlines()} == {"creating", "starting"}
        port = int(address.rpartition(":")[2])
        with web.reserved(port) as other:
            assert other != port  # taken: another one is chosen
        with urllib.request.urlopen(address) as page:  # noqa: S310  # http on loopback
            assert b"MLflow" in page.read()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        shown = io.StringIO()
        tracker = start(runs, recipe(experiment, system_metrics_interval=None), "r", shown=shown)
        for number in range(1, 11):
            tracker.step(step(number, loss=float("nan") if number == 3 else 5.0))

        def arrived() -> bool:
            known = identity(runs / "tiny" / "r")
            return "run_id" in known and len(history(address, known["run_id"], "train/loss")) == 10

        wait_for(arrived)
        found = client_of(address).get_run(identity(runs / "tiny" / "r")["run_id"]).info
        tracker.step(step(11))
        assert (
            f"{address}/#/experiments/{found.experiment_id}/runs/{found.run_id}?workflowType=machine_learning"
            in shown.getvalue()
        )
        assert (server_dir / "mlflow.db").exists()
        assert not (runs / "mlflow.db").exists()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with ExitStack() as stack:
        stack.enter_context(web.reserved(port))  # for the server that replaces the dead one
        (mirror,) = [
            child for child in psutil.Process().children() if "llmrecipes.tracking.mlflow.sender" in child.cmdline()
        ]
        with not_waiting_for(mirror):
            for number in range(12, 31):
                tracker.step(step(number, histograms=HISTOGRAMS if number in (20, 30) else None))
        wait_for(lambda: "retrying in the background" in caplog.text)
        tracker.close("KILLED")
        assert caplog.text.count("retrying") == 1  # said once
        # Those after its death; or all, if it died before it had answered. The loss that is NaN is also an alarm.
        lost = re.search(r"(\d+) point\(s\) lost", caplog.text)
        assert lost is not None and int(lost[1]) in (20, 31)
        assert len((runs / "tiny" / "r" / "metrics.jsonl").read_text().splitlines()) == 31

        monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the server's own store is the local one
        again, _ = stack.enter_context(web.mlflow_server(server_dir, port))
        assert again == address
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setattr(
            "llmrecipes.tracking.mirror.CLOSE_SECONDS", 200.0
        )  # this one is alive, however busy the machine
        with start(runs, recipe(experiment, system_metrics_interval=None), "r", resumed_step=25) as tracker:
            for number in range(26, 41):
                tracker.step(step(number, histograms=HISTOGRAMS if number == 40 else None))
        run = only_run(address, experiment)
        require_histograms(address, run.info.run_id, tmp_path, [20, 40])  # 30 was after the checkpoint
        require_datasets(run)
        losses = history(address, run.info.run_id, "train/loss")
        assert [number for number, _ in losses] == list(range(1, 41))
        assert math.isnan(losses[2][1])
        assert run.info.status == "FINISHED"


@pytest.mark.rotating
def test_an_unreachable_server_costs_a_warning_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with web.reserved(0) as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:sesame@127.0.0.1:{port}/x?token=open-sesame&k=v")
    run_dir = tmp_path / "tiny" / "r"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')  # may be in MLflow since an earlier attempt
    with start(tmp_path, recipe("nowhere"), "r", resumed_step=1) as tracker:
        tracker.step(step(2))
        wait_for(lambda: "retrying in the background" in caplog.text)
    assert "1 point(s) lost" in caplog.text
    written = [path.read_text() for path in run_dir.rglob("*") if path.is_file()]
    assert "sesame" not in caplog.text + "".join(written)


@pytest.mark.slow
def test_a_run_deleted_in_mlflow_becomes_a_new_one(runs_dir: Path) -> None:
    with start(runs_dir, recipe("deleted"), "d") as tracker:
        tracker.step(step(1))
    uri = tracking_uri(runs_dir)
    first = only_run(uri, "deleted").info.run_id
    client_of(uri).delete_run(first)
    with start(runs_dir, recipe("deleted"), "d", resumed_step=1) as tracker:
        tracker.step(step(2))
    second = only_run(uri, "deleted").info.run_id
    assert second != first
    assert history(uri, second, "train/loss") == [(1, 5.0), (2, 5.0)]  # the record is complete, so the new run is too


@pytest.mark.slow
def test_more_values_than_one_request_may_have(runs_dir: Path) -> None:
    with start(runs_dir, recipe("many", system_metrics_interval=None), "m") as tracker:
        for number in range(1, TOTAL + 1):
            tracker.step(step(number))
    run = only_run(tracking_uri(runs_dir), "many")
    with closing(sqlite3.connect(runs_dir / "mlflow.db")) as database:
        counts = Counter(
            key for (key,) in database.execute("select key from metrics where run_uuid = ?", (run.info.run_id,))
        )
    assert set(counts.values()) == {TOTAL}


def test_the_page_of_a_remote_store_is_named_and_no_runs_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused(tmp_path / "missing"):
        web.serve_mlflow(tmp_path / "missing")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:sesame@tracking.example.org")
    web.serve_mlflow(tmp_path / "missing")
    assert (
        capsys.readouterr().out
        == f"runs are tracked by a server; open https://tracking.example.org/{web.MLFLOW_PAGE}\n"
    )


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://u:p@host:5000/x?token=1#y", "http://host:5000/x"),
        ("postgresql://u:p@host/db", "postgresql://host/db"),
        ("sqlite:////a b/m.db", "sqlite:////a b/m.db"),
    ],
)
def test_addresses_are_shown_without_secrets(uri: str, shown: str) -> None:
    assert redact(uri) == shown
