"""Steps of a start: plan and check, the run's directory, data, the spec of the ranks.

And what resuming with a different recipe would change: architecture, learning rate, order of the data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmrecipes.checkpoint.compatibility import require_compatible, require_readable
from llmrecipes.checkpoint.manifest import Manifest
from llmrecipes.errors import UserError
from llmrecipes.faults.signals import StoppedEarly
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.ranks import Node
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.check import check_fewer, check_run, require_elastic_world
from llmrecipes.plan.derive import default_world_size
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.derived.degrees import undivided
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import FEATURES, by_rule
from llmrecipes.rundir import Run
from llmrecipes.runfiles import checked_run_id
from llmrecipes.train.changed_steps import require_accepted
from llmrecipes.train.completeness import require_complete
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.plan import laid_out
from llmrecipes.workflow.restarts import newest_local

logger = logging.getLogger(__name__)

Log = Callable[[str], None]


@dataclass(frozen=True)
class Paths:
    """Directories of runs and data."""

    runs_dir: Path
    data_dir: Path


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command line besides the recipe; `run` are those passed on to the ranks."""

    nproc: int | None = None
    run_id: str | None = None
    cluster: str | None = None
    node: Node | None = None
    """Which of several machines this is; None: the only one."""
    min_nodes: int | None = None
    """Nodes with which a start goes on if others do not come within `join_seconds`; None: it waits for all."""
    join_seconds: float = 0.0
    separate_process: bool = False
    """Start a process even for a single rank."""
    stop_after: int | None = None
    """Save and stop after this step; None: train to the end."""
    run: RunOptions = field(default_factory=RunOptions)


def plan_run(
    recipe: Recipe,
    cluster: Cluster,
    ranks: int | None = None,
    profile: Profile | None = None,
    runs_dir: Path | None = None,
    run: Run | None = None,
) -> RunPlan:
    """Plan a recipe, and reject what cannot work.

    Args:
        recipe: the resolved recipe.
        cluster: all nodes of the run together.
        ranks: ranks of all nodes; None: `default_world_size`.
        profile: for `layout: auto`; None: the GPU's data file.
        runs_dir, run: see `laid_out`.

    Raises:
        UserError: the layout or the batch does not fit the ranks, or the run does not fit the machine; or it would not
            with fewer ranks that `train.elastic` allows; or `checkpoint.also_export` has no form for its model.
    """
    ranks = default_world_size(recipe, cluster) if ranks is None else ranks
    elastic = recipe.train.elastic is not None
    if elastic:
        require_elastic_world(recipe, ranks)
    plan = laid_out(recipe, ranks, cluster, profile, runs_dir, run)
    check_run(plan, cluster)
    if elastic:
        check_fewer(plan.recipe, ranks, cluster)
    if recipe.checkpoint.also_export is not None:
        _require_exportable(plan)
    return plan


def _require_exportable(plan: RunPlan) -> None:
    from llmrecipes.hf.family import family_of

    for stage in plan.stages:
        try:
            family_of(stage.recipe.model)
        except UserError as error:
            raise UserError(
                error.what,
                where=error.where,
                rule="checkpoint.also_export needs a model that transformers has",
                fix="; or ".join(filter(None, (error.fix, "checkpoint.also_export=null"))),
            ) from error


