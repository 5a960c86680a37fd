"""The check before a run: reject a plan that does not fit, and suggest one that would."""

from __future__ import annotations

from dataclasses import replace

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, Gpu
from llmrecipes.plan.derive import Plan, num_microbatches
from llmrecipes.plan.layout import layout
from llmrecipes.plan.memory import estimate
from llmrecipes.recipe.degrees import smallest_world
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.shape import Shape
from llmrecipes.units import GIB
from llmrecipes.units import gib as gib

# Basis of a recommendation if the machine has no GPU.
_COMMON_GPU = Gpu("H100 80GB", 79 * GIB, 79 * GIB, 989.4)
_MAX_GPUS = 16384


def check(plan: Plan, cluster: Cluster) -> None:
    """Pass silently if the plan fits.

    Raises:
        UserError: it does not fit; with the needed memory part by part, the available memory, and a fix.
    """
    if plan.fits:
        return
    _check_host(plan, cluster)
    name, ranks = plan.recipe.name, plan.layout.world_size
    parts = {name: size for name, size in plan.memory.as_dict().items() if size and name != "total"}
    needed = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in parts.items())
    place = f"on {cluster.name}" if cluster.name else "here"
    here = place if ranks == 1 else f"for each of {ranks} ranks {place}"
    raise UserError(
        f"does not fit: a rank needs {gib(plan.memory.total)} ({needed}), "
        f"and there are {gib(plan.memory_capacity_bytes)} {here} ({_machine(cluster)})",
        where=f"recipe {name}",
        fix=f"make smoke RECIPE={name} rehearses a small version of it here; "
        f"{recommend(plan.recipe, plan.shape, cluster)}",
    )


def _check_host(plan: Plan, cluster: Cluster) -> None:
    if plan.fits_host:
        return
    place = f"on {cluster.name}" if cluster.name else "here"
    raise UserError(
        f"does not fit: a node offloads {gib(plan.host_memory_bytes)} to main memory, and there are "
        f"{gib(plan.host_capacity_bytes)} {place}",
        where=f"recipe {plan.recipe.name}",
        rule="main memory holds what the ranks of a node offload with zero.offload_optimizer and zero.offload_param",
        fix="more nodes, which take a smaller share each; zero.offload_optimizer nvme with zero.stage 3; or none",
    )


def recommend(recipe: Recipe, s: Shape, cluster: Cluster) -> str:
    """The smallest number of GPUs (of this machine's kind, else with 80 GB) that the recipe fits, as text."""
    gpu = cluster.gpus[0] if cluster.gpus else _COMMON_GPU
    smallest = None
    number = smallest_world(recipe.parallelism)
    while number <= _MAX_GPUS or smallest is None:
        try:
            laid_out = layout(recipe, number, replace(cluster, gpus=(gpu,) * number, nodes=1))
            needed = estimate(recipe, s, laid_out, num_microbatches(recipe, laid_out), "cuda").total
        except UserError:  # the batch does not divide over more ranks
            break
        smallest = min(needed, smallest or needed)
        if needed <= gpu.memory_bytes:
            return f"it runs on {number} × {gpu.name} ({gib(needed)} each)"
        number *= 2
    if smallest is None:
        return f"its layout takes a multiple of {number} ranks, over which its batch does not divide"
    return f"no number of {gpu.name} is enough: a rank needs at least {gib(smallest)}"


def _machine(cluster: Cluster) -> str:
    if not cluster.gpus:
        return f"no GPU, {cluster.cpu_cores:g} CPU cores, {gib(cluster.memory_available_bytes)} of available memory"
    return f"{len(cluster.gpus)} × {cluster.gpus[0].name}"
