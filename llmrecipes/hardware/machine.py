"""Converts a profile to the machine that the planner plans for."""

from __future__ import annotations

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, DetectedGpu, detect
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.profile import Profile
from llmrecipes.units import GIB


def machine(profile: Profile, nodes: int) -> Cluster:
    """Some nodes of a site, all of them free.

    Args:
        nodes: how many of its nodes, at least 1.

    Its free disk space is unknown and set to 0.
    """
    gpus: tuple[DetectedGpu, ...] = ()
    if profile.gpu is not None:
        size = int(profile.gpu.memory_gib * GIB)
        gpus = (DetectedGpu(profile.gpu.name, size, size, profile.gpu.peak_tflops),) * profile.gpus_per_node
    memory = int(profile.memory_gib * GIB)
    node = Cluster(
        gpus=gpus,
        cpu_cores=profile.cpu_cores,
        memory_bytes=memory,
        memory_available_bytes=memory,
        disk_free_bytes=0,
        name=profile.name,
        nvlink_domain=profile.nvlink_domain,
    )
    return node.times(nodes)


def planned(cluster: str | None, nodes: int | None, ranks: int) -> Cluster:
    """The machine that a command plans for.

    Args:
        cluster: name or path of a profile; None: this machine.
        nodes: its nodes; None: the fewest that fit the ranks.
        ranks: minimum number of ranks.

    Raises:
        UserError: no such profile, an invalid one, or nodes without a profile.
    """
    if cluster is None:
        if nodes is not None:
            raise UserError(
                "set without --cluster",
                where="--nodes",
                rule="a plan for several nodes needs a cluster profile",
                fix="--cluster NAME; llmrecipes clusters lists them",
            )
        return detect()
    profile = load_profile(cluster)
    if nodes is None:
        nodes = -(-ranks // profile.gpus_per_node) if profile.gpus_per_node else 1
    if nodes < 1:
        raise UserError(f"{nodes}", where="--nodes", rule="a run needs at least one node", fix="--nodes 1")
    return machine(profile, nodes)
