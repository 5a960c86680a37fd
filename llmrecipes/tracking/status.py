"""status.json: the state of a run, for programs that only read the directory."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any, Self

from llmrecipes.hardware.process import MachineIdentity, process_seconds, start_ticks, this_machine
from llmrecipes.io import write_atomic
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import ENDED_EARLY, EvalMetrics, Note, RunStart, RunStatus, Sink, StepMetrics
from llmrecipes.untrusted import RECORD, read_json

logger = logging.getLogger(__name__)

STATES: dict[RunStatus, str] = {"FINISHED": "finished", "KILLED": "saved", "FAILED": "failed"}
SECONDS_BETWEEN_WRITES = 1.0


def read(run_dir: Path) -> dict[str, Any]:
    """The status of a run; empty if it cannot be read. `running` becomes `interrupted` if the process is dead."""
    try:
        values = read_json(RunFiles(run_dir).status_file, root=run_dir, most=RECORD)
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    if values.get("state") == "running" and _has_ended(values):
        values["state"] = "interrupted"
    return values


def _has_ended(values: dict[str, Any]) -> bool:
    """Whether the process of a run is known to have ended; one of another machine or container cannot be seen."""
    pid = values.get("pid")
    then = MachineIdentity.of(values)
    this = this_machine()
    if then.is_this:
        return type(pid) is not int or start_ticks(pid) != values.get("pid_ticks")
    return then.host == this.host and then.boot_id != this.boot_id  # the machine was restarted


def local_step(run_dir: Path) -> int | None:
    """Step of the last start from local checkpoints, which may be gone with their nodes; None: there was none."""
    try:
        step = read_json(RunFiles(run_dir).local_checkpoints, root=run_dir, most=RECORD)["resumed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _published(run_dir: Path, resumed_step: int, earlier: Any) -> int | None:
    """Step of the last checkpoint in the run directory, as a start from this step knows it."""
    earlier = earlier if type(earlier) is int else None
    if resumed_step and resumed_step != local_step(run_dir):
        return resumed_step
    return None if earlier is None else min(earlier, resumed_step)


class StatusSink(Sink):
    """Keeps status.json up to date, at most once a second."""

    def __init__(self, run_dir: Path, *, resumed_step: int, total_steps: int) -> None:
        self._path = RunFiles(run_dir).status_file
        now = time.time()
        earlier = read(run_dir)
        self._values: dict[str, Any] = {
            "state": "running",
            "step": resumed_step,
            "total": total_steps,
            "pid": os.getpid(),
            "pid_ticks": start_ticks(os.getpid()),
            **this_machine().as_dict(),
            "started": earlier.get("started", now),
            "valid_loss": earlier.get("valid_loss") if resumed_step else None,
            # The rules by which the run ended before its last step, until it goes on.
            "ended_by": earlier.get("ended_by") if resumed_step and resumed_step == earlier.get("step") else None,
            # Evidence that there was a checkpoint, even if none is found.
            "checkpoint": _published(run_dir, resumed_step, earlier.get("checkpoint")),
        }
        # Of all processes of the run, so that what it has used is known whether or not anybody watched it.
        seconds = earlier.get("seconds")
        self._earlier_seconds = seconds if isinstance(seconds, float) and math.isfinite(seconds) else 0.0
        self._written = 0.0
        self._failed = False
        self._write()

    @classmethod
    def of(cls, start: RunStart) -> Self:
        return cls(start.run_dir, resumed_step=start.resumed_step, total_steps=start.total_steps)

    def step(self, metrics: StepMetrics) -> None:
        self._values |= {"step": metrics.step, "ended_by": None}
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()

    def eval(self, metrics: EvalMetrics) -> None:
        self._values["valid_loss"] = metrics.valid_loss if math.isfinite(metrics.valid_loss) else None
        self._write()

    def note(self, note: Note) -> None:
        if note.event == "checkpoint_saved":
            self._values["checkpoint"] = note.step
            self._write()
        elif note.event == ENDED_EARLY:
            self._values["ended_by"] = note.details["rules"]

    def close(self, status: RunStatus) -> None:
        self._values["state"] = STATES[status]
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._values["updated"] = time.time()
        self._values["seconds"] = round(self._earlier_seconds + process_seconds(), 3)
        try:
            write_atomic(self._path, json.dumps(self._values) + "\n", durable=False)
        except OSError as error:
            if not self._failed:
                logger.warning("%s: %s", self._path, error.strerror)
            self._failed = True
