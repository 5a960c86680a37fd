"""`llmrecipes submit`: plan for the cluster, check, render, and only then submit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile, names
from llmrecipes.hardware.machine import machine
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch import slurm
from llmrecipes.launch.kubernetes import objects
from llmrecipes.launch.kubernetes.options import Options as KubernetesOptions
from llmrecipes.launch.kubernetes.options import object_name
from llmrecipes.launch.kubernetes.pod import Run
from llmrecipes.launch.submit import require_program, submit
from llmrecipes.plan.check import check
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.load import load, recipe_hash, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.train import Paths, TrainOptions, checked_run_id, new_run_id, new_spec, remove_empty_run_dir

SLURM_SCRIPT = Path(__file__).parents[2] / "slurm" / "train.sbatch"


@dataclass(frozen=True)
class Planned:
    """A recipe on a number of nodes of a site, checked; `asked` and `cluster` are as the user wrote them."""

    asked: tuple[str, ...]
    cluster: str
    recipe: Recipe
    profile: Profile
    plan: Plan
    nodes: int


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted, or would be: `job_id` is None after a dry run."""

    command: tuple[str, ...]
    planned: Planned
    run_id: str
    run_dir: Path
    job_id: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "job_id": self.job_id,
            "run_id": self.run_id,
            "run_dir": str(self.run_dir),
            "cluster": self.planned.profile.name,
            "nodes": self.planned.nodes,
            "ranks": self.planned.plan.layout.world_size,
            "command": list(self.command),
        }


def plan_for(
    recipe: str, overrides: list[str], cluster: str | None, nodes: int, ranks_per_node: int | None = None
) -> Planned:
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
    plan = derive(loaded, nodes * (ranks_per_node or profile.ranks_per_node), site)
    check(plan, site)
    return Planned((recipe, *overrides), cluster, loaded, profile, plan, nodes)


def submit_slurm(
    planned: Planned, paths: Paths, options: slurm.Options, run_id: str | None, dry_run: bool
) -> Submitted:
    """Render the sbatch command, and run it unless this is a dry run.

    Raises:
        UserError: a value that Slurm cannot take, no sbatch on this machine, or Slurm rejects the job.
    """
    run_id = new_run_id() if run_id is None else checked_run_id(run_id)
    runs_dir, data_dir = paths.runs_dir.resolve(), paths.data_dir.resolve()
    run_dir = runs_dir / planned.recipe.name / run_id
    request = slurm.Request(planned.asked, planned.cluster, planned.nodes, run_id, runs_dir, data_dir, run_dir)
    words = slurm.command(request, planned.plan, planned.profile, options, SLURM_SCRIPT)
    job_id = None
    if not dry_run:
        require_program(words[0], "--dry-run prints the command; make train runs the recipe on this machine")
        start = TrainOptions(run_id=run_id, accept_changes=options.accept_changes)
        # Also creates the directory of the log.
        spec = new_spec(planned.recipe, Paths(runs_dir, data_dir), start)
        try:
            job_id = submit(words).partition(";")[0]
        except UserError:
            remove_empty_run_dir(spec)
            raise
    return Submitted(words, planned, run_id, run_dir, job_id)


@dataclass(frozen=True)
class Applied:
    """Objects that were applied, or would be: `answer` is the output of kubectl, None after a dry run."""

    objects: tuple[dict[str, Any], ...]
    planned: Planned
    run_id: str
    name: str
    namespace: str
    answer: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "namespace": self.namespace,
            "run_id": self.run_id,
            "cluster": self.planned.profile.name,
            "nodes": self.planned.nodes,
            "ranks": self.planned.plan.layout.world_size,
            "submitted": self.answer is not None,
            "objects": list(self.objects),
        }

    def as_yaml(self) -> str:
        """The objects as YAML for kubectl."""
        return objects.to_yaml(list(self.objects))


def submit_kubernetes(
    planned: Planned, options: KubernetesOptions, run_id: str | None, dry_run: bool, *, accept_changes: bool = False
) -> Applied:
    """Render the objects, and apply them unless this is a dry run.

    Raises:
        UserError: a value that Kubernetes cannot take, no kubectl on this machine, or the cluster rejects the objects.
    """
    run_id = new_run_id() if run_id is None else checked_run_id(run_id)
    name = object_name(planned.recipe.name, run_id)
    run = Run(
        name=name,
        run_id=run_id,
        nodes=planned.nodes,
        plan=planned.plan,
        profile=planned.profile,
        recipe_yaml=to_yaml(planned.recipe),
        recipe_hash=recipe_hash(planned.recipe),
        accept_changes=accept_changes,
    )
    rendered = tuple(objects.render(run, options))
    answer = None
    if not dry_run:
        require_program("kubectl", "--dry-run prints the objects; make train runs the recipe on this machine")
        answer = submit(("kubectl", "apply", "--filename", "-"), objects.to_yaml(list(rendered)))
    return Applied(rendered, planned, run_id, name, options.namespace, answer)
