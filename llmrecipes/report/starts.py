"""The starts of a run, and where its time went: from the notes of its starts, and from gaps where a run has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from llmrecipes.report.records import Records
from llmrecipes.tracking.events import STARTED
from llmrecipes.untrusted import number

LEAST_GAP_SECONDS = 30.0
STEPS_OF_GAP = 10.0
"""A pause without a note of a start is an interruption if it takes more than this and as many median steps."""


@dataclass
class RecordedStart:
    """One start of a run, or one time that it went back to a checkpoint without a new process.

    Attributes:
        begin: when its process began; seconds since the epoch, as all times.
        first: when its first step began.
        end: when the last thing that is known of it happened.
        from_step: it continued after this step.
        to_step: the last step that it reached, also if that was computed again later.
        repeated: steps that were computed again.
        repeated_seconds: time between the last step that counts and the last that was reached.
        rewound: the same process went back to a checkpoint.
        inferred: there is no note of it, only a gap.
        ranks, host: None: unknown.
        changed: how its steps were computed otherwise than those of the start before it, in words.
    """

    begin: float
    first: float
    end: float
    from_step: int
    to_step: int
    repeated: int = 0
    repeated_seconds: float = 0.0
    rewound: bool = False
    inferred: bool = False
    ranks: int | None = None
    host: str | None = None
    changed: str = ""


@dataclass
class History:
    """All starts, oldest first, and seconds by cause; the causes add up to `wall`."""

    starts: list[RecordedStart] = field(default_factory=list)
    causes: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0

    @property
    def interruptions(self) -> int:
        """How often the run stopped before its end, and went on."""
        return sum(not start.rewound for start in self.starts[1:])

    @property
    def rank_hours(self) -> float | None:
        """Hours of all ranks from the beginning of each start to its end; None: their number is unknown."""
        if any(start.ranks is None for start in self.starts):
            return None
        return sum((start.end - start.begin) * (start.ranks or 0) for start in self.starts) / 3600


CAUSES = {
    "steps": "steps (computing, communication and data)",
    "compute": "computing",
    "communication": "communication",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "save": "save (the loop waited)",
    "repeated": "steps that were lost and computed again",
    "restart": "starting: process, data, model, checkpoint",
    "waiting": "waiting between starts",
    "other": "other",
}


def history(records: Records, ranks: int | None) -> History:
    """What is known of a run's starts.

    Args:
        ranks: of the newest plan, for starts that say nothing.
    """
    times = records["time"]
    seconds = records["step_seconds"]
    events = _events(records)
    if not events:
        return History()
    starts = _noted(records, events, times, seconds) or _inferred(records, events, times, seconds)
    for start in starts:
        start.ranks = start.ranks or ranks
    return History(starts, *_causes(records, starts, seconds))


def _events(records: Records) -> list[tuple[float, int]]:
    """(time, step) of everything that a run recorded, in order."""
    known = [(float(at), step) for at, step in zip(records["time"], records.steps, strict=True) if np.isfinite(at)]
    for other in (*records.evaluations, *(note for note in records.notes if note["event"] != STARTED)):
        if (at := number(other.get("time"))) is not None:
            known.append((float(at), int(other["step"])))
    return sorted(known)


def _noted(records: Records, events: list[tuple[float, int]], times: Any, seconds: Any) -> list[RecordedStart]:
    notes = sorted(
        (note for note in records.of(STARTED) if number(note.get("time")) is not None),
        key=lambda note: float(note["time"]),
    )
    if not notes or (
        events[0][0] < float(notes[0]["time"]) - LEAST_GAP_SECONDS
        and len(records)
        and records.steps[0] <= int(notes[0]["step"])
    ):
        return []  # its first starts were of a version without such notes
    starts: list[RecordedStart] = []
    moments = np.array([at for at, _ in events])
    reached = np.array([step for _, step in events])
    for place, note in enumerate(notes):
        opened = float(note["time"])
        details = note["details"]
        until = float(notes[place + 1]["time"]) if place + 1 < len(notes) else np.inf
        same = (
            bool(starts)
            and details.get("pid") is not None
            and (details.get("pid"), details.get("host"))
            == (notes[place - 1]["details"].get("pid"), notes[place - 1]["details"].get("host"))
        )
        begin = opened if same else opened - max(0.0, float(number(details.get("process_seconds")) or 0.0))
        mine = (moments >= opened) & (moments < until)
        end = float(moments[mine].max()) if mine.any() else opened
        steps = (times >= opened) & (times < until)
        first = float((times[steps] - seconds[steps])[0]) if steps.any() else end
        to_step = int(reached[mine].max()) if mine.any() else int(note["step"])
        ranks = number(details.get("ranks"))
        host = details.get("host")
        start = RecordedStart(
            begin,
            max(begin, first if np.isfinite(first) else opened),
            end,
            int(note["step"]),
            to_step,
            rewound=same,
            ranks=None if ranks is None else int(ranks),
            host=host if isinstance(host, str) else None,
            changed=_changed(notes[place - 1]["details"].get("executed"), details.get("executed")) if place else "",
        )
        if starts:
            _lost(starts[-1], details, start)
            start.begin = max(start.begin, starts[-1].end)
            start.first = max(start.first, start.begin)
        starts.append(start)
    return starts


def _changed(then: Any, now: Any) -> str:
    """The keys that differ between what two starts have recorded; those of the default are not among it."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        return ""
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return ", ".join(f"{key} {then.get(key, 'default')} → {now.get(key, 'default')}" for key in keys)


