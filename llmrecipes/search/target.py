"""Where trials run: this machine, shared by several trials at a time, or nodes of a cluster; and the plan for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.hardware.profile import Profile
from llmrecipes.io import write_atomic
from llmrecipes.launch.base import JobHandle, Launcher, Planned, PlannedForCluster
from llmrecipes.launch.registry import launcher
from llmrecipes.launch.run_options import JOB_OPTIONS, taken
from llmrecipes.plan.check import check_run
from llmrecipes.plan.derive import default_world_size
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles
from llmrecipes.workflow.plan import laid_out
from llmrecipes.workflow.run import Paths
from llmrecipes.workflow.submit import submit


class Infeasible(Exception):
    """A trial that cannot run.

    Args:
        reason: in words.
        violation: how far it is from a trial that can, greater than 0.
    """

    def __init__(self, reason: str, violation: float = 1.0) -> None:
        super().__init__(reason)
        self.violation = violation


@dataclass(frozen=True)
class Target:
    """What a trial may use, and how it is submitted.

    Attributes:
        launcher: launcher of the jobs.
        launcher_options: its options, as in `submit`.
        paths: paths of runs and data.
        workers: trials at a time.
        site: resources of one trial.
        ranks: ranks of a trial; None: `default_world_size`.
        nodes: nodes of a trial.
        cluster: name of the profile; None: this machine.
        profile: the profile.
    """

    launcher: Launcher
    launcher_options: Mapping[str, Any]
    paths: Paths
    workers: int
    site: Cluster
    ranks: int | None = None
    nodes: int = 1
    cluster: str | None = None
    profile: Profile | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def is_local(self) -> bool:
        """Whether trials run on this machine, and end with the search."""
        return self.profile is None

    def plan(self, recipe: Recipe) -> RunPlan:
        """The plan of a trial.

        Raises:
            Infeasible: it cannot run there.
        """
        try:
            ranks = self.ranks or default_world_size(recipe, self.site)
            plan = laid_out(recipe, ranks, self.site, self.profile)
        except UserError as error:
            raise Infeasible(str(error)) from error
        try:
            check_run(plan, self.site, advise=False)
        except UserError as error:
            raise Infeasible(str(error), max(1e-6, headroom(plan))) from error
        return plan

    def submit(self, recipe: Recipe, plan: RunPlan, run_id: str, slot: int) -> JobHandle:
        """Start or resume the job of a trial.

        Args:
            recipe: recipe of the trial.
            plan: plan of the trial.
            run_id: id of its run.
            slot: which of `workers`, from 0; a trial on this machine has its share of it.

        Raises:
            UserError: it cannot be submitted.
        """
        path = RunFiles.of(self.paths.runs_dir.resolve(), recipe.name, run_id).recipe_file
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, to_yaml(recipe if plan.chosen is None else plan.recipe))
        planned = self._planned((str(path),), plan)
        share = self._share(plan, slot) if self.is_local else {}
        options, launcher_options = taken(self.launcher_options)
        job = submit(
            planned, self.launcher, launcher_options, self.paths, run_id=run_id, options=options, environment=share
        ).job
        if job is None:
            raise TypeError("a submission without --dry-run must have a job")
        return job

    def _planned(self, words: tuple[str, ...], plan: RunPlan) -> Planned:
        if self.profile is None or self.cluster is None:
            return Planned(words, None, None, self.site, plan, self.nodes)
        return PlannedForCluster(words, self.cluster, self.profile, self.site, plan, self.nodes)

    def _share(self, plan: RunPlan, slot: int) -> dict[str, str]:
        """Variables that give a trial its share of this machine."""
        variables = {}
        if "OMP_NUM_THREADS" not in self.variables:
            variables["OMP_NUM_THREADS"] = str(max(1, int(self.site.cpu_cores) // plan.world_size))
        if self.site.gpus and self.workers > 1:
            number = len(self.site.gpus)
            visible = self.variables.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else [str(device) for device in range(number * self.workers)]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[number * slot : number * (slot + 1)])
        return variables


def headroom(plan: RunPlan) -> float:
    """Memory that a plan needs beyond the capacity, as a share of it; negative if it fits."""
    most = max(stage.memory.total / max(1, stage.memory_capacity_bytes) for stage in plan.stages)
    return max(most, *(stage.host.total / max(1, stage.host_capacity_bytes) for stage in plan.stages)) - 1


def local_target(
    launcher: Launcher, launcher_options: Mapping[str, Any], paths: Paths, workers: int, ranks: int | None
) -> Target:
    """This machine, divided among `workers` trials at a time.

    Raises:
        UserError: there are fewer GPUs than trials.
    """
    local = detect()
    if local.gpus and len(local.gpus) < workers:
        raise UserError(
            f"{workers} trials at a time on {len(local.gpus)} GPUs",
            where="--workers",
            rule="parallel trials do not share GPUs",
            fix=f"--workers {len(local.gpus)}",
        )
    # Measured once: a later trial is not judged by what earlier ones use at the moment.
    site = replace(
        local,
        gpus=local.gpus[: len(local.gpus) // workers],
        cpu_cores=local.cpu_cores / workers,
        memory_bytes=local.memory_bytes // workers,
        memory_available_bytes=local.memory_available_bytes // workers,
    )
    return Target(launcher, launcher_options, paths, workers, site, ranks)


def cluster_target(
    launcher: Launcher,
    launcher_options: Mapping[str, Any],
    paths: Paths,
    workers: int,
    cluster: str,
    nodes: int,
    ranks: int | None,
) -> Target:
    """Nodes of a cluster, as many for each trial.

    Args:
        launcher, launcher_options, paths, workers: see `Target`.
        cluster: name or path of its profile.
        nodes: nodes of each trial.
        ranks: on each node; None: one per GPU.

    Raises:
        UserError: no such profile.
    """
    profile = load_profile(cluster)
    number = nodes * (ranks or profile.ranks_per_node)
    return Target(launcher, launcher_options, paths, workers, machine(profile, nodes), number, nodes, cluster, profile)


def target_of(
    to: str,
    launcher_options: dict[str, Any],
    paths: Paths,
    workers: int,
    cluster: str | None,
    nodes: int,
    nproc: int | None,
) -> Target:
    """The target of a command's or a call's options.

    Raises:
        UserError: an option that the scheduler does not have or that has no effect here.
    """
    place = launcher(to)
    for name in launcher_options:
        if name not in place.takes | JOB_OPTIONS:
            raise UserError(
                f"{name} is not an option of --to {to}",
                where="--submit",
                rule=f"one of {', '.join(sorted(place.takes | JOB_OPTIONS))}",
            )
    if not place.needs_cluster:
        if nodes > 1 or cluster is not None:
            raise UserError(
                f"not valid with --to {to}",
                where="--nodes" if nodes > 1 else "--cluster",
                rule="trials on this machine run on one node",
                fix="--to slurm or --to k8s",
            )
        return local_target(place, launcher_options, paths, workers, nproc)
    if cluster is None:
        raise UserError(
            f"missing with --to {to}",
            where="--cluster",
            rule="a trial is planned for the nodes it will run on",
            fix="--cluster NAME",
        )
    if not place.shares_disk and "tracking-uri" not in launcher_options:
        raise UserError(
            f"tracking-uri is required with --to {to}",
            where="--submit",
            rule="the losses of trials come back through an MLflow server",
            fix="--submit tracking-uri=URL",
        )
    return cluster_target(place, launcher_options, paths, workers, cluster, nodes, nproc)
