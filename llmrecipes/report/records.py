"""metrics.jsonl as columns: what a report needs of a run of any length, in memory that is bounded but for its steps."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from llmrecipes.tracking.energy import Energy
from llmrecipes.untrusted import number

Values = npt.NDArray[np.float64]

MOST_SAMPLES = 256
"""Samples of values that are not single numbers; every second is dropped when there are more."""
MOST_NOTES = 2000
"""Notes of one event that are kept; the others are counted."""
MOST_COLUMNS = 4096
"""Names of numbers; those that come later are left out."""
_NOT_SERIES = {"step", "experts", "histograms", "source_loss", "skipped", "non_finite"}


@dataclass
class Samples:
    """Values of a few steps, spread evenly over the run."""

    kept: list[tuple[int, Any]] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, step: int, value: Any) -> None:
        """Keep it, unless its turn is not due."""
        if self._seen % self._every == 0:
            self.kept.append((step, value))
            if len(self.kept) > MOST_SAMPLES:
                del self.kept[1::2]
                self._every *= 2
        self._seen += 1


@dataclass
class Records:
    """Lines of metrics.jsonl by kind.

    Attributes:
        steps: numbers of the steps, in the order of the file.
        evaluations: lines with `valid_loss`.
        notes: lines with `event`, at most `MOST_NOTES` of each.
        events: how often there was each.
        experts: balance of the layers with experts (`tracking.events.LayerBalance`), in samples.
        histograms: of gradients and weights (`StepMetrics.histograms`), in samples.
        source_losses: training loss by source (`StepMetrics.source_loss`), in samples.
        samples: other lists by name, in samples.
        texts: how often a name had each text, such as the node of an extreme.
        skipped: steps whose update was left out.
        energy: what the run has used, by the newest line that says so; None: none does.
        missing: why there is no step.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    experts: Samples = field(default_factory=Samples)
    histograms: Samples = field(default_factory=Samples)
    source_losses: Samples = field(default_factory=Samples)
    samples: dict[str, Samples] = field(default_factory=dict)
    texts: dict[str, Counter[str]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    energy: Energy | None = None
    missing: str = "metrics.jsonl has no step yet"
    _columns: dict[str, array[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def names(self, prefix: str = "") -> list[str]:
        """Names of numbers that some step has."""
        return [name for name in self._columns if name.startswith(prefix)]

    def has(self, name: str) -> bool:
        """Whether some step has a finite number of this name."""
        return name in self._columns and bool(np.isfinite(self[name]).any())

    def __getitem__(self, name: str) -> Values:
        """[steps] numbers of a name; NaN where a step has none."""
        column = self._columns.get(name, array("d"))
        column.extend([nan] * (len(self.steps) - len(column)))
        return np.array(column, dtype=np.float64)

    def last(self, name: str) -> float | None:
        """The last finite number of a name; None without one."""
        values = self[name]
        known = values[np.isfinite(values)]
        return float(known[-1]) if known.size else None

    def median(self, name: str) -> float | None:
        """Median of the finite numbers of a name; None without one."""
        return float(np.nanmedian(self[name])) if self.has(name) else None

    def of(self, event: str) -> Iterator[dict[str, Any]]:
        """Notes of an event."""
        return (note for note in self.notes if note["event"] == event)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in a line."""
        self.energy = Energy.of(record) or self.energy
        if "event" in record:
            self._note(dict(record))
        elif "valid_loss" in record:
            self.evaluations.append(dict(record))
        elif "loss" in record:
            self._step(record)

    def _note(self, note: dict[str, Any]) -> None:
        self.events[note["event"]] += 1
        if self.events[note["event"]] <= MOST_NOTES:
            note.setdefault("details", {})
            self.notes.append(note)

    def _step(self, record: Mapping[str, Any]) -> None:
        place = len(self.steps)
        step = record["step"]
        self.steps.append(step)
        if record.get("skipped") is True:
            self.skipped.append(step)
        for name, value in record.items():
            if type(value) is float or type(value) is int:
                if name != "step":
                    self._put(name, place, value)
            elif name not in _NOT_SERIES and value is not None:
                self._nested(name, place, step, value)
        if isinstance(balance := record.get("experts"), list) and balance:
            self.experts.add(step, balance)
        if isinstance(histograms := record.get("histograms"), dict):
            self.histograms.add(step, histograms)
        if isinstance(losses := record.get("source_loss"), dict):
            self.source_losses.add(step, losses)

    def _nested(self, name: str, place: int, step: int, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                self._nested(f"{name}/{key}", place, step, each)
        elif isinstance(value, list):
            if len(self.samples) < MOST_COLUMNS:
                self.samples.setdefault(name, Samples()).add(step, value)
        elif isinstance(value, str):
            counts = self.texts.setdefault(name, Counter()) if len(self.texts) < MOST_COLUMNS else Counter()
            if value in counts or len(counts) < MOST_COLUMNS:
                counts[value] += 1
        elif (one := number(value)) is not None:
            self._put(name, place, one)

    def _put(self, name: str, place: int, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= MOST_COLUMNS:
                return
            column = self._columns[name] = array("d")
        if len(column) < place:
            column.extend([nan] * (place - len(column)))
        try:
            column.append(value)
        except OverflowError:  # an integer that no float can hold
            column.append(nan)
