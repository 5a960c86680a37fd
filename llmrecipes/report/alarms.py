"""What looks wrong with a run, by the alarms that it recorded itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from llmrecipes.rundir import Run
from llmrecipes.tracking.jsonl import parse
from llmrecipes.untrusted import lines

_ADVICE = "docs/guide/resilience.md explains what the run does about it, and the keys that change that."


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Notes of one event, with the attributes of a finding of `llmrecipes diagnose`."""

    rule: str
    severity: str
    title: str
    first_step: int | None
    last_step: int | None
    count: int
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)
    advice: str = _ADVICE
    link: str = "docs/guide/resilience.md"

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def findings(run: Run) -> list[Alarm]:
    """The alarms of a run, by event; none if its metrics cannot be read."""
    by_event: dict[str, list[dict[str, Any]]] = {}
    try:
        for line in lines(run.metrics, root=run.path):
            if b'"alarm": true' in line and (note := parse(line)) is not None and "event" in note:
                by_event.setdefault(note["event"], []).append(note)
    except (OSError, ValueError):
        return []
    return [
        Alarm(
            rule=event,
            severity="error",
            title=event.replace("_", " ").capitalize(),
            first_step=notes[0]["step"],
            last_step=notes[-1]["step"],
            count=len(notes),
            text="; ".join(f"{key} {value}" for key, value in notes[-1].get("details", {}).items()) or "no details",
            evidence=notes[-1].get("details", {}),
        )
        for event, notes in by_event.items()
    ]
