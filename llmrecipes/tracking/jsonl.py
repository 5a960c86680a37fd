"""metrics.jsonl: one JSON object per line, appended and flushed at every event.

An object with `loss` is a step, with `valid_loss` an evaluation, with `event` a note. JSON has no NaN: such values are
null and listed in `non_finite`. Values that do not apply (a loss scale in bf16) are omitted.

When a run is resumed, lines after the checkpoint are dropped, and lost or changed lines are reported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.io import write_atomic
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import BY_SOURCE, EvalMetrics, Note, RunStatus, StepMetrics
from llmrecipes.units import MIB
from llmrecipes.untrusted import lines, number, parse_line, read_json

logger = logging.getLogger(__name__)

NESTED = {"experts", "ranks", "nodes", "energy", "layers", "histograms", *BY_SOURCE}
"""Keys of a step whose values are not numbers."""
_NUMBERS = {field_.name for kind in (StepMetrics, EvalMetrics) for field_ in fields(kind)} - {"skipped"} - NESTED
BACKLOG_BYTES = 64 * MIB
"""Bytes kept in memory while the disk is full; about 200,000 steps."""
SUMS = "metrics.sums.json"
SUMMED_LINES = 100
"""Lines per digest."""


def record(event: StepMetrics | EvalMetrics | Note) -> dict[str, Any]:
    """The event as strict JSON values: None omitted, NaN and infinity as null with their keys in `non_finite`."""
    values = {key: value for key, value in asdict(event).items() if value is not None}
    if isinstance(event, Note):
        values["details"] = _finite(values["details"])
        return values
    values |= {key: _finite(values[key]) for key in NESTED & values.keys()}
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
    """The record on a line; None if the line is truncated, or not what `record` makes."""
    try:
        value = parse_line(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or type(step := value.get("step")) is not int or not 0 <= step < 1 << 62:
        return None
    if "event" in value:
        valid = isinstance(value["event"], str) and isinstance(value.get("details", {}), dict)
    else:
        valid = all(
            (type(item) is float and isfinite(item)) or item is None or number(item) is not None
            for key, item in value.items()
            if key in _NUMBERS
        )
    return value if valid else None


@dataclass
class Sums:
    """Checksums of metrics.jsonl, kept in `logs/metrics.sums.json`, to detect lost or changed lines.

    The file is written with every checkpoint, at the end and after a resume, and covers the lines that exist then. A
    digest covers `SUMMED_LINES` lines, which costs 20 bytes; the last may cover fewer. Lines written after the last
    checkpoint of a killed process are not covered; a resume drops most of them anyway.
    """

    lines: int = 0
    step: int = 0
    """Step up to which a resume has checked for gaps."""
    chunks: list[str] = field(default_factory=list)
    _running: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    def add(self, line: bytes) -> None:
        """Count one more line."""
        if self.lines % SUMMED_LINES == 0:
            self._running = hashlib.blake2b(digest_size=8)
            self.chunks.append("")
        self._running.update(line)
        self.lines += 1
        self.chunks[-1] = self._running.hexdigest()

    def write(self, path: Path) -> None:
        """Replace the file at `path`.

        Raises:
            OSError: it stays as it was.
        """
        write_atomic(
            path, json.dumps({"lines": self.lines, "step": self.step, "chunks": self.chunks}) + "\n", durable=False
        )

    def changed(self, recorded: Sums) -> list[tuple[int, int]]:
        """First and last line of every range in which the digests differ, among the lines that both have.

        Args:
            recorded: the earlier sums; this one has no more lines.
        """
        whole = self.lines // SUMMED_LINES if self.lines < recorded.lines else len(self.chunks)
        ranges: list[tuple[int, int]] = []
        for chunk in range(whole):
            if self.chunks[chunk] == recorded.chunks[chunk]:
                continue
            first = chunk * SUMMED_LINES + 1
            last = min((chunk + 1) * SUMMED_LINES, self.lines)
            if ranges and ranges[-1][1] == first - 1:
                first = ranges.pop()[0]
            ranges.append((first, last))
        return ranges


def read_sums(path: Path) -> Sums | None:
    """The file that `Sums.write` wrote; None if it is missing or damaged."""
    try:
        values = read_json(path, root=path.parent)
        lines = values["lines"]
        step = values["step"]
        chunks = values["chunks"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if type(lines) is not int or type(step) is not int or not isinstance(chunks, list):
        return None
    return Sums(lines, step, chunks) if len(chunks) == -(-lines // SUMMED_LINES) else None


@dataclass
class Rewound:
    """Result of `rewind`: lines dropped, checksums of the lines kept, and their problems."""

    dropped: int = 0
    reached: dict[str, Any] = field(default_factory=dict)
    """`step` and `time` of the last step that was dropped; empty: none was."""
    energy: Energy = field(default_factory=Energy)
    """That all starts have used, also for steps that were dropped."""
    sums: Sums = field(default_factory=Sums)
    problems: list[str] = field(default_factory=list)


def rewind(path: Path, step: int, recorded: Sums | None = None) -> Rewound:
    """Drop everything after `step`, so that the file of a resumed run reads as if it had never been interrupted.

    A line truncated by a kill is dropped too. The file is replaced by rename, or not touched if nothing is dropped.

    Args:
        path: the file; it may be missing.
        step: step of the checkpoint to resume from.
        recorded: the sums of the expected lines; None if unknown.
    """
    rewound = Rewound()
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    steps = _Steps()
    seen = Sums()
    torn = False
    if path.exists():
        try:
            with temporary.open("wb") as new:
                for place, line in enumerate(lines(path, root=path.parent), 1):
                    torn = not line.endswith(b"\n")
                    if recorded is not None and place <= recorded.lines and not torn:
                        seen.add(line)
                    values = None if torn else parse(line)
                    if values is None and not torn:
                        steps.problems.append((place, f"line {place} cannot be read"))
                    if values is not None:
                        rewound.energy = Energy.of(values) or rewound.energy
                    if values is not None and values["step"] <= step:
                        new.write(line)
                        rewound.sums.add(line)
                        steps.see(place, values)
                    else:
                        rewound.dropped += 1
                        steps.beyond = steps.beyond or values is not None
                        if values is not None and "loss" in values:
                            rewound.reached = {key: values[key] for key in ("step", "time") if key in values}
                new.flush()
                os.fsync(new.fileno())
            if rewound.dropped:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    if torn:
        logger.warning("%s: dropped 1 unreadable line, left by a process that was killed", path)
    if step:
        rewound.problems = steps.end(step, recorded, seen)
    return rewound


class _Steps:
    """Whether a file's lines of steps are 1, 2, 3 … without a gap."""

    def __init__(self) -> None:
        self.last = 0
        self.beyond = False
        """Whether there are steps after the one to resume from."""
        self.problems: list[tuple[float, str]] = []
        """Line, and what is wrong in it."""

    def see(self, number: int, values: dict[str, Any]) -> None:
        if "grad_norm" not in values:
            return
        if values["step"] <= self.last:
            self.problems.append((number, f"step {values['step']} is repeated in line {number}"))
        else:
            self._expect(number, values["step"])
            self.last = values["step"]

    def _expect(self, number: float, step: int) -> None:
        first = self.last + 1
        last = step - 1
        if first <= last:
            what = f"step {first} is" if first == last else f"steps {first} to {last} are"
            self.problems.append((number, f"{what} missing"))

    def end(self, step: int, recorded: Sums | None, seen: Sums) -> list[str]:
        if recorded is None or recorded.step < step:
            self._expect(math.inf, step + 1)
        if recorded is None:
            return [text for _, text in self.problems]
        changed = [
            f"lines {first} to {last} have changed since they were written" for first, last in seen.changed(recorded)
        ]
        lacking = recorded.lines - seen.lines
        if lacking and not self.beyond:
            changed.append(f"{lacking} fewer lines than were written")
        # A gap that existed when the sums were written was reported then.
        return changed + [text for number, text in self.problems if changed or number > recorded.lines]


