"""The only path to a run: recipe → plan → check → directory → data → spec of its ranks."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.commandline import resume_command
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StoppedEarly
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.launch.ranks import Node
from llmrecipes.plan.check import check
from llmrecipes.plan.derive import Plan, default_world_size, derive
from llmrecipes.recipe.engines import without_zero
from llmrecipes.recipe.schema import Parallelism, Recipe
from llmrecipes.tracking.status import read
from llmrecipes.train.history import require_complete
from llmrecipes.train.spec import RunOptions, RunSpec
from llmrecipes.workflow.stored_recipe import require_same_recipe

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry

Log = Callable[[str], None]
RUN_ID = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"


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
    accept_changes: bool = False
    """Resume even if a different number of steps changes the learning rate or the data order."""
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


def require_checkpoint(run_dir: Path, data_dir: Path | None = None) -> Entry:
    """The newest valid checkpoint of a run.

    Args:
        run_dir: of the run.
        data_dir: where its prepared data is kept, for the command that the error gives; None: the default.

    Raises:
        UserError: there is none.
    """
    from llmrecipes.checkpoint.store import CheckpointStore

    store = CheckpointStore(run_dir / "checkpoints")
    entry = store.latest_valid()
    if entry is None:
        raise UserError(
            "no valid checkpoint",
            where=str(store.directory),
            fix=f"train it first: {resume_command(run_dir, data_dir=data_dir)}",
        )
    return entry


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
            remove_empty_run_dir(spec)
        raise


def new_spec(recipe: Recipe, paths: Paths, options: TrainOptions) -> RunSpec:
    """The spec of a run, after checking that its directory exists, is writable, and belongs to this recipe.

    Raises:
        UserError: it does not.
    """
    run_id = new_run_id() if options.run_id is None else checked_run_id(options.run_id)
    run_dir = paths.runs_dir / recipe.name / run_id
    if not options.run.from_scratch:
        require_complete(run_dir)
        require_same_recipe(recipe, run_dir, paths.data_dir, accept=options.accept_changes)
    _require_writable(run_dir)
    return spec_in(recipe, run_dir, paths, options.run)


def spec_in(recipe: Recipe, run_dir: Path, paths: Paths, options: RunOptions) -> RunSpec:
    """The spec of a run whose directory was already checked."""
    return RunSpec(
        recipe=recipe, run_dir=run_dir, runs_dir=paths.runs_dir, data_dir=paths.data_dir, **options.model_dump()
    )


def remove_empty_run_dir(spec: RunSpec) -> None:
    """Remove the folders that `new_spec` created, up to the first non-empty one: the run never started."""
    for folder in (spec.run_dir / "logs", spec.run_dir, spec.run_dir.parent, spec.runs_dir):
        try:
            folder.rmdir()
        except OSError:
            return


def finished(run_dir: Path, train_iters: int) -> bool:
    """Whether a run has done all its steps, so that a restarted part of it has nothing to do."""
    status = read(run_dir)
    step = status.get("step")
    return status.get("state") == "finished" and isinstance(step, int) and step >= train_iters


def new_run_id() -> str:
    """UTC time and six random characters, so that ids sort by age and do not collide."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def checked_run_id(run_id: str) -> str:
    """A run id that is safe as the name of a directory.

    Raises:
        UserError: it is not safe.
    """
    if not 0 < len(run_id) <= 64 or run_id[0] in "._-" or set(run_id) - set(RUN_ID):
        raise UserError(
            f"run id {run_id!r}",
            where="--run-id",
            rule="at most 64 letters, digits, dots, dashes and underscores; a letter or digit first",
            fix="--run-id my-run-1",
        )
    return run_id


def _require_writable(run_dir: Path) -> None:
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if not os.access(run_dir, os.W_OK):
            raise PermissionError(13, "Permission denied", str(run_dir))
    except OSError as error:
        raise UserError(
            f"the run directory cannot be written: {error.strerror}",
            where=str(error.filename or run_dir),
            rule="a run keeps its recipe, metrics and checkpoints in its directory",
            fix="--runs-dir DIR, or LLMRECIPES_RUNS",
            code=ExitCode.BAD_INPUT,
        ) from error
