"""Starts of a run, to stop one that restarts repeatedly without progress."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from llmrecipes.checkpoint.local_parts import LocalPart, folder_of, newest_complete, parts_in
from llmrecipes.checkpoint.manifest import InvalidCheckpoint, Manifest, read_manifest
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.io import write_atomic
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.untrusted import RECORD, Refused, read_json

logger = logging.getLogger(__name__)

STARTS_WITHOUT_PROGRESS = 3
"""Allowed restarts in a row from the same newest checkpoint."""


def require_progress(run: Run, job: str, restart: int, step: int, max_restarts: int) -> None:
    """Record this start, and stop a job that makes no progress.

    Args:
        job: id of the job, or of the process that starts ranks; starts of another one do not count.
        restart: number of restarts so far.
        step: step of the newest checkpoint.
        max_restarts: maximum number of restarts.

    Raises:
        UserError: too many restarts, or too many at the same step; `ExitCode.STOP`.
    """
    starts = [*_read(run), {"job": job, "restart": restart, "step": step}]
    write_atomic(run.starts, json.dumps(starts) + "\n")
    if restart > max_restarts:
        raise UserError(
            f"restart {restart} of job {job} exceeds --max-restarts {max_restarts}",
            where=str(run.path),
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
            f"{same - 1} restarts without progress: the newest checkpoint is still that of step {step}",
            where=str(run.path),
            rule="a run that saves nothing between restarts is stopped",
            fix="find the cause in the log, or lower checkpoint.save_interval; then start it again with the same "
            "--run-id",
            code=ExitCode.STOP,
        )


def newest_step(run: Run, recipe: Recipe, ranks: int) -> int:
    """Step of the newest checkpoint, or local one: that of the last start, or one that this machine has whole.

    Args:
        ranks: that are started; local checkpoints of another number of ranks cannot be loaded, and do not count.
    """
    step = run.newest_step()
    values, _, found = _local(run, recipe)
    resumed = values["resumed"] if values and values.get("ranks") == ranks else 0
    parts = [part for part in found if part.ranks == ranks]
    return max(step, resumed, *(local for local, _ in newest_complete(parts)))


def newest_local(run: Run, recipe: Recipe) -> Manifest | None:
    """What the newest part of a local checkpoint on this machine says; None: there is none."""
    _, folder, parts = _local(run, recipe)
    for part in reversed(parts):
        try:
            return read_manifest(folder / str(part))
        except InvalidCheckpoint:
            continue
    return None


def _local(run: Run, recipe: Recipe) -> tuple[dict[str, Any], Path, list[LocalPart]]:
    """What the run records of its local checkpoints, with an integer `resumed`; and this machine's folder and parts."""
    directory = recipe.checkpoint.non_persistent_local_ckpt_dir
    try:
        values = read_json(run.local_checkpoints, root=run.path, most=RECORD)
        values["resumed"], token = int(values["resumed"]), str(values["token"])
    except (OSError, ValueError, KeyError, TypeError, Refused):
        return {}, Path(), []
    if directory is None:
        return {}, Path(), []
    folder = folder_of(directory, run.recipe_name, token, node=0)
    return values, folder, parts_in(folder)


def _read(run: Run) -> list[dict[str, Any]]:
    """Earlier starts; none if the file is corrupt, so that the count starts again."""
    try:
        values = read_json(run.starts, root=run.path, most=RECORD)
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        values = None
    if not isinstance(values, list) or not all(
        isinstance(value, dict) and {"job", "step"} <= value.keys() for value in values
    ):
        logger.warning("%s is corrupt; the restart count starts at zero", run.starts)
        return []
    return values
