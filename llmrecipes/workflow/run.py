"""Steps of a start: plan and check, the run's directory, data, the spec of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.errors import UserError
from llmrecipes.faults.signals import StoppedEarly
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.launch.ranks import Node
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.check import check
from llmrecipes.plan.derive import Plan, default_world_size, derive
from llmrecipes.recipe.engines import without_zero
from llmrecipes.recipe.schema import Parallelism, Recipe
from llmrecipes.rundir import Run
from llmrecipes.runfiles import checked_run_id
from llmrecipes.train.completeness import require_complete
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.stored_recipe import require_same_recipe

if TYPE_CHECKING:
    pass

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
    max_restarts: int = 0
    """Maximum restarts of ranks that fail."""
    separate_process: bool = False
    """Start a process even for a single rank."""
    run: RunOptions = field(default_factory=RunOptions)


def plan_run(recipe: Recipe, cluster: Cluster, ranks: int | None = None) -> Plan:
    """Plan a recipe, and reject what cannot work.

    Args:
        recipe: the resolved recipe.
        cluster: all nodes of the run together.
        ranks: of all nodes; None: `default_world_size`.

    Raises:
        UserError: the layout or the batch does not fit the ranks, or the run does not fit the machine.
    """
    plan = derive(recipe, default_world_size(recipe, cluster) if ranks is None else ranks, cluster)
    check(plan, cluster)
    return plan


def on_one_rank(recipe: Recipe) -> Recipe:
    """The recipe for one process that holds the whole model: checkpoints are the same in every layout.

    Without ZeRO, so that a checkpoint can be read where DeepSpeed, or the disk that it offloaded to, is missing.
    """
    single = Parallelism(use_distributed_optimizer=recipe.parallelism.use_distributed_optimizer)
    return without_zero(recipe).model_copy(update={"parallelism": single})


def is_prepared(recipe: Recipe, data_dir: Path) -> bool:
    """Whether the data of a recipe is there; it is checked when it is opened."""
    from llmrecipes.data.prepared import fingerprint

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
        require_complete(run.path)
        require_same_recipe(recipe, run, paths.data_dir, accept=options.run.accept_changes)
    run.create()
    return RunSpec(
        recipe=recipe,
        run_dir=run.path,
        runs_dir=paths.runs_dir,
        data_dir=paths.data_dir,
        **options.run.model_dump(),
    )
