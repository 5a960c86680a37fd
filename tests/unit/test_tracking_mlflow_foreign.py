"""Real MLflow: an mlflow.json that somebody else wrote leads to no database and no run but the run's own."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.tracking.mlflow.client import MlflowRun
from llmrecipes.tracking.mlflow.database import DATABASE, KEY_TAG, artifact_root, require_database, restore, sqlite_uri
from llmrecipes.tracking.mlflow.sink import RUN_FILE, MlflowConfig, add_metrics

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A runs directory with MLflow's database, and the ids in it of our run and of another one."""
    runs_dir = tmp_path_factory.mktemp("runs")
    uri = sqlite_uri(runs_dir / DATABASE)
    require_database(uri, artifact_root(runs_dir))
    from mlflow.tracking import MlflowClient  # takes a second, and every process of a test run imports this module

    client = MlflowClient(uri)
    experiment = client.create_experiment("ours", artifact_root(runs_dir))
    ours = client.create_run(experiment, tags={KEY_TAG: KEY}).info.run_id
    return runs_dir, ours, client.create_run(experiment).info.run_id


def run_with(runs_dir: Path, name: str, values: dict[str, Any]) -> Path:
    run_dir = runs_dir / "tiny" / name
    run_dir.mkdir(parents=True)
    (run_dir / RUN_FILE).write_text(json.dumps(values))
    return run_dir


def metrics_of(database: Path, run_id: str) -> dict[str, float]:
    from mlflow.tracking import MlflowClient

    return dict(MlflowClient(sqlite_uri(database)).get_run(run_id).data.metrics)


def someones(path: Path) -> bytes:
    """A database of another program, and its content."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE photos (name TEXT)")
        database.commit()
    return path.read_bytes()


def test_no_database_but_the_store_is_opened(made: tuple[Path, str, str], tmp_path: Path) -> None:
    runs_dir, ours, _ = made
    photos, missing = tmp_path / "photos.db", tmp_path / "new.db"
    before = someones(photos)
    shutil.copyfile(runs_dir / DATABASE, tmp_path / "other.db")  # MLflow's, and it has the run
    other = (tmp_path / "other.db").read_bytes()
    for number, path in enumerate((photos, missing, tmp_path / "other.db")):
        values = {"tracking_uri": sqlite_uri(path), "run_id": "x", "key": KEY}
        run_dir = run_with(runs_dir, f"elsewhere-{number}", values)
        assert RUN_FILE in str(add_metrics(run_dir, runs_dir, {"acc": 1.0}, step=3))
    assert photos.read_bytes() == before and (tmp_path / "other.db").read_bytes() == other and not missing.exists()

    moved = run_with(runs_dir, "moved", {"tracking_uri": "sqlite:////old/place/mlflow.db", "run_id": ours, "key": KEY})
    assert add_metrics(moved, runs_dir, {"acc": 0.5}, step=3) is None
    assert metrics_of(runs_dir / DATABASE, ours) == {"acc": 0.5}


@pytest.mark.parametrize("linked", [False, True])
def test_a_copy_in_the_run_is_written_only_if_it_is_a_file_there_with_the_run(
    made: tuple[Path, str, str], tmp_path: Path, linked: bool
) -> None:
    runs_dir, ours, _ = made
    outside = tmp_path / "store.db"
    shutil.copyfile(runs_dir / DATABASE, outside)
    values = {"tracking_uri": "sqlite:////pod/mlflow.db", "run_id": ours, "key": KEY}
    run_dir = run_with(tmp_path, "pod", values)
    copy = run_dir / DATABASE
    if linked:
        copy.symlink_to(outside)
        before = outside.read_bytes()
        assert add_metrics(run_dir, tmp_path, {"pod": 2.0}, step=1) is not None
        assert outside.read_bytes() == before
        with pytest.raises(ValueError, match="link"):  # nor does a pod start from it
            restore(sqlite_uri(tmp_path / "disk" / DATABASE), copy)
    else:
        shutil.copyfile(outside, copy)
        assert add_metrics(run_dir, tmp_path, {"pod": 2.0}, step=1) is None
        assert metrics_of(copy, ours)["pod"] == 2.0
        copy.unlink()
        before = someones(copy)
        assert add_metrics(run_dir, tmp_path, {"pod": 2.0}, step=1) is not None
        assert copy.read_bytes() == before


def test_a_run_with_another_key_is_somebody_elses(made: tuple[Path, str, str]) -> None:
    runs_dir, _, theirs = made
    uri = sqlite_uri(runs_dir / DATABASE)
    values = {"tracking_uri": uri, "experiment": "ours", "run_id": theirs, "key": KEY[::-1]}
    run_dir = run_with(runs_dir, "foreign", values)
    assert add_metrics(run_dir, runs_dir, {"acc": 1.0}, step=3) is not None
    config = MlflowConfig(
        run_dir=str(run_dir), run_name="foreign", log_interval=1, resumed_step=0, total_steps=1, tags={}, artifacts=[],
        system_metrics_interval=None, uri=uri, artifact_root=artifact_root(runs_dir), experiment="ours",
    )  # fmt: skip
    assert MlflowRun(config).run_id != theirs  # training goes on in a new one
    assert metrics_of(runs_dir / DATABASE, theirs) == {}


def test_addresses_in_a_message_are_short_and_printable(made: tuple[Path, str, str]) -> None:
    runs_dir, ours, _ = made
    values = {"tracking_uri": "http://a\x1b[2J\n" + "x" * 100_000, "run_id": ours, "key": KEY}
    said = str(add_metrics(run_with(runs_dir, "long", values), runs_dir, {}, step=0))
    assert said.isprintable() and len(said) < 1000
