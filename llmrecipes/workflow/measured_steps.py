"""What earlier runs of a recipe say for the choice of a layout: seconds of a step, and the run's own last start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.speed.choice import EarlierStart, MeasuredStep
from llmrecipes.recipe.halves import learned
from llmrecipes.recipe.reading.layouts import undecided
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.runfiles import PLAN
from llmrecipes.tracking.events import MEASURED
from llmrecipes.tracking.run_list import last_note
from llmrecipes.untrusted import read_json

logger = logging.getLogger(__name__)
_DAMAGED = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
MOST = 50
"""Newest runs of a recipe that are read: a choice must not wait for a directory of thousands."""
TIMELESS = (
    "name", "description", "data", "checkpoint", "scheduler", "search", "tracking", "train.train_iters",
    "train.eval_interval", "train.eval_iters", "train.log_interval", "train.seed", "optimizer.lr", "optimizer.min_lr",
)  # fmt: skip
"""What is learned from, and when; the rest decides how much work a step is."""


def measured_steps(
    recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None, runs_dir: Path | None
) -> list[MeasuredStep]:
    """What runs of the same recipe on as many of the same GPUs have measured, newest run first.

    Args:
        recipe: whose `name` is that of the runs' directory; runs that differ in the work of a step do not count.
        cluster, ranks, profile: of the run that is planned; runs on GPUs with other links do not count.
        runs_dir: None: no runs are read.
    """
    if runs_dir is None or not cluster.gpus or not undecided(recipe):
        return []
    runs = sorted(Run.all(runs_dir, recipe.name), key=lambda run: run.run_id, reverse=True)[:MOST]
    wanted = _work(recipe)
    steps = []
    damaged = []
    for run in runs:
        try:
            step = _step(run, wanted, ranks, profile)
        except _DAMAGED:
            damaged.append(run.name)
            continue
        if step is not None:
            steps.append(step)
    if damaged:
        names = ", ".join(damaged[:3])
        logger.warning("note: %d runs do not count for the layout, their records are damaged: %s", len(damaged), names)
    return steps


def last_start(recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None, run: Run) -> EarlierStart | None:
    """How `layout: auto` last started this run on as many of the same GPUs; None: it did not, or records are damaged.

    Args:
        recipe, cluster, ranks, profile: as of `measured_steps`.
    """
    if not cluster.gpus or not undecided(recipe):
        return None
    try:
        plan = _plan(run, ranks, profile)
        if plan is None or not plan["chosen"]:
            return None
        return EarlierStart(run.name, run.recipe().layout, str(plan["predicted"]["device"]))
    except _DAMAGED:
        return None


def _plan(run: Run, ranks: int, profile: Profile | None) -> dict[str, Any] | None:
    """plan.json of a run; None if it has not begun, or was planned for another machine."""
    try:
        plan: dict[str, Any] = read_json(run.path / PLAN, root=run.path)
    except FileNotFoundError:
        return None
    if plan["world_size"] != ranks or not plan["predicted"]:
        return None
    name = None if profile is None else profile.name
    return plan if plan["predicted"].get("profile", "") == name else None


def _step(run: Run, wanted: dict[str, Any], ranks: int, profile: Profile | None) -> MeasuredStep | None:
    """Of one run; None if it has measured nothing, or something else."""
    plan = _plan(run, ranks, profile)
    values = None if plan is None else last_note(run.path, MEASURED)
    if plan is None or values is None:
        return None
    recipe = run.recipe()
    seconds = float(values["measured/step_seconds"])
    if not 0 < seconds < float("inf"):
        message = f"{run.name}: a step of {seconds} s"
        raise ValueError(message)
    same = _work(recipe) == wanted
    return MeasuredStep(run.name, recipe.layout, str(plan["predicted"]["device"]), seconds) if same else None


def _work(recipe: Recipe) -> dict[str, Any]:
    return learned(recipe.model_dump(mode="json"), TIMELESS)
