"""A run whose metrics go to MLflow in a real PostgreSQL, which is away for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.search.conftest import Server
from tests.unit.test_tracking_mlflow import history, identity, only_run, recipe, start, step, wait_for


def test_a_database_that_is_away_gets_the_points_when_it_is_back(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = postgres.url.replace("postgresql:", "postgresql+psycopg2:")  # SQLAlchemy 2.1 takes psycopg 3 by itself
    monkeypatch.chdir(tmp_path)  # MLflow keeps artifacts of a database in the working directory
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr("llmrecipes.tracking.mirror.CLOSE_SECONDS", 200.0)
    run_dir = tmp_path / "tiny" / "r"
    with start(tmp_path, recipe("away", system_metrics_interval=None), "r") as tracker:
        for number in range(1, 6):
            tracker.step(step(number))
        wait_for(lambda: "run_id" in identity(run_dir), 180.0)
        run_id = identity(run_dir)["run_id"]
        wait_for(lambda: len(history(uri, run_id, "train/loss")) == 5, 120.0)
        postgres.stop()
        try:
            for number in range(6, 31):
                tracker.step(step(number))
            wait_for(lambda: "retrying in the background" in caplog.text, 120.0)
            assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 30
        finally:
            postgres.start()
        tracker.step(step(31))
    assert caplog.text.count("retrying in the background") == 1, "said once"
    run = only_run(uri, "away")
    assert [number for number, _ in history(uri, run.info.run_id, "train/loss")] == list(range(1, 32))
    assert run.info.status == "FINISHED"