def on_one_rank(recipe: Recipe) -> Recipe:
    """The recipe for one process that holds the whole model: checkpoints are the same in every layout and stage.

    Without stages, which may have layouts of several ranks, and without ZeRO, so that a checkpoint can be read where
    DeepSpeed, or the disk that it offloaded to, is missing.
    """
    model = recipe.model
    if model.moe_token_dispatcher_type == "flex":  # noqa: S105 - no password
        model = model.model_copy(update={"moe_token_dispatcher_type": "alltoall"})  # flex needs several ranks
    single = by_rule(recipe.model_copy(update={"model": model, "stages": ()}), FEATURES)
    return undivided(
        single,
        use_distributed_optimizer=recipe.layout.use_distributed_optimizer,
        # It trains nothing that would make up for the time to compile.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def is_prepared(recipe: Recipe, data_dir: Path) -> bool:
    """Whether the data of a recipe is prepared; it is checked when it is opened."""
    from llmrecipes.data.folder.prepared import fingerprint

    return (data_dir / fingerprint(recipe)).is_dir()


def prepare_data(recipe: Recipe, data_dir: Path, log: Log, spec: RunSpec | None = None) -> None:
    """Prepare a recipe's data if it is missing.

    Args:
        recipe: the resolved recipe.
        data_dir: where prepared data is kept.
        log: receives one line for each slow step.
        spec: a new run; if this fails, its directory is removed unless there is something in it.

    Raises:
        UserError: a source is missing or corrupt.
    """
    from llmrecipes.data.prepare import prepare

    try:
        prepare(recipe, data_dir, progress=log)
    except (UserError, StoppedEarly):
        if spec is not None:
            spec.run.remove_if_empty()
        raise


def new_spec(recipe: Recipe, paths: Paths, options: TrainOptions) -> RunSpec:
    """The spec of a run, after checking that its directory exists, is writable, and belongs to this recipe.

    Raises:
        UserError: it does not.
    """
    run = Run.of(paths.runs_dir, recipe.name, checked_run_id(options.run_id))
    if not options.run.from_scratch:
        if recipe.checkpoint.copy_to is None:  # else the ranks look for copies first
            require_complete(run.path)
        if not options.run.from_best:
            _require_steps(recipe, run)
        require_same_recipe(recipe, run, paths.data_dir, accept=options.run.accept_changes)
    run.create()
    return RunSpec(
        recipe=recipe,
        run_dir=run.path,
        runs_dir=paths.runs_dir,
        data_dir=paths.data_dir,
        stop_after=options.stop_after,
        **options.run.model_dump(),
    )


def _require_steps(recipe: Recipe, run: Run) -> None:
    newest = run.newest()
    if newest is not None and newest.step > recipe.train.train_iters:
        raise UserError(
            f"train.train_iters is {recipe.train.train_iters}, but the run has done {newest.step} steps",
            where=str(run.path),
            fix=f"train.train_iters={newest.step} or more, or a new run id",
        )


def require_same_recipe(recipe: Recipe, run: Run, data_dir: Path, *, accept: bool) -> None:
    """Refuse to resume an existing run with a recipe that would change its training.

    Args:
        recipe: the recipe of this command.
        run: the run.
        data_dir: where prepared data is kept.
        accept: whether the user has accepted what a different number of steps changes.

    Raises:
        UserError: what differs; its engine cannot load the run's checkpoint; or the recipe of the run is corrupt.
    """
    newest = run.newest()
    if newest is not None:
        require_readable(newest, engine_name(recipe))
    then = run.started_recipe()
    if then is None:
        return
    require_compatible(recipe.model_dump(mode="json"), then.model_dump(mode="json"), where=str(run.path))
    saved = [manifest for manifest in (newest and newest.manifest, newest_local(run, recipe)) if manifest]
    if not saved:
        return
    latest = max(saved, key=lambda manifest: manifest.step)
    require_accepted(recipe, then, latest.step, where=str(run.path), accept=accept)
    _require_order(latest, then, run, data_dir, accept=accept)


def _require_order(newest: Manifest, then: Recipe, run: Run, data_dir: Path, *, accept: bool) -> None:
    """Refuse to resume a run of several passes that an older version shuffled as one, unless the user accepts it."""
    from llmrecipes.data.folder.prepared import ORDER, most_passes, open_prepared

    if not newest.step or newest.sample_order == ORDER or then.data.chat is not None:
        return
    try:
        prepared = open_prepared(then, data_dir)
    except UserError:
        return  # prepared on another machine, where the same check runs
    passes = max(most_passes(stage, prepared) for stage in stage_recipes(then))
    if passes == 1 or (then.data.curriculum is not None and then.data.curriculum.share == 1):
        return
    what = f"an older version shuffled its {passes} passes over the data as one, until step {newest.step}; each is "
    what += "shuffled by itself now, so the order changes"
    if accept:
        logger.warning("%s: %s", run.path, what)
        return
    raise UserError(
        what,
        where=str(run.path),
        rule="a resumed run keeps the order of its data, unless the change is accepted",
        fix="--accept-changes, or finish the run with the version that started it",
    )
