"""What shows of a run from outside, with the time at which it showed."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.punish.faults import STEPS
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.jsonl import parse


@dataclass(frozen=True)
class Sign:
    """A line of the launcher (`out: …`), its exit code (`exit: 75`), a note of the run (`note: hang`), or the report of
    a watchdog (`hang: rank-2`)."""

    time: float
    """CLOCK_MONOTONIC."""
    text: str


@dataclass(frozen=True)
class Step:
    """A step as its first rank recorded it."""

    step: int
    began: float
    ended: float
    batch: str


@dataclass
class Signs:
    """The signs of a run over all its starts, in the order in which they were seen.

    Args:
        files: of the run.
        orders: the folder in which ranks record their steps.
    """

    files: RunFiles
    orders: Path
    all: list[Sign] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    over_limit: list[float] = field(default_factory=list)
    """Seconds after its limit at which each hang was noticed."""
    _notes: Counter[str] = field(default_factory=Counter)
    _hangs: set[Path] = field(default_factory=set)
    _read: int = 0
    _size: tuple[int, int] = (0, 0)

    def follow(self, process: subprocess.Popen[str]) -> threading.Thread:
        """Read what a launcher prints until it ends."""
        output = process.stdout
        if output is None:
            raise ValueError("its output is not a pipe")

        def read() -> None:
            for line in output:
                self.add(f"out: {line.rstrip()}")

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def add(self, text: str) -> None:
        """A sign of this moment."""
        self.all.append(Sign(time.monotonic(), text))

    def look(self) -> None:
        """Look for notes, watchdogs' reports and steps since the last time."""
        for path in self.files.logs.glob("hang-*/rank-*.json"):
            if path not in self._hangs:
                self._hangs.add(path)
                with suppress(OSError, ValueError, KeyError):
                    hang = json.loads(path.read_text("utf-8"))
                    self.over_limit.append(hang["seconds"] - hang["limit"])
                self.add(f"hang: {path.stem}")
        self._look_at_notes()
        with suppress(FileNotFoundError), (self.orders / f"0-{STEPS}").open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):  # else it is being written
                    self.steps.append(Step(**json.loads(line)))
                    self._read += len(line)

    def first(self, pattern: str, since: float) -> Sign | None:
        """The first sign since a time that matches."""
        return next((sign for sign in tuple(self.all) if sign.time >= since and re.match(pattern, sign.text)), None)

    def tail(self) -> str:
        """The last lines of the launcher."""
        return "\n".join(sign.text for sign in self.all if sign.text.startswith("out: "))[-4000:]

    def step_since(self, since: float) -> Step | None:
        """The first step that began after a time and has ended."""
        return next((step for step in self.steps if step.began > since), None)

    @property
    def last_step(self) -> int:
        """The last step that was done; after a restart an earlier one than before."""
        return self.steps[-1].step if self.steps else 0

    def _look_at_notes(self) -> None:
        try:
            status = self.files.metrics.stat()
            size = status.st_ino, status.st_size
            if size == self._size:
                return
            lines = self.files.metrics.read_bytes().splitlines()
        except FileNotFoundError:
            return
        self._size = size
        notes = Counter[str]()
        for line in lines:
            if b'"event"' in line and (record := parse(line)) is not None and "event" in record:
                notes[line.decode("utf-8", "replace")] += 1
                if notes[line.decode("utf-8", "replace")] > self._notes[line.decode("utf-8", "replace")]:
                    self.add(f"note: {record['event']}")
        # A resumed run drops the notes of later steps, which then may come again.
        self._notes = notes