class JsonlSink:
    """Appends events to metrics.jsonl.

    A full disk does not stop the training: lines are kept in memory and written once there is space.
    `problems` lists earlier lines that are lost or changed; `reached` is the last step that was dropped; `energy` is
    what earlier starts have used.

    Args:
        path: the file; created if missing.
        resumed_step: lines after this step are dropped (see `rewind`).

    Raises:
        UserError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path, self._sums_path = path, RunFiles(path.parent).logs / SUMS
        try:
            rewound = rewind(path, resumed_step, read_sums(self._sums_path))
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(
                f"cannot write: {error.strerror}",
                where=str(path),
                rule="metrics are written to the run directory",
                fix="make the directory writable or choose another one with --runs-dir",
            ) from error
        self.problems = rewound.problems
        self.reached = rewound.reached
        self._sums = rewound.sums
        self.energy = rewound.energy
        self._sums.step = resumed_step
        self._write_sums()
        self._waiting = bytearray()
        self._failed = False
        self._lost = 0

    def step(self, metrics: StepMetrics) -> None:
        self._append(metrics)

    def eval(self, metrics: EvalMetrics) -> None:
        self._append(metrics)

    def note(self, note: Note) -> None:
        self._append(note)
        if note.event == "checkpoint_saved" and not self._waiting:
            self._write_sums()

    def _write_sums(self) -> None:
        with suppress(OSError):  # the previous sums remain valid for the lines they cover
            self._sums.write(self._sums_path)

    def _append(self, event: StepMetrics | EvalMetrics | Note) -> None:
        line = json.dumps(record(event), allow_nan=False).encode() + b"\n"
        if len(self._waiting) + len(line) > BACKLOG_BYTES:
            self._lost += 1
        else:
            self._waiting += line
            self._sums.add(line)
        self._flush()

    def _flush(self) -> None:
        # After a short write the remainder stays at the front of the queue, so a full disk never truncates a line.
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:
            if not self._failed:
                logger.error("%s: %s; training continues, metrics are kept in memory", self._path, error.strerror)
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
        else:
            self._write_sums()
        os.close(self._file)
