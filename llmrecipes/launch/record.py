"""The job of a run: a small file in the run's directory, so that any later process can find the job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.io import write_atomic
from llmrecipes.launch.base import JobRef
from llmrecipes.runfiles import SUBMISSION, RunFiles
from llmrecipes.untrusted import RECORD, read_json
from llmrecipes.untrusted import read as read_file


@dataclass(frozen=True)
class JobRecord:
    """The newest submission of a run; `cancelled`: by `llmrecipes cancel`, which a scheduler may forget."""

    ref: JobRef
    cancelled: bool = False


def write(ref: JobRef, *, cancelled: bool = False) -> None:
    """Record the job of a run.

    Raises:
        OSError: it cannot be written.
    """
    path = RunFiles(ref.run_dir).submission
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"launcher": ref.launcher, "job_id": ref.job_id, "cancelled": cancelled}
    write_atomic(path, json.dumps(values) + "\n")


def read(run_dir: Path) -> JobRecord | None:
    """The newest submission of a run; None if there is none.

    Raises:
        UserError: the record is corrupt.
    """
    path = RunFiles(run_dir).submission
    try:
        values: Any = read_json(path, root=run_dir, most=RECORD)
        ref = JobRef(str(values["launcher"]), str(values["job_id"]), run_dir)
        return JobRecord(ref, bool(values["cancelled"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "the record of the submitted job is corrupt",
            where=str(path),
            fix="use the job id instead of the run",
        ) from error


def write_choice(run_dir: Path, chosen: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Record why a job has its layout, which it gets as keys.

    Args:
        chosen: `RunPlan.chosen`.
        layout: values of the keys that are chosen, as plain data.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(RunFiles(run_dir).choice, json.dumps({"chosen": chosen, "layout": layout}) + "\n")


def choice(run_dir: Path, layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """`RunPlan.chosen` of the run's submission; None if there is none, or none of this layout."""
    try:
        values: Any = read_json(RunFiles(run_dir).choice, root=run_dir, most=RECORD)
        return dict(values["chosen"]) if values["layout"] == layout else None
    except (OSError, ValueError, KeyError, TypeError):  # it only says why
        return None


def submitted(runs_dir: Path) -> Iterator[Path]:
    """Directories of all runs that were submitted from this machine."""
    yield from (run.path for run in RunFiles.all(runs_dir, holding=SUBMISSION))


def exit_code(run_dir: Path, job_id: str) -> int | None:
    """The exit code that a job wrote to its run's directory; None if there is none for this job."""
    try:
        job, _, code = read_file(RunFiles(run_dir).exit_code, root=run_dir, most=RECORD).decode().strip().partition(" ")
    except (OSError, ValueError):
        return None
    return int(code) if job == job_id and code.isdecimal() and len(code) < 4 else None
