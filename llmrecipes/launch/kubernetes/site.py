"""A site as its pods see it: their network interfaces, their share of a node, and what else the profile gives them."""

from __future__ import annotations

import re
from typing import Any

from llmrecipes.hardware.load import CHANNEL
from llmrecipes.hardware.profile import PAGES, Kubernetes, Profile, ResourceClaim, Slurm, Volume, mebibytes

INTERFACE = re.compile(r"_(IFNAME|CTRL_DEV)$")
"""Ends of the variables that name network interfaces, of NCCL, gloo, TensorPipe and Google's plugins."""


def variables(profile: Profile, host_network: bool) -> dict[str, str | int]:
    """The site's environment in pods.

    A node's interfaces (`ens32`) do not exist in a pod with a network of its own (`eth0`), and vice versa.
    """
    both = {
        **{name: value for name, value in profile.environment.items() if host_network or not _interface(name, value)},
        **{
            name: value
            for name, value in profile.kubernetes.environment.items()
            if not host_network or not _interface(name, value)
        },
    }
    return {name: value for name, value in both.items() if value is not None}


def left_out(profile: Profile, host_network: bool) -> tuple[str, ...]:
    """Variables with interfaces of the nodes, for which the profile names none of pods."""
    environment = profile.kubernetes.environment
    return tuple(
        name
        for name, value in profile.environment.items()
        if not host_network and name not in environment and _interface(name, value)
    )


def as_seen(profile: Profile, ranks_per_node: int, host_network: bool) -> Profile:
    """The profile of a pod: only the GPUs and adapters that it asks for, and its own environment.

    Args:
        profile: the site.
        ranks_per_node: ranks of the pod, one for each GPU.
        host_network: whether it shares the node's network.
    """
    share = min(1.0, ranks_per_node / profile.ranks_per_node)
    adapters, domain = profile.adapters, profile.nvlink_domain
    gpus = min(ranks_per_node, profile.gpus_per_node)
    if adapters is not None:
        named = share == 1 and "NCCL_IB_HCA" not in profile.kubernetes.environment
        names = adapters.names if named else ()
        adapters = adapters.model_copy(update={"ports": max(1, int(adapters.ports * share)), "names": names})
    changed = {
        "gpus_per_node": gpus,
        "nvlink_domain": None if domain and gpus and domain % gpus else domain,
        "adapters": adapters,
        "environment": variables(profile, host_network),
        "slurm": Slurm(),
        "kubernetes": Kubernetes(),
        "measured": (),
    }
    return profile.model_copy(update=changed)


def hugepages(kubernetes: Kubernetes, share: float) -> dict[str, str]:
    """Resources with a share of the node's huge pages, whole pages of each size."""
    pages = {}
    for page, amount in kubernetes.hugepages.items():
        size = PAGES[page]
        pages[f"hugepages-{page}"] = f"{max(size, int(mebibytes(amount) * share) // size * size)}Mi"
    return pages


def claims(kubernetes: Kubernetes, channel: str | None) -> list[dict[str, Any]]:
    """The pod's resource claims.

    Args:
        kubernetes: the site's pods.
        channel: ResourceClaimTemplate of the run's IMEX channel; None without one.
    """
    channel_claim = () if channel is None else (ResourceClaim(name=CHANNEL, template=channel),)
    entries = []
    for resource_claim in (*channel_claim, *kubernetes.resource_claims):
        source = (
            {"resourceClaimTemplateName": resource_claim.template}
            if resource_claim.template
            else {"resourceClaimName": resource_claim.claim}
        )
        entries.append({"name": resource_claim.name, **source})
    return entries


def tolerations(profile: Profile) -> list[dict[str, Any]]:
    """Taints of GPU nodes, and those of the profile."""
    of_gpus = [{"key": profile.kubernetes.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    more = []
    for toleration in profile.kubernetes.tolerations:
        fields = {
            "key": toleration.key,
            "operator": toleration.operator,
            "value": toleration.value,
            "effect": toleration.effect,
        }
        more.append({name: value for name, value in fields.items() if value is not None})
    return [*(of_gpus if profile.gpus_per_node else []), *more]


def volumes(kubernetes: Kubernetes) -> list[dict[str, Any]]:
    """The profile's volumes."""
    return [{"name": volume.name, **_source(volume)} for volume in kubernetes.volumes]


def mounts(kubernetes: Kubernetes) -> list[dict[str, Any]]:
    """Those that the containers of the run mount."""
    return [
        {"name": volume.name, "mountPath": volume.mount_path, **({"readOnly": True} if volume.read_only else {})}
        for volume in kubernetes.volumes
        if volume.mount_path is not None
    ]


def sidecars(kubernetes: Kubernetes) -> list[dict[str, Any]]:
    """Init containers that keep running beside the training, and end after it (Kubernetes 1.29)."""
    return [{**sidecar, "restartPolicy": "Always"} for sidecar in kubernetes.sidecars]


def _source(volume: Volume) -> dict[str, Any]:
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    return {"emptyDir": {"sizeLimit": volume.empty_dir}}


def _interface(name: str, value: str | int | None) -> bool:
    """Whether a variable names interfaces; those that it only excludes (`^docker`) need not exist."""
    return value is not None and INTERFACE.search(name) is not None and not str(value).startswith("^")
