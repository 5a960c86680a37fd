"""`llmrecipes plan --calibration`: predicted beside measured in tracked runs, and a profile corrected by them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.plan.speed.calibration import CalibrationReport, MeasuredRun, report, tracked
from llmrecipes.recipe.reading.former import current
from llmrecipes.runfiles import PLAN, RunFiles
from llmrecipes.tracking.events import MEASURED
from llmrecipes.tracking.run_list import last_note
from llmrecipes.untrusted import read_json

_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "data": "data_parallel_size",
}


def calibration(names: Sequence[str], runs_dir: Path, experiment: str | None) -> CalibrationReport:
    """Compare what runs predicted and measured.

    Args:
        names: runs; a recipe's name is all its runs. Empty: all in `runs_dir`, unless there is an experiment.
        experiment: MLflow experiment, whose runs are added where `runs_dir` does not have them.

    Raises:
        UserError: no such run or experiment, or none of them has both figures.
    """
    from llmrecipes.rundir import Run

    measured: list[MeasuredRun] = []
    left_out: list[tuple[str, str]] = []
    files: list[RunFiles] = []
    for name in names:
        files += Run.all(runs_dir, name) or [Run.find(name, runs_dir)]
    if not names and experiment is None:
        files = list(RunFiles.all(runs_dir))
    for run in files:
        result = _of_directory(run)
        if isinstance(result, str):
            left_out.append((run.name, result))
        else:
            measured.append(result)
    if experiment is not None:
        known = {run.run_id for run in files}
        for name, row in _of_mlflow(experiment, runs_dir):
            if name in known:
                continue
            if isinstance(row, str):
                left_out.append((name, row))
            else:
                measured.append(row)
    if not measured:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out[:3])
        raise UserError(
            f"no run has a predicted and a measured step time{f' ({reasons})' if reasons else ''}",
            where=str(runs_dir) if experiment is None else experiment,
            rule="a run records both on GPUs with coefficients, or with a --cluster that `bench machine` has measured",
            fix="llmrecipes train RECIPE --cluster NAME, then plan --calibration",
        )
    return report(measured, left_out)


_NOTHING = "no prediction: nothing was known of its machine's speed"
_SHORT = "no measured step: it has not ended by itself, or has too few steps"


def _of_directory(run: RunFiles) -> MeasuredRun | str:
    """A run by its files, or why it does not count."""
    try:
        plan = read_json(run.path / PLAN, root=run.path)
        predicted = plan.get("predicted")
        degrees = plan["degrees"]
        if not predicted:
            return _NOTHING
        values = last_note(run.path, MEASURED)
        if values is None:
            return _SHORT
        sizes = {kind: int(degrees.get(name, plan.get(name, 1)) or 1) for kind, name in _SIZES.items()}
        return tracked(run.name, sizes, predicted, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return "its plan.json or metrics.jsonl cannot be read"


def _of_mlflow(experiment: str, runs_dir: Path) -> list[tuple[str, MeasuredRun | str]]:
    from llmrecipes.scaling.points import experiment_runs

    rows: list[tuple[str, MeasuredRun | str]] = []
    for run in experiment_runs(experiment, runs_dir):
        name = run.info.run_name or run.info.run_id
        rows.append((name, _of_mlflow_run(name, run)))
    return rows


def _of_mlflow_run(name: str, run: Any) -> MeasuredRun | str:
    params = {current(key): value for key, value in run.data.params.items()}
    metrics = run.data.metrics
    try:
        predicted = json.loads(run.data.tags.get("predicted", "null"))
        if not predicted:
            return _NOTHING
        if "measured/step_seconds" not in metrics:
            return _SHORT
        sizes = {kind: int(json.loads(params.get(f"layout.{key}", "1")) or 1) for kind, key in _SIZES.items()}
        sizes["data"] = int(run.data.tags.get("layout", "dp1").removeprefix("dp"))
        return tracked(name, sizes, predicted, metrics)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return "its record cannot be read"


def write(calibrated: CalibrationReport, cluster: str, path: Path) -> None:
    """Copy a cluster profile, with the factors of its device.

    Raises:
        UserError: no run was on this device, or the file exists or cannot be written.
    """
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.plan.speed.forecast import device_of
    from llmrecipes.workflow.bench import save_profile

    profile = load_profile(cluster)
    device = device_of(profile)
    factors = next((fit for fit in calibrated.fits if fit.device == device.name), None)
    if factors is None:
        measured = ", ".join(sorted({fit.device for fit in calibrated.fits}))
        raise UserError(
            f"no run on {device.name}",
            where="--write",
            rule="a profile can only get factors of its own device",
            fix=f"--cluster with {measured}",
        )
    data = profile.model_dump(mode="json", exclude_defaults=True)
    data["name"] = path.stem
    data["calibration"] = factors.calibration.model_dump(mode="json")
    save_profile(data, path)
