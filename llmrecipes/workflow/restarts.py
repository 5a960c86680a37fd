"""Starts of a run, to stop one that restarts repeatedly without progress."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.io import write_atomic
from llmrecipes.untrusted import RECORD, read_json

logger = logging.getLogger(__name__)

STARTS = "starts.json"
STARTS_WITHOUT_PROGRESS = 3
"""Allowed restarts in a row from the same newest checkpoint."""


def newest_step(run_dir: Path) -> int:
    """Step of the newest checkpoint that is complete by names and sizes; 0 without one."""
    from llmrecipes.checkpoint.store import CheckpointStore

    entries = CheckpointStore(run_dir / "checkpoints").entries()
    return entries[-1].step if entries else 0


def require_progress(record: Path, job: str, restart: int, step: int, max_restarts: int) -> None:
    """Record this start, and stop a job that makes no progress.

    Args:
        record: file with the starts of this run.
        job: id of the job, or of the process that starts ranks; starts of another one do not count.
        restart: number of restarts so far.
        step: step of the newest checkpoint.
        max_restarts: maximum number of restarts.

    Raises:
        UserError: too many restarts, or too many at the same step; `ExitCode.STOP`.
    """
    starts = [*_read(record), {"job": job, "restart": restart, "step": step}]
    write_atomic(record, json.dumps(starts) + "\n")
    if restart > max_restarts:
        raise UserError(
            f"restart {restart} of job {job} exceeds --max-restarts {max_restarts}",
            where=str(record.parents[1]),
            fix="resume with the same --run-id, or raise --max-restarts",
            code=ExitCode.STOP,
        )
    same = 0
    for start in reversed([start for start in starts if start.get("job") == job]):
        if start["step"] != step:
            break
        same += 1
    if restart and same > STARTS_WITHOUT_PROGRESS:
        raise UserError(
            f"{same - 1} restarts without progress: the newest checkpoint is that of step {step} each time",
            where=str(record.parents[1]),
            rule="a run that saves nothing between restarts is stopped",
            fix="read the log for what ends it; a smaller checkpoint.save_interval loses less; then start it again "
            "with the same --run-id",
            code=ExitCode.STOP,
        )


def _read(record: Path) -> list[dict[str, Any]]:
    """Earlier starts; none if the file is corrupt, so that the count starts again."""
    try:
        values = read_json(record, root=record.parents[1], most=RECORD)
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        values = None
    if not isinstance(values, list) or not all(
        isinstance(each, dict) and {"job", "step"} <= each.keys() for each in values
    ):
        logger.warning("%s is corrupt; the restart count starts at zero", record)
        return []
    return values
