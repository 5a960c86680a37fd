"""`llmrecipes show`: a recipe planned for this machine or for a cluster."""

from __future__ import annotations

from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import planned
from llmrecipes.plan.communication import Communication, communication
from llmrecipes.plan.derive import Plan, default_world_size, derive
from llmrecipes.recipe.degrees import smallest_world
from llmrecipes.recipe.schema import Recipe


def plan_on(recipe: Recipe, *, nproc: int | None, cluster: str | None, nodes: int | None) -> tuple[Plan, Cluster]:
    """The plan of a recipe, and the machine it is made for.

    Args:
        recipe: the resolved recipe.
        nproc: ranks; None: all GPUs of the machine, else the fewest that the layout needs.
        cluster: name or path of a cluster profile; None: this machine.
        nodes: nodes of the cluster; None: the fewest that fit the ranks.

    Raises:
        UserError: no such profile, or a layout that does not divide the ranks. A plan that does not fit is no error.
    """
    machine = planned(cluster, nodes, nproc or smallest_world(recipe.parallelism))
    ranks = default_world_size(recipe, machine) if nproc is None else nproc
    return derive(recipe, ranks, machine), machine


def communication_on(plan: Plan, machine: Cluster, cluster: str | None) -> Communication | None:
    """Time of a step's collectives; None without a profile, which has the links and what was measured.

    Args:
        plan, machine: of `plan_on`.
        cluster: name or path of the profile.
    """
    if cluster is None:
        return None
    per_node = -(-(len(machine.gpus) or plan.layout.world_size) // machine.nodes)
    return communication(plan, load_profile(cluster), per_node)
