"""The evaluations of a run, kept in its directory: evaluations.jsonl, a line for each task."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmrecipes.errors import UserError
from llmrecipes.evaluation.request import EvaluationResult
from llmrecipes.io import write_atomic
from llmrecipes.redact import redacted
from llmrecipes.runfiles import RunFiles
from llmrecipes.untrusted import lines, parse_json
from llmrecipes.untrusted import read as read_file

PREFIX = "eval"
"""Of the names of metrics in the trackers: eval/<task>/<metric>."""


def records(results: Sequence[EvaluationResult], step: int, checkpoint: str) -> list[dict[str, Any]]:
    """Results as JSON values without secrets: a number that is not finite is null.

    Args:
        results: results of one evaluation.
        step: step of the checkpoint.
        checkpoint: its directory.
    """
    now = time.time()
    return redacted(
        [
            {
                "time": now,
                "step": step,
                "checkpoint": checkpoint,
                "task": result.task,
                "metrics": {key: value if math.isfinite(value) else None for key, value in result.metrics.items()},
                "settings": result.settings,
                "examples": list(result.examples),
            }
            for result in results
        ]
    )


def append(run_dir: Path, new: Sequence[dict[str, Any]]) -> None:
    """Add records to those of the run: all of them, or none if this process is killed or the disk is full.

    Raises:
        UserError: they cannot be written.
    """
    path = RunFiles(run_dir).evaluations
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in new)
    try:
        with FileLock(path.with_name(f".{path.name}.lock")):
            before = read_file(path, root=run_dir).decode() if path.exists() else ""
            write_atomic(path, before + text)
    except OSError as error:
        raise UserError(
            f"cannot write the results: {error.strerror}",
            where=str(path),
            rule="results are kept in the run's directory",
            fix="free some disk space, or make the directory writable",
        ) from error


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first; lines that cannot be read are left out."""
    path = RunFiles(run_dir).evaluations
    results = []
    try:
        for line in lines(path, root=run_dir):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if _is_record(record):
                results.append(record)
    except FileNotFoundError:
        return []
    return results


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("step")) is int
        and isinstance(value.get("task"), str)
        and isinstance(metrics := value.get("metrics"), dict)
        and all(isinstance(number, int | float | None) for number in metrics.values())
    )


def metric_names(record: dict[str, Any]) -> dict[str, float]:
    """A record's numbers with the names that trackers have for them; those that are not finite are left out."""
    task = _safe(Path(record["task"]).name if "/" in record["task"] else record["task"])
    return {f"{PREFIX}/{task}/{_safe(key)}": value for key, value in record["metrics"].items() if value is not None}


def _safe(text: str) -> str:
    """MLflow allows letters, digits, and a few signs."""
    return "".join(sign if sign.isalnum() or sign in "_.- " else "_" for sign in text)
