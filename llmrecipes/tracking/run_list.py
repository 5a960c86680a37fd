"""The runs in a directory, read from their files, without a database."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking import status
from llmrecipes.tracking.events import STARTED
from llmrecipes.tracking.jsonl import parse
from llmrecipes.untrusted import Refused, number, open_file

TAIL_BYTES = 64 * 1024
TAIL_BYTES_OF_SAVES = 4 * 1024 * 1024
"""Some 10,000 steps, so that a save is among them."""
CHECKPOINT = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run.

    Attributes:
        state: running, finished, saved (stopped from outside, can be resumed), failed, interrupted (its process is
            gone), or unknown (status.json cannot be read); `launch.listing` adds those of jobs.
        job: id of its newest job; None: it was not submitted.
        step: last step recorded.
        total: last step planned.
        loss: last training loss.
        valid_loss: last validation loss.
        started: seconds since the epoch, of the first attempt.
        updated: seconds since the epoch, of the last report.
        checkpoints: steps that have a checkpoint; `CheckpointStore` checks whether they are valid.
    """

    recipe: str
    run_id: str
    path: str
    state: str
    step: int | None
    total: int | None
    loss: float | None
    valid_loss: float | None
    started: float | None
    updated: float | None
    checkpoints: tuple[int, ...]
    job: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self) | {"checkpoints": list(self.checkpoints)}


def list_runs(runs_dir: Path) -> list[RunSummary]:
    """All runs under `runs_dir`, oldest first; none if the directory does not exist."""
    runs = [
        summary(entry)
        for recipe in _directories(runs_dir)
        for entry in _directories(recipe)
        if (run := RunFiles(entry)).exists() or run.status_file.is_file()
    ]
    return sorted(runs, key=lambda run: (run.started or 0.0, run.recipe, run.run_id))


@dataclass(frozen=True)
class LongestTimes:
    """The longest step and the longest save at the end of a run's metrics, in seconds."""

    run_id: str
    step_seconds: float
    save_seconds: float


def measured(folder: Path, most: int) -> list[LongestTimes]:
    """Durations of steps and saves in the newest runs of a recipe; runs without a recorded save are left out.

    Args:
        folder: with the runs of one recipe.
        most: number of runs that are read.
    """
    newest = sorted(_directories(folder), key=_changed, reverse=True)[:most]
    runs = (_measured(run) for run in newest)
    return [run for run in runs if run is not None]


def _changed(run_dir: Path) -> float:
    try:
        return RunFiles(run_dir).metrics.stat().st_mtime
    except OSError:
        return 0.0


def _measured(run_dir: Path) -> LongestTimes | None:
    steps, saves = [0.0], []
    for line in tail(RunFiles(run_dir).metrics, TAIL_BYTES_OF_SAVES):
        if b"step_seconds" not in line and b"checkpoint_saved" not in line:
            continue
        record = parse(line) or {}
        if (step := number(record.get("step_seconds"))) is not None:
            steps.append(step)
        if record.get("event") == "checkpoint_saved" and (save := number(record.get("seconds"))) is not None:
            saves.append(save)
    # The first step after a start compiles and connects: one of them is left out.
    return LongestTimes(run_dir.name, sorted(steps)[-2] if len(steps) > 2 else steps[-1], max(saves)) if saves else None


def last_note(run_dir: Path, event: str) -> dict[str, Any] | None:
    """Details of the last note of a kind of a run's last start, at the end of its metrics; None without one."""
    note = None
    for line in tail(RunFiles(run_dir).metrics, TAIL_BYTES_OF_SAVES):
        if event.encode() not in line and STARTED.encode() not in line:
            continue
        record = parse(line) or {}
        if record.get("event") == event:
            note = record.get("details", {})
        elif record.get("event") == STARTED:  # its plan.json and recipe.yaml replace those of the start before
            note = None
    return note


def _directories(parent: Path) -> list[Path]:
    try:
        return [path for path in sorted(parent.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def summary(run_dir: Path) -> RunSummary:
    """One run, read from its files; a field without a file is unknown."""
    values = status.read(run_dir)
    last = {"valid_loss": number(values.get("valid_loss")), "loss": None}
    step = number(values.get("step"))
    for line in tail(RunFiles(run_dir).metrics):
        record = parse(line)
        if record is None:
            continue
        if "loss" in record:
            step = record["step"]
        last |= {key: number(record[key]) for key in last if key in record}
    total = number(values.get("total"))
    return RunSummary(
        recipe=RunFiles(run_dir).recipe_name,
        run_id=run_dir.name,
        path=str(run_dir),
        state=str(values.get("state", "unknown")),
        step=None if step is None else int(step),
        total=None if total is None else int(total),
        loss=last["loss"],
        valid_loss=last["valid_loss"],
        started=number(values.get("started")),
        updated=number(values.get("updated")),
        checkpoints=_checkpoints(RunFiles(run_dir).checkpoints),
    )


def _checkpoints(directory: Path) -> tuple[int, ...]:
    named = ((CHECKPOINT.fullmatch(path.name), path) for path in _directories(directory))
    return tuple(sorted(int(match[1]) for match, path in named if match and (path / "manifest.json").is_file()))


def tail(path: Path, size_read: int = TAIL_BYTES) -> list[bytes]:
    """The last lines of a file; the first of them may be incomplete."""
    try:
        with open_file(path, root=path.parent) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - size_read))
            return file.read(size_read).splitlines()
    except (OSError, Refused):
        return []
