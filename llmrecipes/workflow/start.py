"""The one way to a start: recipe, options and machine → plan, directory, weights, data, environment, spec of the ranks.

`train` (also in pods and local jobs), a Slurm job and `smoke` start through it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError

from llmrecipes.engine.requirements import require_fields, require_packages
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import COSTS, Costs, Profile
from llmrecipes.launch import record
from llmrecipes.launch.environment import detected_environment, environment
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.reading.layouts import chosen_keys
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.runfiles import checked_run_id
from llmrecipes.tracking.run_tracker import require_packages_of_tracking
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.precomputed_match import require_precomputed
from llmrecipes.workflow.pretrained import with_pretrained
from llmrecipes.workflow.run import Log, Paths, TrainOptions, new_spec, plan_run, prepare_data
from llmrecipes.workflow.speed_forecast import record_of
from llmrecipes.workflow.teacher import record_teacher, with_teacher

Check = Callable[[RunSpec, RunPlan], None]


@dataclass(frozen=True)
class Machine:
    """Where the ranks of a run are.

    Attributes:
        cluster: all nodes together.
        ranks: on all nodes; None: all GPUs, else the fewest that the layout needs.
        profile: profile of the site, whose variables the ranks get; None: those of the detected GPUs.
    """

    cluster: Cluster
    ranks: int | None = None
    nodes: int = 1
    profile: Profile | None = None


@dataclass(frozen=True)
class PreparedStart:
    """A start that is ready: everything that the ranks need is in `spec` and `variables`."""

    spec: RunSpec
    plan: RunPlan
    machine: Machine
    variables: dict[str, str]
    """Of every rank, except those that the user has set."""

    @classmethod
    def of(cls, spec: RunSpec, plan: RunPlan, machine: Machine) -> Self:
        """A run whose directory, weights and data are there already. The ranks get the facts of the plan."""
        logs = spec.run.logs.absolute()
        if machine.profile is None:
            variables = detected_environment(machine.cluster, plan, logs)
        else:
            variables = environment(machine.profile, plan, plan.world_size // machine.nodes, logs)
        known = {
            "on_gpus": plan.cluster.device == "cuda",
            "planned": plan.facts(),
            "nvlink_domain": plan.cluster.nvlink_domain,
            "predicted": record_of(plan, machine.profile),
            "chosen": plan.chosen or record.choice(spec.run.path, chosen_keys(plan.recipe)),
            "costs": costs(plan.recipe, machine.profile),
        }
        return cls(spec.model_copy(update=known), plan, machine, variables)


def costs(recipe: Recipe, profile: Profile | None) -> Costs | None:
    """Factors of the run's energy: of the profile, or of the site that started this pod; carbon also of the recipe.

    Raises:
        UserError: the environment has something else than costs.
    """
    known = profile.costs if profile is not None else None
    if profile is None and (text := os.environ.get(COSTS)):
        try:
            known = Costs.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{'.'.join(map(str, first['loc'])) or text!r}: {first['msg']}",
                where=COSTS,
                rule="it must have the costs of a cluster profile as JSON",
                fix=f"unset it, or {COSTS}='{Costs(pue=1.2, kg_co2_per_kwh=0.35).model_dump_json(exclude_unset=True)}'",
            ) from error
    factor = recipe.tracking.kg_co2_per_kwh
    if factor is None or (known is not None and known.kg_co2_per_kwh is not None):
        return known
    return (known or Costs()).model_copy(update={"kg_co2_per_kwh": factor})


class Finished(Exception):
    """The run has done all its steps, so that a restarted part of it has nothing to do."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"{run.path} has done all its steps")


def plan_start(recipe: Recipe, paths: Paths, options: TrainOptions, machine: Machine) -> RunPlan:
    """The plan of a start; arguments and errors as of `prepare_start`.

    A run that goes on keeps the layout that was chosen for it. Each of several nodes plans by itself, and may see other
    runs than the next, or see them at another time: what runs have measured does not count there.
    """
    where = machine.cluster, machine.ranks, machine.profile
    if machine.nodes > 1:
        return plan_run(recipe, *where)
    resumed = options.run_id is not None and not options.run.from_scratch
    run = Run.of(paths.runs_dir, recipe.name, checked_run_id(options.run_id)) if resumed else None
    return plan_run(recipe, *where, paths.runs_dir, run)


def prepare_start(
    recipe: Recipe,
    paths: Paths,
    options: TrainOptions,
    machine: Machine,
    log: Log,
    *,
    skip_finished: bool = False,
    check: Check | None = None,
) -> PreparedStart:
    """Check that a run can start, and prepare everything that its ranks need.

    Args:
        recipe: the resolved recipe.
        log: receives one line for each slow step.
        skip_finished: refuse a run that has done all its steps.
        check: called before weights and data are fetched; raises to refuse the start.

    Raises:
        Finished: with `skip_finished`.
        UserError: nothing was started. A directory that was created for it is removed.
    """
    plan = plan_start(recipe, paths, options, machine)
    if plan.chosen is not None:
        log(f"layout auto: {plan.chosen['text']}")
    recipe = plan.recipe  # what `recompute_granularity: auto` has become: the ranks do not choose again
    require_packages(recipe)
    for stage in plan.stages:
        require_fields(stage)
    require_packages_of_tracking(recipe)
    spec = new_spec(recipe, paths, options)
    if skip_finished and spec.run.is_finished(recipe.train):
        raise Finished(spec.run)
    if check is not None:
        check(spec, plan)
    spec = with_teacher(with_pretrained(spec, log), log)
    prepare_data(recipe, paths.data_dir, log, spec)
    record_teacher(spec)
    require_precomputed(spec, log)
    return PreparedStart.of(spec, plan, machine)
