"""TensorBoard on runs, with the real server."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.tracking import web
from llmrecipes.tracking.events import StepMetrics
from llmrecipes.tracking.tensorboard import TensorBoardSink
from tests.refusals import require_message


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    for run_id in ("one", "two", "none"):
        run_dir = tmp_path / "tiny" / run_id
        run_dir.mkdir(parents=True)
        (run_dir / "recipe.yaml").touch()
        if run_id != "none":
            sink = TensorBoardSink(run_dir / "tensorboard", resumed_step=0, log_interval=1)
            sink.step(
                StepMetrics(
                    step=1,
                    loss=2.5,
                    grad_norm=1.0,
                    lr=1e-3,
                    consumed_samples=1,
                    consumed_tokens=1,
                    step_seconds=1.0,
                    tokens_per_second=1.0,
                )
            )
            sink.close("FINISHED")
    return tmp_path


@pytest.mark.slow
def test_tensorboard_shows_the_runs_that_have_files_on_loopback_and_ends(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dirs = [runs_dir / "tiny" / run_id for run_id in ("one", "two", "none")]
    with web.tensorboard_server(run_dirs, 0) as (address, number, process):
        assert address.startswith("http://127.0.0.1:") and number == 2
        with urllib.request.urlopen(f"{address}/data/plugin/scalars/tags", timeout=10) as answer:  # noqa: S310
            tags = json.load(answer)
    assert set(tags) == {"tiny/one", "tiny/two"}
    assert "train/loss" in tags["tiny/one"]
    assert process.poll() is not None
    printed = capfd.readouterr()  # its own address would be the second, and there is no TensorFlow to miss
    assert not printed.out and "http" not in printed.err and "TensorFlow" not in printed.err
    assert {line.split()[0] for line in printed.err.splitlines()} == {"starting"}
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("arguments", [["none"], ["tiny/none"], []])
def test_runs_without_files_are_one_message(
    runs_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for run_id in ("one", "two"):
        for path in (runs_dir / "tiny" / run_id / "tensorboard").iterdir():
            path.unlink()
    assert cli.run(["tensorboard", *arguments, "--runs-dir", str(runs_dir)]) == 2
    where = runs_dir / "tiny" / "none" if arguments else "TensorBoard"
    require_message(capsys.readouterr().err, where, rule="tracking.tensorboard")


def test_no_runs_and_no_such_run_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tensorboard", "--runs-dir", str(tmp_path / "missing")]) == 2
    require_message(capsys.readouterr().err, tmp_path / "missing")
    assert cli.run(["tensorboard", "nobody", "--runs-dir", str(tmp_path)]) == 2
    require_message(capsys.readouterr().err, tmp_path, rule="recipe/run-id")
