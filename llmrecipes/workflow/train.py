"""`llmrecipes train`: check, prepare, start the ranks."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.commandline import command_line
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StoppedEarly
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.launch.local import Grace, run_ranks
from llmrecipes.launch.ranks import Node
from llmrecipes.plan.check import check
from llmrecipes.plan.derive import default_world_size, derive
from llmrecipes.recipe.fixes import multiples
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.status import read
from llmrecipes.tracking.wandb.sink import require_library
from llmrecipes.train.history import require_complete
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.overfit import one_batch_recipe
from llmrecipes.workflow.recorded import require_same_recipe
from llmrecipes.workflow.restarts import STARTS, newest_step, require_progress

RUN_ID = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"


@dataclass(frozen=True)
class Paths:
    """Where things are kept."""

    runs_dir: Path
    data_dir: Path


@dataclass(frozen=True)
class TrainOptions:
    """What the command line asks for beside the recipe."""

    nproc: int | None = None
    run_id: str | None = None
    overfit_batch: bool = False
    anomaly: bool = False
    profile_steps: int = 0
    sample: bool = True
    cluster: str | None = None
    node: Node | None = None
    """Which of several machines this is; None: the only one."""
    max_restarts: int = 0
    """How often ranks that end with a fault are started again."""
    accept_changes: bool = False
    """Resume although another number of steps changes the learning rate or the order of the data."""
    separate_process: bool = False
    """Start a process even for a single rank."""
    from_scratch: bool = False
    """Move what the run has recorded out of the way, and start at step 0."""


def train(recipe: Recipe, paths: Paths, options: TrainOptions, log: Callable[[str], None]) -> int:
    """Run a recipe on this machine, or its part of one on several machines, or go on with a run.

    Args:
        recipe: the resolved recipe.
        paths: where runs and data are kept.
        options: ranks, run id and debugging.
        log: receives one line for each thing that takes time.

    Returns:
        The exit code.

    Raises:
        UserError: nothing was started.
    """
    if options.node is not None and options.run_id is None:
        raise UserError(
            "missing for several nodes", where="--run-id", rule="all nodes work in one directory",
            fix="--run-id my-run-1",
        )  # fmt: skip
    if options.node is not None and options.max_restarts:
        raise UserError(
            f"{options.max_restarts} on several nodes", where="--max-restarts",
            rule="a machine cannot start the ranks of the others again", fix="Slurm or Kubernetes, which restart all",
        )  # fmt: skip
    if options.from_scratch and options.run_id is None:
        raise UserError("given without --run-id", where="--from-scratch", rule="a run without an id is a new one",
                        fix="leave it out")  # fmt: skip
    if options.overfit_batch:
        recipe = one_batch_recipe(recipe)
    nodes = 1 if options.node is None else options.node.nodes
    cluster = detect().times(nodes)
    ranks = max(nodes, default_world_size(recipe, cluster)) if options.nproc is None else options.nproc
    _require_even_nodes(ranks, nodes)
    if options.cluster is not None:
        _set_environment_of(options.cluster, recipe, ranks, cluster, nodes)
    check(derive(recipe, ranks, cluster), cluster)
    require_library(recipe)
    spec = new_spec(recipe, paths, options)
    if options.node is not None and not options.from_scratch and finished(spec.run_dir, recipe.train.train_iters):
        log(f"{spec.run_dir} has done all its steps")  # and the other nodes, which would be waited for, are gone
        return int(ExitCode.DONE)
    from llmrecipes.data.prepare import prepare

    try:
        prepare(recipe, paths.data_dir, progress=log)
    except (UserError, StoppedEarly):
        remove_empty_run_dir(spec)
        raise
    if options.max_restarts == 0:
        return start(spec, ranks, cluster, options.node, apart=options.separate_process)
    return _start_again(spec, ranks, cluster, options.max_restarts, log)


def _start_again(spec: RunSpec, ranks: int, cluster: Cluster, max_restarts: int, log: Callable[[str], None]) -> int:
    """Start ranks, and after a fault start all of them again; they go on from the newest checkpoint.

    Raises:
        UserError: three restarts in a row found the same checkpoint, with `ExitCode.STOP`.
    """
    job, record = f"process {os.getpid()}", spec.run_dir / "logs" / STARTS
    require_progress(record, job, 0, newest_step(spec.run_dir), max_restarts)
    for restart in range(max_restarts + 1):
        again = {"restart": restart, "from_scratch": spec.from_scratch and restart == 0}
        code = start(spec.model_copy(update=again), ranks, cluster, apart=True)
        if code in tuple(ExitCode) or restart == max_restarts:
            return code
        step = newest_step(spec.run_dir)
        require_progress(record, job, restart + 1, step, max_restarts)
        log(f"the ranks ended with {code}; restart {restart + 1} of {max_restarts}, from step {step}")
    raise AssertionError("the last restart returns")


def new_spec(recipe: Recipe, paths: Paths, options: TrainOptions) -> RunSpec:
    """What the ranks are told, once the run's directory is known to be there, to be writable, and to be this recipe's.

    Raises:
        UserError: it is not.
    """
    run_id = new_run_id() if options.run_id is None else checked_run_id(options.run_id)
    run_dir = paths.runs_dir / recipe.name / run_id
    if not options.from_scratch:
        require_complete(run_dir)
        require_same_recipe(recipe, run_dir, paths.data_dir, accept=options.accept_changes)
    _require_writable(run_dir)
    return RunSpec(
        recipe=recipe,
        run_dir=run_dir,
        runs_dir=paths.runs_dir,
        data_dir=paths.data_dir,
        overfit_batch=options.overfit_batch,
        anomaly=options.anomaly,
        profile_steps=options.profile_steps,
        sample=options.sample,
        from_scratch=options.from_scratch,
    )


def remove_empty_run_dir(spec: RunSpec) -> None:
    """Remove the folders that `new_spec` made, up to the first with something in it: what never began is no run."""
    for folder in (spec.run_dir / "logs", spec.run_dir, spec.run_dir.parent, spec.runs_dir):
        try:
            folder.rmdir()
        except OSError:
            return


def start(spec: RunSpec, ranks: int, cluster: Cluster, node: Node | None = None, *, apart: bool = False) -> int:
    """Run all ranks of this machine to their end; returns the exit code.

    Args:
        spec: what they are told.
        ranks: of all nodes together.
        cluster: all nodes together.
        node: which of several this is.
        apart: start a process even for a single rank.
    """
    # What the user has set wins, and may be more or less than an even share.
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, int(cluster.cpu_cores) // ranks))
    if ranks == 1 and node is None and not apart:
        # The variable only counts before torch is loaded, which data preparation may have done.
        import torch

        from llmrecipes.train.rank import guarded
        from llmrecipes.train.worker import run

        torch.set_num_threads(threads)
        return guarded(run, spec)
    path = spec.run_dir / "logs" / ("spec.json" if node is None else f"spec-node-{node.number}.json")
    path.write_text(spec.model_dump_json(indent=2) + "\n", "utf-8")
    from llmrecipes.checkpoint.store import CheckpointStore

    store = CheckpointStore(spec.run_dir / "checkpoints")

    def newest() -> Path | None:
        return next((entry.path for entry in reversed(store.entries())), None)

    return run_ranks(
        "llmrecipes.train.worker",
        [str(path)],
        world_size=ranks,
        threads=threads,
        logs=spec.run_dir / "logs",
        node=node,
        grace=Grace(spec.recipe.train.exit_grace_seconds, newest),
    )


def finished(run_dir: Path, train_iters: int) -> bool:
    """Whether a run has done all its steps, so that a part of it which is started again has nothing to do."""
    status = read(run_dir)
    step = status.get("step")
    return status.get("state") == "finished" and isinstance(step, int) and step >= train_iters


def new_run_id() -> str:
    """UTC time and six random characters, so that ids sort by age and do not meet."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def checked_run_id(run_id: str) -> str:
    """A run id that is safe as the name of a directory.

    Raises:
        UserError: it is not.
    """
    if not 0 < len(run_id) <= 64 or run_id[0] in "._-" or set(run_id) - set(RUN_ID):
        raise UserError(
            f"run id {run_id!r}",
            where="--run-id",
            rule="at most 64 letters, digits, dots, dashes and underscores; a letter or digit first",
            fix="--run-id my-run-1",
        )
    return run_id


def _require_even_nodes(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise UserError(
            f"{ranks} ranks on {nodes} nodes",
            where="--nproc",
            rule="--nproc counts the ranks of all nodes, and every node has as many",
            fix=f"--nproc {multiples(ranks, nodes)}",
        )


def _set_environment_of(name: str, recipe: Recipe, ranks: int, here: Cluster, nodes: int) -> None:
    """Check the run against nodes of a cluster profile, and set its variables for all ranks.

    Raises:
        UserError: no such profile, this machine is not of its kind, or the run does not fit there.
    """
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.hardware.machine import machine
    from llmrecipes.launch.environment import environment, missing

    profile = load_profile(name)
    site = machine(profile, nodes)
    if site.device != here.device:
        raise UserError(
            f"cluster profile {name} has {profile.gpus_per_node} GPUs a node, this machine has {len(here.gpus)}",
            where="--cluster",
            rule="a run is planned for the kind of machine it runs on",
            fix="without --cluster the run is planned for this machine; to plan only: "
            + command_line("show", recipe.name, options={"cluster": name}),
        )
    plan = derive(recipe, ranks, site)
    check(plan, site)
    os.environ.update(missing(environment(profile, plan, ranks // nodes), os.environ))


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
