"""Whether a plan fits the machine: the check before a run, and the layout with which a new recipe fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import LEAST_HEADROOM, Plan, most_recomputation, num_microbatches, with_chunks
from llmrecipes.plan.layout import layout
from llmrecipes.plan.memory import estimate
from llmrecipes.plan.run_plan import RunPlan, derive_run
from llmrecipes.plan.speed import ladder
from llmrecipes.plan.speed.device import device
from llmrecipes.plan.speed.search import MOST_MICRO_BATCH, nearest, powers
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.derived.degrees import elastic_worlds, model_parallel_size, replica_ranks, smallest_world
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.rules import recipe_rules
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.recompute import ALL_LAYERS, recomputation
from llmrecipes.units import GIB
from llmrecipes.units import gib as gib

# Basis of a recommendation if the machine has no GPU.
_COMMON_GPU = DetectedGpu("H100 80GB", 79 * GIB, 79 * GIB, 989.4)
_MAX_GPUS = 16384
_MOST_ADVICE = 3


def check_run(plan: RunPlan, cluster: Cluster, advise: bool = True) -> None:
    """`check` of each stage, in order."""
    for stage in plan.stages:
        check(stage, cluster, advise)


def check(plan: Plan, cluster: Cluster, advise: bool = True) -> None:
    """Pass silently if the plan fits.

    Args:
        cluster: that it runs on.
        advise: whether to search for layouts that fit, which takes seconds at thousands of GPUs.

    Raises:
        UserError: it does not fit; with the needed memory part by part, the available memory, and a fix.
    """
    if plan.fits:
        return
    if plan.memory.total <= plan.memory_capacity_bytes:
        _refuse_host(plan, cluster)
    name = plan.recipe.name
    ranks = plan.layout.world_size
    parts = {name: size for name, size in plan.memory.as_dict().items() if size and name != "total"}
    needed = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in parts.items())
    place = f"on {cluster.name}" if cluster.name else "on this machine"
    where = place if ranks == 1 else f"for each of {ranks} ranks {place}"
    stage = "" if plan.span is None else f"in stage {plan.span.name}: "
    raise UserError(
        f"{stage}does not fit: a rank needs {gib(plan.memory.total)} ({needed}), "
        f"{gib(plan.memory_capacity_bytes)} available {where} ({_machine(cluster)})",
        where=f"recipe {name}",
        fix=f"make smoke RECIPE={name} rehearses a small version on this machine; "
        f"{_advice(plan, cluster) if advise else recommend(plan.recipe, plan.shape, cluster)}{_ladder(plan)}",
    )


def require_elastic_world(recipe: Recipe, ranks: int) -> None:
    """Refuse a number of ranks that a recipe's `train.elastic` does not allow.

    Raises:
        UserError: with the nearest that it does.
    """
    least, most = recipe.train.elastic or (0, 0)
    worlds = elastic_worlds(recipe)
    if ranks in worlds:
        return
    near = [*[n for n in worlds if n < ranks][-1:], *[n for n in worlds if n > ranks][:1]]
    dense = replica_ranks(recipe)
    raise UserError(
        f"{ranks} ranks, with [{least}, {most}] replicas of {dense} rank{'s' * (dense > 1)}",
        where="train.elastic",
        rule="the number of replicas must be in the range and divide the global batch",
        fix=f"{' or '.join(map(str, near))} ranks",
    )


def check_fewer(recipe: Recipe, ranks: int, cluster: Cluster) -> None:
    """Check the smaller numbers of ranks with which `train.elastic` lets a run go on; the nearest first.

    Args:
        ranks: of the start, which is known to fit.
        cluster: that it runs on.

    Raises:
        UserError: the recipe does not fit one of them.
    """
    _, most = recipe.train.elastic or (0, 0)
    fitting = ranks
    for fewer in reversed([n for n in elastic_worlds(recipe) if n < ranks]):
        try:
            check_run(derive_run(recipe, fewer, cluster), cluster, advise=False)
        except UserError as error:
            least = -(-fitting // replica_ranks(recipe))
            raise UserError(
                f"allows {fewer} rank{'s' * (fewer > 1)}: {error.what}",
                where="train.elastic",
                rule="the run must fit every number of ranks that train.elastic allows",
                fix=f"elastic [{least}, {most}]",
            ) from error
        fitting = fewer


def _ladder(plan: Plan) -> str:
    """Every single change with less memory, in order, for GPUs, or where one of them fits."""
    rungs = ladder.ladder(plan)
    if plan.device != "cuda" and not any(rung.fits for rung in rungs):
        return ""
    numbered = (f"\n    {number}. {line}" for number, line in enumerate(ladder.lines(plan, rungs), 1))
    rest = ladder.others(rungs)
    return f"\n    one change at a time:{''.join(numbered)}{f'{chr(10)}    no change: {rest}' if rest else ''}"


def _advice(plan: Plan, cluster: Cluster) -> str:
    """The fastest changes that fit on these GPUs; else the nodes that some layout fits; else `recommend`."""
    try:
        device(cluster.gpus[0].name if cluster.gpus else "")
    except UserError:  # layouts cannot be compared without the GPU's coefficients
        return recommend(plan.recipe, plan.shape, cluster)
    try:
        changes = nearest(plan, _MOST_ADVICE)
    except UserError as error:
        return f"{error.what}; {error.fix}"
    speeds = (f"{change} ({forecast.tokens_per_second_per_gpu:,.0f} tokens/s/GPU)" for change, forecast in changes)
    return f"on these GPUs it fits, fastest first, with {'; or '.join(speeds)}"


def _refuse_host(plan: Plan, cluster: Cluster) -> NoReturn:
    host = plan.host
    place = f"on {cluster.name}" if cluster.name else "on this machine"
    available = f"{gib(plan.host_capacity_bytes)} available {place}"
    fixes = ["more nodes, with a smaller share each"]
    if host.offloaded:
        fixes.append("layout.zero.offload_optimizer nvme with layout.zero.stage 3, or no offload")
    if plan.recipe.checkpoint.non_persistent_save_interval is not None:
        fixes.append("checkpoint.non_persistent_save_interval null: local checkpoints have a copy of their own")
    raise UserError(
        f"does not fit: a node keeps {gib(host.total)} in main memory, {available}",
        where=f"recipe {plan.recipe.name}",
        rule=f"main memory must hold the copies that saves are written from ({gib(host.staged)}), what ranks offload "
        f"(layout.zero.offload_optimizer, layout.zero.offload_param: {gib(host.offloaded)}), and their processes "
        f"({gib(host.processes)})",
        fix="; or ".join(fixes),
    )


def recommend(recipe: Recipe, s: Shape, cluster: Cluster) -> str:
    """The smallest number of GPUs (of this machine's kind, else with 80 GB) that the recipe fits, as text."""
    gpu = cluster.gpus[0] if cluster.gpus else _COMMON_GPU
    smallest = None
    recipe = most_recomputation(recipe)
    number = smallest_world(recipe.layout)
    while number <= _MAX_GPUS or smallest is None:
        try:
            laid_out = layout(recipe, number, replace(cluster, gpus=(gpu,) * number, nodes=1))
            tried = with_chunks(recipe, s, laid_out, gpu.memory_bytes)
            needed = estimate(tried, s, laid_out, num_microbatches(recipe, laid_out), "cuda").total
        except UserError:  # the batch does not divide over more ranks
            break
        smallest = min(needed, smallest or needed)
        if needed <= gpu.memory_bytes:
            return f"it runs on {number} × {gpu.name} ({gib(needed)} each)"
        number *= 2
    if smallest is None:
        return f"its layout needs a multiple of {number} ranks, over which its batch does not divide evenly"
    return f"it does not fit on any number of {gpu.name}: a rank needs at least {gib(smallest)}"


def _machine(cluster: Cluster) -> str:
    if not cluster.gpus:
        return f"no GPU, {cluster.cpu_cores:g} CPU cores, {gib(cluster.memory_available_bytes)} of available memory"
    return f"{len(cluster.gpus)} × {cluster.gpus[0].name}"


def fitted(recipe: Recipe, cluster: Cluster) -> tuple[Recipe, int]:
    """The first of these that fits with `LEAST_HEADROOM`, in the order of their cost to speed.

    Tensor parallelism, as far as NVLink reaches, then pipeline parallelism are increased only as needed; at each
    degree layers are recomputed only as needed, with the largest micro-batch that fits. The global batch is rounded to
    a multiple of the data-parallel size.

    Args:
        recipe: a dense one; its tensor and pipeline degrees, stages, recomputation and micro-batch are replaced.
        cluster: all GPUs are used; without one, one rank.

    Returns:
        The recipe, and its number of ranks. If nothing fits, the last recipe that was tried.

    Raises:
        UserError: no degrees divide the model.
    """
    ranks = len(cluster.gpus) or 1
    last = refused = None
    for candidate in _candidates(recipe, cluster, ranks):
        if problems := recipe_rules.check(candidate):
            refused = refused or UserError(problems[0].what, where=problems[0].key, rule=problems[0].rule)
            continue
        try:
            plan = derive_run(candidate, ranks, cluster).largest
        except UserError as error:
            refused = refused or error
            continue
        last = candidate
        if plan.memory_headroom >= LEAST_HEADROOM:  # no layout changes what a node keeps in main memory
            return candidate, ranks
    if last is None:
        raise refused or UserError(
            f"no layout of {ranks} ranks",
            where="layout",
            rule="the number of ranks must be a multiple of the recipe's other degrees",
        )
    return last, ranks


def _candidates(recipe: Recipe, cluster: Cluster, ranks: int) -> Iterator[Recipe]:
    domain = cluster.gpus_per_domain if cluster.gpus else 1
    for pipeline in powers(min(ranks, recipe.model.num_layers)):
        # Pipelines are for what tensor parallelism cannot hold, so they come with all of it.
        for tensor in powers(min(domain, ranks)) if pipeline == 1 else [powers(min(domain, ranks))[-1]]:
            # Where the layers do not divide over the stages, they may with embedding and output layer.
            whole = bool(recipe.model.num_layers % pipeline)
            degrees = {
                "account_for_embedding_in_pipeline_split": whole,
                "account_for_loss_in_pipeline_split": whole,
                "pipeline_model_parallel_layout": None,
                "tensor_model_parallel_size": tensor,
                "pipeline_model_parallel_size": pipeline,
                "virtual_pipeline_model_parallel_size": None,
                "sequence_parallel": tensor > 1,
            }
            divided = recipe.with_layout(**degrees)
            size = model_parallel_size(divided.layout)
            if ranks % size:
                continue
            replicas = ranks // size
            each = max(1, round(recipe.train.global_batch_size / replicas))
            for recomputed in (recomputation(), ALL_LAYERS):
                for micro in reversed(powers(min(each, MOST_MICRO_BATCH))):
                    if each % micro == 0:
                        train = without_ramp(recipe.train, global_batch_size=each * replicas)
                        laid_out = divided.with_layout(micro_batch_size=micro, **recomputed)
                        yield laid_out.model_copy(update={"train": train})
