"""What the trials of a search report: validation losses and time, from a run's metrics.jsonl."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from llmrecipes import untrusted
from llmrecipes.tracking.jsonl import METRICS, parse


@dataclass(frozen=True)
class Evaluation:
    """One evaluation; None where the loss was not finite, or is not known."""

    step: int
    valid_loss: float | None
    valid_bits_per_byte: float | None


@dataclass
class Progress:
    """What a run has reported so far."""

    step: int = 0
    tokens: int = 0
    """Tokens trained on."""
    seconds: float = 0.0
    """Seconds in optimizer steps."""
    diverged: bool = False
    """A loss or gradient norm was not finite."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """By step."""

    def add(self, line: bytes) -> None:
        """Add a line of metrics.jsonl."""
        values = parse(line)
        if values is None:
            return
        step = values["step"]
        if "step_seconds" in values:
            self.step, self.tokens = step, values["consumed_tokens"]
            self.seconds += values["step_seconds"]
            self.diverged = bool(values.get("non_finite")) and not values.get("skipped")
        elif "valid_loss" in values:
            self.evaluations[step] = Evaluation(step, values["valid_loss"], values.get("valid_bits_per_byte"))


class Reader(Protocol):
    """Follows what a run reports."""

    @property
    def progress(self) -> Progress:
        """What was read last."""
        ...

    def read(self) -> Progress:
        """What the run has reported by now."""
        ...


class MetricsReader:
    """Follows a run's metrics.jsonl; reads only what is new, and everything after a resume has replaced the file."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self.progress = Progress()

    def read(self) -> Progress:
        """What the run has reported by now."""
        try:
            with untrusted.open_file(self._path, root=self._path.parent) as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._file or status.st_size < self._offset:
                    self._file, self._offset, self.progress = identity, 0, Progress()
                file.seek(self._offset)
                text = file.read()
        except (OSError, untrusted.Refused):  # not begun, or not to be read at the moment
            return self.progress
        whole = text.rfind(b"\n") + 1
        for line in text[:whole].splitlines():
            self.progress.add(line)
        self._offset += whole
        return self.progress
