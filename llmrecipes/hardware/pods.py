"""Kubernetes' part of a cluster profile: what pods ask for, and how they differ from processes on the node."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.hardware.words import Variable, Word
from llmrecipes.recipe.section import JsonObject, NonNegInt, Section

Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
QualifiedName = Annotated[
    str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
]
Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti)$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")]
Folder = Annotated[str, Field(pattern=r"^/[^:\n]*$")]


PAGES = {"2Mi": 2, "32Mi": 32, "1Gi": 1024}
"""Sizes of huge pages, in MiB."""
UNITS = {"Ki": 1 / 1024, "Mi": 1, "Gi": 1024, "Ti": 1024**2}


def mebibytes(amount: Quantity) -> float:
    """An amount of memory in MiB."""
    return int(amount[:-2]) * UNITS[amount[-2:]]


class Toleration(Section):
    """A taint of the nodes that pods tolerate, besides the one named like `gpu_resource`."""

    key: Word | None = None
    """Its key; unset: all taints."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the value matters."""
    value: str | None = None
    """Its value, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Its effect; unset: all."""


class Volume(Section):
    """A volume of the pod, from one of `host_path`, `claim` and `empty_dir`."""

    name: Label
    """Its name in the pod."""
    mount_path: Folder | None = None
    """Folder in the containers of the run; unset: only sidecars mount it."""
    host_path: Folder | None = None
    """Folder of the node; needs a namespace that allows `privileged` pods."""
    claim: ObjectName | None = None
    """PersistentVolumeClaim in the namespace."""
    empty_dir: Quantity | None = None
    """Size limit of an empty folder on the node's disk."""
    read_only: bool = False
    """Whether the run only reads it."""


class ResourceClaim(Section):
    """A claim of dynamic resource allocation (DRA), from one of `template` and `claim`."""

    name: Label
    """Its name in the pod."""
    template: ObjectName | None = None
    """ResourceClaimTemplate: each pod gets a claim of its own."""
    claim: ObjectName | None = None
    """ResourceClaim that all pods share."""


class Kubernetes(Section):
    """What pods of this site ask for."""

    gpu_resource: Word = "nvidia.com/gpu"
    """Resource that counts GPUs."""
    rdma_resource: Word | None = None
    """Resource of network adapters; unset: none is asked for."""
    rdma_count: NonNegInt = 0
    """Number of them for a pod with a full node."""
    hugepages: dict[Literal["2Mi", "32Mi", "1Gi"], Quantity] = Field(default_factory=dict)
    """Memory in huge pages of a size, for a pod with a full node; a multiple of the size."""
    compute_domain: bool = False
    """Whether pods get a channel of IMEX, which NVLink between nodes needs, from NVIDIA's DRA driver."""
    resource_claims: Annotated[tuple[ResourceClaim, ...], Field(strict=False)] = ()
    """Further claims of dynamic resource allocation."""
    node_selector: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    """Labels of the nodes."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = ()
    """Further taints of the nodes."""
    priority_class: ObjectName | None = None
    """PriorityClass of the pods."""
    environment: dict[Variable, str | int | None] = Field(default_factory=dict)
    """Variables of pods, over the profile's `environment`; null removes one."""
    annotations: dict[QualifiedName, str] = Field(default_factory=dict)
    """Annotations of pods, such as the networks of Multus or GKE."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = ()
    """Further volumes."""
    sidecars: Annotated[tuple[JsonObject, ...], Field(strict=False)] = ()
    """Containers as in a pod, which start after the check of the node and stop after the training."""
    patch: JsonObject = Field(default_factory=dict)
    """Strategic merge patch of the pod template (`metadata`, `spec`), applied by kubectl."""
