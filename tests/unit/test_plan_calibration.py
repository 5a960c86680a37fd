"""Predicted beside measured: what a run records, the factors of its machine, and the plan that uses them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmrecipes.cli.app import run
from llmrecipes.hardware.load import clusters_dir
from llmrecipes.plan.speed.calibration import MeasuredRun, fit, tracked
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import MEASURED
from llmrecipes.workflow.calibrated_profile import calibration
from llmrecipes.workflow.speed_forecast import of_recipe
from tests.helpers import lines, tiny_on, write_recipe

RATES = {
    "gflops": 50.0, "gflops_all": 80.0, "depth": 20.0, "attention_gflops": 20.0, "memory_gb_per_s": 10.0,
    "launch_us": 5.0, "latency_us": 100.0,
}  # fmt: skip


def one(compute: float, communication: float, measured: float, memory: float = 1.0) -> MeasuredRun:
    predicted = compute + communication
    return MeasuredRun("run", "H100", "data", compute, communication, predicted, measured, memory, 1.0)


def test_factors_of_kernels_and_communication_are_recovered() -> None:
    shares = [(1.0, 0.1), (2.0, 1.0), (0.5, 0.4)]
    found = fit([one(c, m, 1.3 * c + 0.6 * m) for c, m in shares])
    assert found.calibration.compute == pytest.approx(1.3) and found.calibration.communication == pytest.approx(0.6)
    assert found.corrected_error < 1e-9 < found.median_error and not found.unknown
    assert found.calibration.runs == 3


@pytest.mark.parametrize(
    ("runs", "compute", "communication"),
    [
        ([one(1.0, 0.01, 1.51), one(2.0, 0.0, 3.0)], 1.5, 1.0),
        ([one(1.0, 0.5, 3.0), one(2.0, 1.0, 6.0)], 2.0, 2.0),
        ([one(1.0, 0.5, 3.0)], 2.0, 2.0),
    ],
)
def test_a_factor_that_runs_do_not_tell_is_not_made_up(
    runs: list[MeasuredRun], compute: float, communication: float
) -> None:
    found = fit(runs)
    assert found.unknown
    assert found.calibration.compute == pytest.approx(compute, rel=1e-3)
    assert found.calibration.communication == pytest.approx(communication)


@pytest.mark.parametrize(
    "wrong", [0, -1, float("nan"), float("inf"), 1e-308, 1e308, pytest.param(10**400, id="huge"), "x", None]
)
@pytest.mark.parametrize("key", ["compute_seconds", "measured/step_seconds", "measured/memory_bytes"])
def test_a_run_with_a_damaged_figure_is_left_out(key: str, wrong: object, tmp_path: Path) -> None:
    predicted = {"device": "H100", "step_seconds": 1.0, "compute_seconds": 0.9, "communication_seconds": 0.1,
                 "memory_bytes": 1e9}  # fmt: skip
    measured = {"measured/step_seconds": 1.1, "measured/memory_bytes": 1e9}
    for name, damaged in (("good", {}), ("bad", {key: wrong})):
        folder = tmp_path / "gpt-tiny" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").touch()
        values = {each: damaged.get(each, value) for each, value in predicted.items()}
        (folder / "plan.json").write_text(json.dumps({"degrees": {}, "predicted": values}))
        details = {each: damaged.get(each, value) for each, value in measured.items()}
        (folder / "metrics.jsonl").write_text(json.dumps({"event": MEASURED, "step": 9, "details": details}) + "\n")
    made = calibration([], tmp_path, None)
    assert [run.name for run in made.runs] == ["gpt-tiny/good"]
    assert [name for name, _ in made.left_out] == ["gpt-tiny/bad"]


def test_a_calibrated_prediction_is_not_corrected_twice() -> None:
    predicted = {
        "device": "H100", "step_seconds": 2.6, "compute_seconds": 2.0, "communication_seconds": 0.6,
        "memory_bytes": 1e9, "calibration": {"compute": 2.0, "communication": 0.5, "runs": 4},
    }  # fmt: skip
    values = {"measured/step_seconds": 2.6, "measured/memory_bytes": 2e9}
    made = tracked("a", {"tensor": 2, "data": 4}, predicted, values)
    assert (made.compute, made.communication) == (1.0, 1.2)
    assert made.error == 0 and made.memory_error == -0.5 and made.layout == "tensor+data"
    again = fit([made, replace(made, compute=2.0, communication=0.1, measured=4.05)])
    assert again.calibration.compute == pytest.approx(2.0) and again.calibration.communication == pytest.approx(0.5)


def test_memory_of_a_gpu_is_compared_without_what_torch_does_not_see() -> None:
    made = of_recipe("gpt-7b", [], "h100-ib", 1, None)
    memory = made.plan.memory
    assert made.record()["memory_bytes"] == memory.total - memory.workspace < memory.total
    parts = made.record()["compute_seconds"] + made.record()["communication_seconds"]
    assert parts == pytest.approx(made.step.seconds)


def trained(recipe: str, folder: Path, runs: Path, data_dir: Path) -> Path:
    """A run of a recipe with a profile of this machine; the profile."""
    profile = yaml.safe_load((clusters_dir() / "laptop.yaml").read_text()) | {"name": "here", "rates": RATES}
    here = folder / "here.yaml"
    here.write_text(yaml.safe_dump(profile))
    started = ["train", recipe, "--cluster", str(here), "--run-id", "one", "--no-sample"]
    assert run([*started, "--runs-dir", str(runs), "--data-dir", str(data_dir)]) == 0
    return here


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_measures_beside_its_prediction_and_calibrates_its_profile(
    tmp_path: Path, corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    recipe = write_recipe(
        tiny_on(corpus, train={"train_iters": 8, "eval_interval": 100}, checkpoint={"save_interval": 100}), tmp_path
    )
    here = trained(recipe, tmp_path, runs, data_dir)
    assert "measured:" in capsys.readouterr().out
    found = Run.find("one", runs)
    plan = json.loads((found.path / "plan.json").read_text())
    (note,) = (line for line in lines(found.path) if line.get("event") == MEASURED)
    times = [line["step_seconds"] for line in lines(found.path) if "loss" in line][2:]
    values = note["details"]
    assert values["measured/steps"] == len(times) == 6
    assert min(times) <= values["measured/step_seconds"] <= max(times)
    assert values["predicted/step_seconds"] == plan["predicted"]["step_seconds"] > 0
    assert values["measured/memory_bytes"] > 1e8 and plan["predicted"]["device"] == "here"

    better = tmp_path / "better.yaml"
    shown = planned(capsys, "--calibration", "--runs-dir", str(runs), "--cluster", str(here), "--write", str(better))
    (row,) = shown["runs"]
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    (factors,) = shown["calibration"]
    assert factors["device"] == "here" and factors["runs"] == 1 and factors["unknown"]
    before, after = (planned(capsys, recipe, "--cluster", str(path)) for path in (here, better))
    # The two microseconds of each product are not scaled.
    assert after["step_seconds"] / before["step_seconds"] == pytest.approx(factors["compute"], rel=0.05)
    assert before["calibration"] is None and after["calibration"]["runs"] == 1


@pytest.mark.slow
def test_runs_that_only_mlflow_has_are_compared(
    tmp_path: Path, corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    recipe = tiny_on(
        corpus, train={"train_iters": 6, "eval_interval": 100}, tracking={"mlflow": True, "experiment": "timed"}
    )
    trained(write_recipe(recipe, tmp_path), tmp_path, runs, data_dir)
    here = planned(capsys, "--calibration", "--runs-dir", str(runs))["runs"][0]
    shutil.rmtree(Run.find("one", runs).path)
    (there,) = planned(capsys, "--calibration", "--runs-dir", str(runs), "--experiment", "timed")["runs"]
    assert there | {"name": here["name"]} == here


def test_without_a_measured_run_nothing_is_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--calibration", "--runs-dir", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert run(["plan"]) == 2
    assert "RECIPE" in capsys.readouterr().err
