"""All checks of a run: one object takes its records in order, live or from its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrecipes.diagnosis.check_rules import ALARMS, CHECKED, finding, order
from llmrecipes.diagnosis.finding import Check, Record, RunFacts, RunFinding, Sighting
from llmrecipes.diagnosis.gradients import DeadExperts, GradientNorm, LossScale, UntrainedLayers
from llmrecipes.diagnosis.loss_checks import (
    Divergence,
    Guessing,
    LearningRateHigh,
    LearningRateLow,
    Overfitting,
    Plateau,
    TrainValidGap,
)
from llmrecipes.diagnosis.speed_checks import Clocks, MemoryCreep, SlowRank, Storage, Use


class Checks:
    """Judges records in the order of metrics.jsonl: constant time and memory a record.

    Args:
        facts: facts of the recipe.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._facts, self._of_losses = facts, _of_losses(facts)
        self._stage: Any = None
        self._checks: tuple[Check, ...] = (
            LearningRateLow(facts),
            Guessing(facts),
            GradientNorm(facts),
            Use(facts),
            SlowRank(facts),
            MemoryCreep(),
            Storage(),
        )
        self._of_key: tuple[tuple[str, Check], ...] = (
            ("layers", UntrainedLayers()),
            ("experts", DeadExperts(facts)),
            ("loss_scale", LossScale()),
            ("nodes", Clocks()),
        )
        """Those that read one key, which most records of a long run do not have."""
        self._seen: dict[str, tuple[Sighting, Sighting, int]] = {}
        """First and last sighting of each rule, and their number."""

    def add(self, record: Record) -> list[RunFinding]:
        """Judge a record; returns what was not seen before in this run or start."""
        return [finding(seen, facts=self._facts) for seen in self._sightings(record) if self.see(seen)]

    def see(self, seen: Sighting) -> bool:
        """Count a sighting; returns whether it is the first of its rule."""
        first, _, count = self._seen.get(seen.rule, (seen, seen, 0))
        self._seen[seen.rule] = first, seen, count + 1
        return count == 0

    def findings(self) -> list[RunFinding]:
        """Everything seen so far, the most severe first."""
        seen = self._seen.values()
        return sorted((finding(last, first, count, self._facts) for first, last, count in seen), key=order)

    def _sightings(self, record: Record) -> Iterator[Sighting]:
        event = record.get("event")
        if event in CHECKED:
            return  # the note of a live check: its record is judged here again
        if event in ALARMS and record.get("alarm"):
            yield _of_alarm(record)
        stage = record.get("stage")
        if stage is not None and stage != self._stage:
            # Its losses are of other text or sequences, and may begin far above those of the stage before.
            self._stage, self._of_losses = stage, _of_losses(self._facts)
        for check in (*self._of_losses, *self._checks):
            yield from check.add(record)
        for key, check in self._of_key:
            if key in record:
                yield from check.add(record)


def _of_losses(facts: RunFacts) -> tuple[Check, ...]:
    """Those that compare losses with earlier ones."""
    return Divergence(), LearningRateHigh(), Plateau(facts), Overfitting(), TrainValidGap()


def _of_alarm(record: Record) -> Sighting:
    details = record.get("details")
    evidence = dict(details) if isinstance(details, Mapping) else {}
    event = str(record["event"])
    shown = ", ".join(f"{key} {_short(value)}" for key, value in evidence.items())
    return Sighting(event, record["step"], f"{event.replace('_', ' ')} in step {record['step']}: {shown}", evidence)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]
