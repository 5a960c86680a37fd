"""metrics.jsonl: one JSON object a line, appended and flushed at every event.

An object with `loss` is a step, with `valid_loss` an evaluation, with `event` a note. JSON has no NaN: such values are
null and named in `non_finite`. Values that do not apply (a loss scale in bf16) are left out.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.tracking.events import EvalMetrics, Note, RunStatus, StepMetrics

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 64 * 2**20
"""Bytes kept in memory while the disk is full; about 200,000 steps."""


def record(event: StepMetrics | EvalMetrics | Note) -> dict[str, Any]:
    """The event as strict JSON values: None left out, NaN and infinity as null with their keys in `non_finite`."""
    values = {key: value for key, value in asdict(event).items() if value is not None}
    if isinstance(event, Note):
        values["details"] = _finite(values["details"])
        return values
    if "experts" in values:
        values["experts"] = _finite(values["experts"])
    bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        values |= dict.fromkeys(bad) | {"non_finite": bad}
    return values


def _finite(value: Any) -> Any:
    """`value` for strict JSON: NaN and infinity by name, unknown types as text."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def parse(line: bytes) -> dict[str, Any] | None:
    """The object on a line, or None if the line is torn or is not an object with a whole-numbered `step`."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def rewind(path: Path, step: int) -> int:
    """Drop everything after `step`, so that the file of a resumed run reads as if it had never been interrupted.

    A line torn by a kill is dropped too. The file is replaced by rename, or left alone if there is nothing to drop.

    Returns:
        Lines dropped.
    """
    if not path.exists():
        return 0
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    dropped = unreadable = 0
    try:
        with path.open("rb") as old, temporary.open("wb") as new:
            for line in old:
                values = parse(line) if line.endswith(b"\n") else None
                if values is not None and values["step"] <= step:
                    new.write(line)
                else:
                    dropped += 1
                    unreadable += values is None
            new.flush()
            os.fsync(new.fileno())
        if dropped:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if unreadable:
        logger.warning("%s: dropped %d unreadable line(s), left by a process that was killed", path, unreadable)
    return dropped


class JsonlSink:
    """Appends events to metrics.jsonl.

    A full disk does not stop the training: lines wait in memory and are written when there is room again.

    Args:
        path: the file; created if missing.
        resumed_step: lines after this step are dropped (see `rewind`).

    Raises:
        UserError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        try:
            rewind(path, resumed_step)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(
                f"cannot write: {error.strerror}",
                where=str(path),
                rule="a run keeps its metrics in its own directory",
                fix="make the directory writable or choose another one with --runs-dir",
            ) from error
        self._waiting = bytearray()
        self._failed = False
        self._lost = 0

    def step(self, metrics: StepMetrics) -> None:
        self._append(metrics)

    def eval(self, metrics: EvalMetrics) -> None:
        self._append(metrics)

    def note(self, note: Note) -> None:
        self._append(note)

    def _append(self, event: StepMetrics | EvalMetrics | Note) -> None:
        line = json.dumps(record(event), allow_nan=False).encode() + b"\n"
        if len(self._waiting) + len(line) > BACKLOG_BYTES:
            self._lost += 1
        else:
            self._waiting += line
        self._flush()

    def _flush(self) -> None:
        # A short write leaves the rest of the line in front of the queue, so a line is never torn by a full disk.
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:
            if not self._failed:
                logger.error("%s: %s; training goes on, metrics wait in memory", self._path, error.strerror)
            self._failed = True
            return
        if self._failed:
            logger.warning("%s: writable again, nothing was lost", self._path)
            self._failed = False

    def close(self, status: RunStatus) -> None:
        self._flush()
        lost = self._lost + self._waiting.count(b"\n")
        if lost:
            logger.error("%s: %d line(s) were lost because the disk was full", self._path, lost)
        os.close(self._file)
