"""Which checkpoints are kept."""

from __future__ import annotations

LEAST_KEPT = 2
"""Checkpoints that are always kept: if one turns out to be damaged, there is another."""


def surviving(steps: list[int], most_recent_k: int, keep_interval: int | None) -> set[int]:
    """Which of the complete steps a retention rule keeps."""
    recent = sorted(steps)[-max(most_recent_k, LEAST_KEPT) :]
    return set(recent) | {step for step in steps if keep_interval and step % keep_interval == 0}
