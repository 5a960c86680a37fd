"""Whether a run may start at step 0: only if it has never saved a checkpoint, or its history was moved aside.

A run that was killed before its first checkpoint restarts automatically, whatever steps it has recorded. A run that has
saved one, but has no usable one left, does not: it would overwrite what is left. Evidence of a saved checkpoint is any
of

- a directory `checkpoints/step-*` or `checkpoints/damaged-*`;
- a note `checkpoint_saved` in metrics.jsonl;
- `checkpoint` in status.json; in one of an older version, the state `finished` or `saved` after the first step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from llmrecipes.checkpoint.store import DAMAGED, DamagedCheckpoint
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.rundir import Run
from llmrecipes.runfiles import CHECKPOINTS, LOGS, METRICS
from llmrecipes.tracking import status
from llmrecipes.tracking.jsonl import parse
from llmrecipes.untrusted import lines

ASIDE = "before-"
KEPT = (LOGS, CHECKPOINTS)
"""Directories that stay when a run's history is moved: they have files of the current start."""


def require_complete(run_dir: Path) -> None:
    """Check names and sizes only, for launchers; the first rank compares hashes.

    Raises:
        UserError: see `require_none_saved`.
    """
    store = Run(run_dir).store()
    if run_dir.is_dir() and not store.entries():
        require_none_saved(run_dir, store.incomplete())


def require_none_saved(run_dir: Path, damaged: Sequence[DamagedCheckpoint]) -> None:
    """Allow a run without a usable checkpoint to start at step 0, if it has never saved one.

    Args:
        run_dir: the run.
        damaged: what is wrong with each of its checkpoints.

    Raises:
        UserError: it has saved one; `ExitCode.STOP`.
    """
    step = saved_step(run_dir)
    if step is None and not damaged:
        return
    checkpoints = Run(run_dir).checkpoints
    reasons = [str(checkpoint) for checkpoint in damaged] or [f"{checkpoints} has no checkpoint"]
    newest = "" if step is None else f" (the last one at step {step})"
    raise UserError(
        f"this run has saved checkpoints{newest}, and none can be used:\n    " + "\n    ".join(reasons),
        where=str(run_dir),
        rule="a run that has saved a checkpoint is restarted from step 0 only with --from-scratch",
        fix="restore a checkpoint from a backup, use another --run-id, or pass --from-scratch, which moves this run's "
        f"history to {run_dir / ASIDE}<time> and starts at step 0",
        code=ExitCode.STOP,
    )


def saved_step(run_dir: Path) -> int | None:
    """Step of the last checkpoint that a run has recorded or renamed as damaged; None if it never saved one."""
    steps = _recorded_saves(Run(run_dir).metrics)
    values = status.read(run_dir)
    step, checkpoint = values.get("step"), values.get("checkpoint")
    if type(checkpoint) is int:
        # An older version recorded the step of a start from local checkpoints too.
        steps += [] if checkpoint == status.local_step(run_dir) else [checkpoint]
    elif "checkpoint" not in values and values.get("state") in ("finished", "saved") and type(step) is int and step > 0:
        steps.append(step)
    names = (DAMAGED.fullmatch(path.name) for path in _children(Run(run_dir).checkpoints))
    steps += [int(match[1]) for match in names if match]
    return max(steps, default=None)


def move_aside(run_dir: Path) -> Path | None:
    """Move a run's history into a new directory, which is itself a valid run directory.

    metrics.jsonl is moved last: if the process is killed in between, the run is still refused.

    Returns:
        The directory; None if there was nothing to move.

    Raises:
        UserError: something cannot be moved.
    """
    checkpoints = Run(run_dir).checkpoints
    steps = [path for path in _children(checkpoints) if not path.name.startswith(".")]
    rest = [path for path in _children(run_dir) if path.name not in KEPT and not path.name.startswith((ASIDE, "."))]
    rest.sort(key=lambda path: path.name == METRICS)
    if not steps and not rest:
        return None
    aside = run_dir / f"{ASIDE}{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    try:
        Run(aside).checkpoints.mkdir(parents=True)
        for path in steps:
            path.rename(Run(aside).checkpoints / path.name)
        for path in rest:
            path.rename(aside / path.name)
    except OSError as error:
        raise UserError(
            f"cannot move the history of this run: {error.strerror}",
            where=str(error.filename or aside),
            fix="move it by hand, or use another --run-id",
            code=ExitCode.STOP,
        ) from error
    return aside


def _recorded_saves(metrics: Path) -> list[int]:
    try:
        records = [parse(line) for line in lines(metrics, root=metrics.parent) if b"checkpoint_saved" in line]
    except OSError:
        return []
    return [int(record["step"]) for record in records if record and record.get("event") == "checkpoint_saved"]


def _children(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