def _lost(before: RecordedStart, details: dict[str, Any], start: RecordedStart) -> None:
    """Steps that the start before this one had done, and this one did again."""
    reached = number(details.get("reached_step"))
    at = number(details.get("reached_time"))
    if reached is None or at is None:
        return
    before.repeated = max(0, int(reached) - start.from_step)
    before.to_step = max(before.to_step, int(reached))
    before.repeated_seconds = max(0.0, float(at) - before.end)
    before.end = max(before.end, float(at))


def _inferred(records: Records, events: list[tuple[float, int]], times: Any, seconds: Any) -> list[RecordedStart]:
    """Starts by gaps between steps, less what evaluations and saves took."""
    if not len(records):
        return []
    known = np.isfinite(times)
    times = times[known]
    steps = np.array(records.steps)[known]
    if not times.size:
        return []
    took = np.nan_to_num(seconds[known])
    usual = float(np.median(took)) if took.size else 0.0
    gaps = np.diff(times) - took[1:]
    for evaluation in records.evaluations:
        at = number(evaluation.get("time"))
        length = number(evaluation.get("eval_seconds"))
        place = np.searchsorted(times, at or 0.0) - 1
        if at is not None and length is not None and 0 <= place < len(gaps):
            gaps[place] -= length
    cuts = [int(at) + 1 for at in np.flatnonzero(gaps > max(LEAST_GAP_SECONDS, STEPS_OF_GAP * usual))]
    begins = [float(times[at] - took[at]) for at in (0, *cuts)]
    moments = np.array([at for at, _ in events])
    return [
        RecordedStart(
            begin,
            begin,
            float(moments[(moments >= begin) & (moments < until)].max()),
            int(steps[first]) - 1,
            int(steps[last - 1]),
            inferred=True,
        )
        for begin, until, (first, last) in zip(
            begins, [*begins[1:], np.inf], pairwise([0, *cuts, len(times)]), strict=True
        )
    ]


def _parts(records: Records, seconds: float) -> dict[str, float]:
    """Seconds of steps; by what a typical rank did, if the steps have that."""
    names = ("compute", "communication", "data")
    means = [
        float(np.nanmean(records[at])) if records.has(at := f"ranks/{name}_seconds/median") else 0.0 for name in names
    ]
    if sum(means) <= 0:
        return {"steps": seconds}
    return {name: seconds * mean / sum(means) for name, mean in zip(names, means, strict=True)}


def _causes(records: Records, starts: list[RecordedStart], seconds: Any) -> tuple[dict[str, float], float]:
    if not starts:
        return {}, 0.0
    wall = max(start.end for start in starts) - starts[0].begin
    evaluations = sum(float(number(evaluation.get("eval_seconds")) or 0.0) for evaluation in records.evaluations)
    saves = sum(float(number(save["details"].get("loop_waited")) or 0.0) for save in records.of("checkpoint_saved"))
    causes = {
        **_parts(records, float(np.nansum(seconds))),
        "evaluation": evaluations,
        "save": saves,
        "repeated": sum(start.repeated_seconds for start in starts),
        "restart": sum(start.first - start.begin for start in starts),
        "waiting": sum(max(0.0, later.begin - start.end) for start, later in pairwise(starts)),
    }
    causes["other"] = max(0.0, wall - sum(causes.values()))
    return {name: value for name, value in causes.items() if value > 0}, wall
