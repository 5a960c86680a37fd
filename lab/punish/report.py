"""What a run that was punished has shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.punish.faults import Fault

EQUAL = {None: "", True: ", the run is equal", False: ", the run is NOT EQUAL"}


@dataclass
class Injection:
    """A fault that was injected. Times are CLOCK_MONOTONIC."""

    number: int
    fault: Fault
    rank: int
    run: str
    step: int
    """The last step before it."""
    injected_at: float | None = None
    """None: ordered, and not had yet."""
    noticed_at: float | None = None
    recovered_at: float | None = None
    sign: str = ""
    """By which it was noticed."""
    steps_lost: int = 0
    """Computed again."""
    step_seconds: float = 0.0
    """Of the step that shows the recovery."""
    orphans: int = 0
    """Processes that outlived their launcher."""
    equal: bool | None = None
    """Whether its run has ended as the one without faults; None: it has not ended yet."""
    undo: Callable[[], object] = field(default=lambda: None, repr=False)

    @property
    def noticing(self) -> float | None:
        """Seconds until it was noticed."""
        if self.noticed_at is None or self.injected_at is None:
            return None
        return self.noticed_at - self.injected_at

    @property
    def recovering(self) -> float | None:
        """Seconds from there to the end of the next step, or what else shows that the run goes on."""
        if self.recovered_at is None or self.noticed_at is None or self.orphans:
            return None
        return self.recovered_at - self.noticed_at

    @property
    def down(self) -> float:
        """Seconds in which training stood still because of it."""
        if self.fault.recovered or self.fault.name == "NaN":
            return 0.0
        return (self.noticing or 0.0) + max(0.0, (self.recovering or 0.0) - self.step_seconds)

    @property
    def outcome(self) -> str:
        """What became of it."""
        if self.noticing is None:
            return "NOT NOTICED"
        noticed = f"noticed after {self.noticing:.1f} s"
        if self.recovered_at is None or self.noticed_at is None:
            return f"{noticed}, NOT REPAIRED"
        again = f"{noticed}, training again {self.recovered_at - self.noticed_at:.1f} s later"
        return f"{again}, {self.steps_lost} steps lost{f', {self.orphans} PROCESSES LEFT OVER' if self.orphans else ''}"

    def line(self) -> str:
        """For a log."""
        return f"step {self.step}, rank {self.rank}, {self.fault.name}: {self.outcome}{EQUAL[self.equal]}"

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "fault": self.fault.name, "rank": self.rank, "step": self.step, "detection_seconds": self.noticing,
            "recovery_seconds": self.recovering, "steps_lost": self.steps_lost, "sign": self.sign,
            "outcome": self.outcome, "equal_to_uninterrupted": self.equal, "run": self.run,
        }  # fmt: skip


@dataclass(frozen=True)
class Punished:
    """What a campaign has shown."""

    injections: Sequence[Injection]
    false_alarms: Sequence[str]
    wall_seconds: float
    """From the first step of each run to its end, restarts included."""
    kept_seconds: float
    """Of the steps, each counted once."""
    undisturbed_seconds: float
    """Of as many runs without faults, with their saves and evaluations."""
    runs: int
    steps: int
    """Computed, also those twice, and those of the run without faults."""
    equal: bool
    over_limit: float | None
    """Most seconds after its limit at which a hang was noticed; None without hangs."""
    folder: str

    @property
    def effective_time(self) -> float:
        """Share of the time that was spent on steps that count."""
        return self.kept_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def of_allowed(self) -> float:
        """The time of runs without faults as a share of the time without detection and recovery.

        What is missing to 1 are steps that were computed again and steps that were slower.
        """
        down = sum(injection.down for injection in self.injections)
        return self.undisturbed_seconds / (self.wall_seconds - down) if self.wall_seconds > down else 0.0

    @property
    def missed(self) -> list[Injection]:
        """Faults that were not noticed or repaired, left processes, or belong to a run that ended otherwise."""
        return [one for one in self.injections if one.recovering is None or one.equal is False]

    @property
    def ok(self) -> bool:
        """Everything was noticed, the run always recovered and lost nothing, and there was no false alarm."""
        return not self.missed and self.equal and not self.false_alarms

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "injected": len(self.injections),
            "detected": sum(injection.noticing is not None for injection in self.injections),
            "recovered": sum(injection.recovering is not None for injection in self.injections),
            "false_alarms": len(self.false_alarms),
            "effective_time": round(self.effective_time, 4),
            "effective_time_of_allowed": round(self.of_allowed, 4),
            "detection_seconds": percentiles([injection.noticing for injection in self.injections]),
            "recovery_seconds": percentiles([injection.recovering for injection in self.injections]),
            "equal_to_uninterrupted": self.equal,
            "missed": [injection.line() for injection in self.missed],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A table with a row for each fault that was injected."""
        rows: list[tuple[str, ...]] = [
            ("fault", "injected", "noticed", "recovered", "noticed after, s", "training again after, s", "steps lost")
        ]
        for name in dict.fromkeys(injection.fault.name for injection in self.injections):
            these = [injection for injection in self.injections if injection.fault.name == name]
            noticing = [injection.noticing for injection in these if injection.noticing is not None]
            recovering = [injection.recovering for injection in these if injection.recovering is not None]
            rows.append(
                (name, str(len(these)), str(len(noticing)), str(len(recovering)), spread(noticing), spread(recovering),
                 str(max(injection.steps_lost for injection in these)))
            )  # fmt: skip
        return rows

    def summary(self) -> str:
        """The figures below the table."""
        return (
            f"{self.runs} runs in {self.wall_seconds:.0f} s, {self.steps:,} steps computed; effective training time "
            f"{self.effective_time:.1%}\n"
            f"speed without detection and recovery: {self.of_allowed:.1%} of an uninterrupted run's\n"
            f"false alarms: {len(self.false_alarms)}"
            f"{'' if not self.false_alarms else ' (' + ', '.join(self.false_alarms[:8]) + ')'}\n"
            + ("" if self.over_limit is None else f"hangs noticed at most {self.over_limit:.1f} s after their limit\n")
            + "".join(f"MISSED  {injection.line()}, in {injection.run}\n" for injection in self.missed)
            + f"weights, losses and samples {'equal' if self.equal else 'DIFFER from'} those of an uninterrupted run\n"
            f"runs are in {self.folder}"
        )


def spread(values: Sequence[float]) -> str:
    """Median, and the largest if there are several."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle}, at most {max(values):.1f}"


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """The median and the value below which 95 % are; null without values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"p50": None, "p95": None}
    return {f"p{share}": round(known[min(len(known) - 1, len(known) * share // 100)], 2) for share in (50, 95)}
