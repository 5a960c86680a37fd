"""What an evaluation found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """One task.

    Attributes:
        task: its name.
        metrics: numbers by name, of which the tracker gets those that are finite as `eval/<task>/<metric>`.
        settings: what the numbers depend on, besides model and task.
        examples: what the numbers were computed from, for people.
    """

    task: str
    metrics: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    examples: Sequence[dict[str, Any]] = ()
