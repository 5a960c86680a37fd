"""`llmrecipes train`: a run on this machine, or its part of one on several."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
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
from llmrecipes.launch.gathering import gathered
from llmrecipes.launch.local import Grace, Spares, run_ranks
from llmrecipes.launch.ranks import Node
from llmrecipes.launch.rendezvous import TOKEN, token_of
from llmrecipes.plan.derive import default_world_size
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.derived.degrees import elastic_nodes, elastic_worlds, multiples
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.restarts import newest_step, require_progress
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
    if options.node is not None and options.min_nodes is not None:
        return _train_with_those_here(recipe, paths, options, options.node, log)
    return _train(recipe, paths, options, log)


MOST_PORT = 65535


def _train_with_those_here(recipe: Recipe, paths: Paths, options: TrainOptions, node: Node, log: Log) -> int:
    """Train on the nodes that have come, of those that may come."""
    ranks = options.nproc or max(node.nodes, default_world_size(recipe, detect().times(node.nodes)))
    _require_even_nodes(ranks, node.nodes)
    per_node = ranks // node.nodes
    least = options.min_nodes or 1
    allowed = elastic_nodes(recipe, node.nodes, per_node)
    counts = tuple(count for count in allowed if count >= least)
    if recipe.train.elastic is None or not counts:
        numbers = ", ".join(map(str, allowed)) or "no number"
        raise UserError(
            f"{least} of {node.nodes} nodes",
            where="--min-nodes",
            rule="a start with fewer nodes needs train.elastic"
            if recipe.train.elastic is None
            else f"with {per_node} ranks a node, train.elastic allows {numbers} of at most {node.nodes} nodes",
            fix="leave --min-nodes out, or set train.elastic",
        )
    if node.master_port == MOST_PORT:
        raise UserError(
            f"port {MOST_PORT}",
            where="--rdzv",
            rule="with --min-nodes the port above it is used too",
            fix="use a lower port",
        )
    token = token_of(os.environ)
    os.environ.pop(TOKEN)  # the ranks do not need it

    def grow() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # all ranks save at the same step, and the pods start again

    with gathered(node, counts, token, join_seconds=options.join_seconds, grow=grow, log=log) as here:
        if here.node is not None:
            chosen = replace(options, node=here.node, nproc=per_node * here.node.nodes, min_nodes=None)
            try:
                here.code = _train(recipe, paths, chosen, log)
            except UserError as error:
                here.code = int(error.code)
                raise
        return here.code


def _train(recipe: Recipe, paths: Paths, options: TrainOptions, log: Log) -> int:
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
        return start_with_restarts(ready, options.run.max_restarts, log, recipe)
    return start(ready, options.node, separate_process=options.separate_process)


def start_with_restarts(ready: PreparedStart, max_restarts: int, log: Log, recipe: Recipe) -> int:
    """Start the ranks, and after a fault restart all of them from the newest checkpoint.

    With `train.elastic` on as many as there are GPUs for, and on fewer after two ends in a row without a checkpoint.

    Args:
        recipe: as it was loaded; that of `ready` is resolved for its number of ranks.

    Raises:
        UserError: three restarts in a row found the same checkpoint, with `ExitCode.STOP`.
    """
    spec = ready.spec
    job = f"process {os.getpid()}"
    ranks = ready.plan.world_size
    require_progress(spec.run, job, 0, newest_step(spec.run, spec.recipe, ranks), max_restarts)
    ends: list[tuple[int, int]] = []  # ranks, and the newest step then
    with ExitStack() as stack:
        spares = stack.enter_context(Spares()) if spec.warm_spares else None
        for restart in range(max_restarts + 1):
            if spares is not None:
                spares.last = restart == max_restarts
            update = {
                "restart": restart,
                "from_scratch": spec.from_scratch and restart == 0,
                "from_best": spec.from_best and restart == 0,
            }
            started = replace(ready, spec=ready.spec.model_copy(update=update))
            code = start(started, separate_process=True, spares=spares)
            if code in tuple(ExitCode) or restart == max_restarts:
                return code
            step = newest_step(spec.run, spec.recipe, ranks)
            require_progress(spec.run, job, restart + 1, step, max_restarts)
            ends.append((ranks, step))
            resized, machine = "", ready.machine
            if recipe.train.elastic is not None:
                cluster = replace(detect(), nvlink_domain=machine.cluster.nvlink_domain)
                plan = plan_run(recipe, cluster, elastic_size(recipe, len(cluster.gpus) or None, ends), machine.profile)
                spec = spec.model_copy(update={"recipe": plan.recipe})
                ready = PreparedStart.of(spec, plan, replace(machine, cluster=cluster))
                ranks = plan.world_size
                resized = f" on {ranks} ranks"
                step = newest_step(spec.run, spec.recipe, ranks)
            log(
                f"the ranks exited with code {code}; restart {restart + 1} of {max_restarts}{resized}, from step {step}"
            )
    raise AssertionError("the last restart returns")


def elastic_size(recipe: Recipe, gpus: int | None, ends: Sequence[tuple[int, int]]) -> int:
    """Number of ranks of the next start: never more than before, because nothing says that what failed is back.

    Args:
        recipe: with `train.elastic`.
        gpus: that this machine has now; None: the ranks are on CPUs.
        ends: ends of the starts so far: ranks, and the step of the newest checkpoint after it.
    """
    ranks = ends[-1][0]
    worlds = elastic_worlds(recipe)
    without_progress = len(ends) > 1 and ends[-1] == ends[-2]
    most = min(ranks - without_progress, ranks if gpus is None else gpus)
    return max((allowed for allowed in worlds if allowed <= most), default=worlds[0])


def start(
    ready: PreparedStart, node: Node | None = None, *, separate_process: bool = False, spares: Spares | None = None
) -> int:
    """Run all ranks of this machine until they exit; returns the exit code.

    Args:
        ready: prepared start of all nodes together.
        node: which of several this is.
        separate_process: start a process even for a single rank, which could crash this one.
        spares: spare nodes of a start that may be followed by others.
    """
    spec = ready.spec
    variables = ready.variables
    ranks = ready.plan.world_size
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
            "required with several nodes",
            where="--run-id",
            rule="all nodes must use the same run directory",
            fix="--run-id my-run-1",
        )
    if options.min_nodes is not None and options.node is None:
        raise UserError(
            "needs --nnodes",
            where="--min-nodes",
            rule="--min-nodes is for several nodes",
            fix="add --nnodes N, or leave it out",
        )
    if options.node is not None and options.run.max_restarts:
        raise UserError(
            f"{options.run.max_restarts} on several nodes",
            where="--max-restarts",
            rule="--max-restarts works on a single node only",
            fix="use Slurm or Kubernetes, which restart all nodes",
        )
    backwards = {"--from-scratch": options.run.from_scratch, "--from-best": options.run.from_best}
    chosen = [name for name, is_chosen in backwards.items() if is_chosen]
    if chosen and options.run_id is None:
        raise UserError(
            "needs --run-id",
            where=chosen[0],
            rule="a run without --run-id is a new one",
            fix="add --run-id RUN, or leave it out",
        )
    if len(chosen) > 1:
        raise UserError(
            f"cannot be combined with {chosen[0]}",
            where=chosen[1],
            rule="a run can go back to one step only",
            fix="use one of them",
        )


def _require_even_nodes(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise UserError(
            f"{ranks} ranks on {nodes} nodes",
            where="--nproc",
            rule="--nproc counts the ranks of all nodes, and all nodes have the same number",
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
            + command_line("plan", recipe.name, options={"cluster": name}),
        )
    plan_run(recipe, site, ranks, profile)
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
            "stages": (),
            "train": without_ramp(recipe.train.without_stops(), train_iters=iters, eval_interval=iters),
            "optimizer": recipe.optimizer.model_copy(update={"weight_decay": 0.0}),
            "scheduler": recipe.scheduler.model_copy(
                update={"lr_decay_style": "constant", "lr_warmup_iters": min(10, iters - 1), "lr_decay_iters": None}
            ),
            "checkpoint": recipe.checkpoint.of_short_run(iters),
        }
    )
