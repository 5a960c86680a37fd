"""`llmrecipes submit`: plan for the target, check, render, and only then submit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.hardware.load import load_profile, names
from llmrecipes.hardware.machine import machine
from llmrecipes.launch import record
from llmrecipes.launch.base import (
    Given,
    JobHandle,
    JobState,
    Launcher,
    Planned,
    PlannedForCluster,
    Rendering,
    Submission,
)
from llmrecipes.recipe.load import load
from llmrecipes.workflow.run import (
    Paths,
    TrainOptions,
    checked_run_id,
    is_prepared,
    new_run_id,
    new_spec,
    plan_run,
    remove_empty_run_dir,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted, or would be: `job` is None after a dry run."""

    submission: Submission
    rendering: Rendering
    job: JobHandle | None

    @property
    def planned(self) -> Planned:
        return self.submission.planned

    def as_dict(self, state: JobState | None) -> dict[str, Any]:
        """Plain data for JSON."""
        planned = self.planned
        return {
            "job_id": None if self.job is None else self.job.ref.job_id,
            "launcher": None if self.job is None else self.job.ref.launcher,
            "state": state,
            "run_id": self.submission.run_id,
            "run_dir": str(self.submission.run_dir),
            "cluster": None if planned.profile is None else planned.profile.name,
            "nodes": planned.nodes,
            "ranks": planned.plan.layout.world_size,
            "submitted": self.job is not None,
            **self.rendering.details,
        }


def plan_for(
    recipe: str, overrides: list[str], cluster: str | None, nodes: int, ranks_per_node: int | None = None
) -> PlannedForCluster:
    """Plan a recipe for some nodes of a site.

    Args:
        recipe, overrides: see `recipe.load.load`.
        cluster: name or path of a profile.
        nodes: how many of its nodes; more nodes add data-parallel ranks and change nothing else.
        ranks_per_node: None: one per GPU.

    Raises:
        UserError: the recipe or the profile is wrong, or the run does not fit.
    """
    loaded = load(recipe, overrides).recipe
    if cluster is None:
        raise UserError(
            "no cluster is named",
            where="--cluster",
            rule="a job is planned for the nodes it will run on, not for the machine that submits it",
            fix=f"one of {', '.join(names())}, or a YAML file",
        )
    profile = load_profile(cluster)
    if ranks_per_node is not None and profile.gpus_per_node and ranks_per_node > profile.gpus_per_node:
        raise UserError(
            f"{ranks_per_node} ranks on {profile.gpus_per_node} GPUs", where="--ranks-per-node", rule="one rank per GPU"
        )
    site = machine(profile, nodes)
    plan = plan_run(loaded, site, nodes * (ranks_per_node or profile.ranks_per_node))
    return PlannedForCluster((recipe, *overrides), cluster, profile, site, plan, nodes)


def plan_here(recipe: str, overrides: list[str], nodes: int, ranks: int | None = None) -> Planned:
    """Plan a recipe for this machine; `nodes` is 1, which the launcher checks.

    Raises:
        UserError: the recipe is wrong, or the run does not fit.
    """
    loaded, site = load(recipe, overrides).recipe, detect()
    return Planned((recipe, *overrides), None, None, site, plan_run(loaded, site, ranks), nodes)


def submit(
    planned: Planned,
    launcher: Launcher,
    given: Given,
    paths: Paths,
    *,
    run_id: str | None = None,
    accept_changes: bool = False,
    prepare: bool = False,
    dry_run: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Submitted:
    """Render a planned run, and submit it unless this is a dry run.

    Args:
        planned: from `plan_for` or `plan_here`.
        launcher: from `launch.registry`.
        given: its options.
        paths: where runs and data are kept.
        run_id: None: a new one.
        accept_changes: see `TrainOptions`.
        prepare: where this machine cannot see whether the data is prepared, a job finds out first.
        dry_run: only render.
        environment: more variables, for a job on this machine.

    Raises:
        UserError: a value that the scheduler cannot take, none of its programs on this machine, or it rejects the job.
    """
    run_id = new_run_id() if run_id is None else checked_run_id(run_id)
    paths = Paths(paths.runs_dir.resolve(), paths.data_dir.resolve())
    submission = Submission(
        planned, run_id, paths.runs_dir, paths.data_dir, accept_changes, environment=environment or {},
        prepared=is_prepared(planned.recipe, paths.data_dir) if launcher.shares_disk else not prepare,
    )  # fmt: skip
    rendering = launcher.render(submission, given)
    if dry_run:
        return Submitted(submission, rendering, None)
    launcher.require()
    spec = None
    if launcher.shares_disk:
        # Also creates the directory of the log.
        spec = new_spec(planned.recipe, paths, TrainOptions(run_id=run_id, accept_changes=accept_changes))
    try:
        job = launcher.submit(submission, rendering)
    except UserError:
        if spec is not None:
            remove_empty_run_dir(spec)
        raise
    try:
        record.write(job.ref)
    except OSError as error:  # the job was submitted anyway
        logger.warning(
            "%s: %s; llmrecipes cancel needs the id of the job", submission.run_dir / record.FILE, error.strerror
        )
    return Submitted(submission, rendering, job)
