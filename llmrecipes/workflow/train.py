"""`llmrecipes train`: a run on this machine, or its part of one on several."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from llmrecipes.commandline import command_line
from llmrecipes.diagnosis.finding import ONE_BATCH
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.environment import missing
from llmrecipes.launch.environment import threads as share
from llmrecipes.launch.local import Grace, Spares, run_ranks
from llmrecipes.launch.ranks import Node
from llmrecipes.plan.derive import default_world_size
from llmrecipes.recipe.degrees import multiples
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.restarts import require_progress
from llmrecipes.workflow.run import Log, Paths, TrainOptions, plan_run
from llmrecipes.workflow.start import Finished, Machine, PreparedStart, prepare_start


def train(recipe: Recipe, paths: Paths, options: TrainOptions, log: Log) -> int:
    """Train a recipe, or resume its run.

    Args:
        recipe: the resolved recipe.
        paths: where runs and data are kept.
        options: ranks, run id and debugging.
        log: receives one line for each slow step.

    Returns:
        The exit code.

    Raises:
        UserError: nothing was started.
    """
    _require_consistent(options)
    if options.run.overfit_batch:
        recipe = one_batch_recipe(recipe)
    nodes = 1 if options.node is None else options.node.nodes
    cluster = detect().times(nodes)
    ranks = max(nodes, default_world_size(recipe, cluster)) if options.nproc is None else options.nproc
    _require_even_nodes(ranks, nodes)
    profile = None if options.cluster is None else _profile_of(options.cluster, recipe, ranks, cluster, nodes)
    if profile is not None:
        cluster = replace(cluster, nvlink_domain=profile.nvlink_domain)
    # The other nodes, for which a node of a finished run would wait, have ended.
    skip_finished = options.node is not None and not options.run.from_scratch
    machine = Machine(cluster, ranks, nodes, profile)
    try:
        ready = prepare_start(recipe, paths, options, machine, log, skip_finished=skip_finished)
    except Finished as finished:
        log(str(finished))
        return int(ExitCode.DONE)
    if options.run.max_restarts:
        return start_with_restarts(ready, options.run.max_restarts, log)
    return start(ready, options.node, separate_process=options.separate_process)


def start_with_restarts(ready: PreparedStart, max_restarts: int, log: Log) -> int:
    """Start the ranks, and after a fault restart all of them from the newest checkpoint.

    Raises:
        UserError: three restarts in a row found the same checkpoint, with `ExitCode.STOP`.
    """
    spec, job = ready.spec, f"process {os.getpid()}"
    require_progress(spec.run, job, 0, spec.run.newest_step(), max_restarts)
    with ExitStack() as stack:
        spares = stack.enter_context(Spares()) if spec.warm_spares else None
        for restart in range(max_restarts + 1):
            if spares is not None:
                spares.last = restart == max_restarts
            update = {"restart": restart, "from_scratch": spec.from_scratch and restart == 0}
            code = start(replace(ready, spec=spec.model_copy(update=update)), separate_process=True, spares=spares)
            if code in tuple(ExitCode) or restart == max_restarts:
                return code
            step = spec.run.newest_step()
            require_progress(spec.run, job, restart + 1, step, max_restarts)
            log(f"the ranks ended with {code}; restart {restart + 1} of {max_restarts}, from step {step}")
    raise AssertionError("the last restart returns")


def start(
    ready: PreparedStart, node: Node | None = None, *, separate_process: bool = False, spares: Spares | None = None
) -> int:
    """Run all ranks of this machine until they exit; returns the exit code.

    Args:
        ready: of all nodes together.
        node: which of several this is.
        separate_process: start a process even for a single rank, which could crash this one.
        spares: of a start that may be followed by others.
    """
    spec, variables, ranks = ready.spec, ready.variables, ready.plan.layout.world_size
    # The user's value takes precedence, and may be more or less than an even share.
    threads = int(
        os.environ.get("OMP_NUM_THREADS")
        or variables.get("OMP_NUM_THREADS")
        or share(ready.machine.cluster.cpu_cores, ranks, on_gpus=spec.on_gpus)
    )
    if ranks == 1 and node is None and not separate_process:
        # The variable has no effect once torch is loaded, which data preparation may have done.
        import torch

        from llmrecipes.train.rank import guarded
        from llmrecipes.train.worker import run

        torch.set_num_threads(threads)
        os.environ.update(missing(variables, os.environ))  # read when CUDA and NCCL are first used
        return guarded(run, spec)
    path = spec.run.spec(None if node is None else node.number)
    path.write_text(spec.model_dump_json(indent=2) + "\n", "utf-8")

    def newest() -> Path | None:
        entry = spec.run.newest()
        return None if entry is None else entry.path

    return run_ranks(
        "llmrecipes.train.worker",
        [str(path)],
        world_size=ranks,
        threads=threads,
        logs=spec.run.logs,
        node=node,
        grace=Grace(spec.recipe.train.exit_grace_seconds, newest),
        environment=variables,
        spares=spares,
    )


def _require_consistent(options: TrainOptions) -> None:
    if options.node is not None and options.run_id is None:
        raise UserError(
            "missing for several nodes", where="--run-id", rule="all nodes work in one directory",
            fix="--run-id my-run-1",
        )  # fmt: skip
    if options.node is not None and options.run.max_restarts:
        raise UserError(
            f"{options.run.max_restarts} on several nodes", where="--max-restarts",
            rule="--max-restarts works on a single node only", fix="Slurm or Kubernetes, which restart all",
        )  # fmt: skip
    if options.run.from_scratch and options.run_id is None:
        raise UserError("needs --run-id", where="--from-scratch", rule="a run without an id is a new one",
                        fix="leave it out")  # fmt: skip


def _require_even_nodes(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise UserError(
            f"{ranks} ranks on {nodes} nodes",
            where="--nproc",
            rule="--nproc counts the ranks of all nodes, and every node has as many",
            fix=f"--nproc {multiples(ranks, nodes)}",
        )


def _profile_of(name: str, recipe: Recipe, ranks: int, local: Cluster, nodes: int) -> Profile:
    """A cluster profile, after checking the run against its nodes.

    Raises:
        UserError: no such profile, this machine does not match it, or the run does not fit.
    """
    from llmrecipes.hardware.load import load_profile
    from llmrecipes.hardware.machine import machine

    profile = load_profile(name)
    site = machine(profile, nodes)
    if site.device != local.device:
        raise UserError(
            f"cluster profile {name} has {profile.gpus_per_node} GPUs a node, this machine has {len(local.gpus)}",
            where="--cluster",
            rule="a run is planned for the kind of machine it runs on",
            fix="without --cluster the run is planned for this machine; to plan only: "
            + command_line("show", recipe.name, options={"cluster": name}),
        )
    plan_run(recipe, site, ranks)
    return profile


STEPS = 200


def one_batch_recipe(recipe: Recipe) -> Recipe:
    """The recipe with a constant learning rate, no weight decay to work against it, and at most `STEPS` steps.

    It has a different name, which keeps its runs separate.
    """
    iters = min(recipe.train.train_iters, STEPS)
    return recipe.model_copy(
        update={
            "name": f"{recipe.name}{ONE_BATCH}",
            "train": recipe.train.model_copy(update={"train_iters": iters, "eval_interval": iters}),
            "optimizer": recipe.optimizer.model_copy(update={"weight_decay": 0.0}),
            "scheduler": recipe.scheduler.model_copy(
                update={"lr_decay_style": "constant", "lr_warmup_iters": min(10, iters - 1), "lr_decay_iters": None}
            ),
            "checkpoint": recipe.checkpoint.model_copy(update={"save_interval": iters}),
        }
    )
