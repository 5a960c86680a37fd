"""When a job is warned of its time limit, so that all ranks can save: from earlier runs, else from the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan
from llmrecipes.tracking.runs import Measured, measured

SHORTEST = 120
"""Seconds: a step, the exit of all ranks, and the end of the job."""
LONGEST = 65535
"""sbatch takes no more."""
SAFETY = 2.0
"""A file system that others use, too, may be slower than it was."""
RUNS = 5
"""Earlier runs of a recipe that are looked at, newest first."""
GB = 1e9


@dataclass(frozen=True)
class Notice:
    """Seconds before the time limit, and where they come from."""

    seconds: int
    reason: str


def warning(plan: Plan, profile: Profile, runs_dir: Path, given: int | None) -> Notice:
    """When to warn a job.

    Args:
        plan: of the run.
        profile: with the bandwidth of its file system.
        runs_dir: runs of the same recipe there are asked how long their steps and saves took.
        given: the user's own seconds.
    """
    if given is not None:
        return Notice(given, "--warning")
    earlier = _longest(measured(runs_dir / plan.recipe.name, RUNS))
    if earlier is None:
        seconds = plan.checkpoint_bytes / (profile.storage_gb_per_s * GB)
        reason = f"planned, {gib(plan.checkpoint_bytes)} at {profile.storage_gb_per_s:g} GB/s"
        return _warning(seconds, 0.0, reason)
    return _warning(earlier.save_seconds, earlier.step_seconds, f"measured in {earlier.run_id}")


def _longest(runs: Iterable[Measured]) -> Measured | None:
    return max(runs, key=lambda run: run.save_seconds + run.step_seconds, default=None)


def _warning(save: float, step: float, source: str) -> Notice:
    needed = SHORTEST + math.ceil(SAFETY * (save + step))
    return Notice(min(needed, LONGEST), f"a save takes {save:.0f} s ({source})")
