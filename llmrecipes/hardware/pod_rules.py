"""Problems between keys of a profile's section `kubernetes`, found before Kubernetes would reject a run's objects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from llmrecipes.hardware.pods import PAGES, Kubernetes, mebibytes
from llmrecipes.recipe.document import Problem

CONTAINERS = frozenset({"node", "doctor"})
VOLUMES = frozenset({"recipe", "workspace", "shm", "tmp"})
MOUNTS = frozenset({"/etc/llmrecipes", "/workspace", "/dev/shm", "/tmp"})  # noqa: S108 - in a pod
CHANNEL = "imex-channel"
"""Names that a rendered pod already has, and the claim for a channel of IMEX."""
PATCHED = ("metadata", "spec")
RESERVED = "llmrecipes/"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Of a container."""


def check(kubernetes: Kubernetes) -> Iterator[Problem]:
    """All of them."""
    if bool(kubernetes.rdma_resource) != bool(kubernetes.rdma_count):
        what = f"{kubernetes.rdma_count} of {kubernetes.rdma_resource or 'no resource'}"
        yield Problem("kubernetes.rdma_count", what, "rdma_resource and rdma_count come together")
    for page, amount in kubernetes.hugepages.items():
        if mebibytes(amount) % PAGES[page]:
            yield Problem(f"kubernetes.hugepages.{page}", amount, f"a multiple of {page}")
    for key in kubernetes.annotations:
        if key.startswith(RESERVED):
            yield Problem(f"kubernetes.annotations.{key}", "is set by submit", f"no annotation begins with {RESERVED}")
    for number, toleration in enumerate(kubernetes.tolerations):
        if (toleration.operator == "Equal") != (toleration.value is not None):
            rule = "a value belongs to the operator Equal"
            yield Problem(f"kubernetes.tolerations.{number}.value", f"with {toleration.operator}", rule)
        elif toleration.key is None and toleration.operator == "Equal":
            yield Problem(f"kubernetes.tolerations.{number}.key", "missing", "Equal compares the value of a key")
    for number, volume in enumerate(kubernetes.volumes):
        sources = [name for name in ("host_path", "claim", "empty_dir") if getattr(volume, name) is not None]
        yield from _one_of(f"kubernetes.volumes.{number}", sources, "host_path, claim and empty_dir")
    for number, claim in enumerate(kubernetes.resource_claims):
        sources = [name for name in ("template", "claim") if getattr(claim, name) is not None]
        yield from _one_of(f"kubernetes.resource_claims.{number}", sources, "template and claim")
    yield from _unique("kubernetes.volumes", "name", (volume.name for volume in kubernetes.volumes), VOLUMES)
    paths = (volume.mount_path for volume in kubernetes.volumes if volume.mount_path is not None)
    yield from _unique("kubernetes.volumes", "mount_path", paths, MOUNTS)
    claims = (claim.name for claim in kubernetes.resource_claims)
    taken = frozenset({CHANNEL}) if kubernetes.compute_domain else frozenset[str]()
    yield from _unique("kubernetes.resource_claims", "name", claims, taken)
    for number, sidecar in enumerate(kubernetes.sidecars):
        for key in ("name", "image"):
            if not isinstance(sidecar.get(key), str):
                rule = "a sidecar is a container as in a pod, with name and image"
                what = "missing" if key not in sidecar else "no text"
                yield Problem(f"kubernetes.sidecars.{number}.{key}", what, rule)
        if isinstance(name := sidecar.get("name"), str) and not NAME.fullmatch(name):
            rule = "at most 63 lowercase letters, digits and dashes"
            yield Problem(f"kubernetes.sidecars.{number}.name", repr(name), rule)
    yield from _unique(
        "kubernetes.sidecars", "name", (str(each.get("name")) for each in kubernetes.sidecars), CONTAINERS
    )
    for key in kubernetes.patch:
        if key not in PATCHED:
            rule = "the patch is one of a pod template, which has metadata and spec"
            yield Problem(f"kubernetes.patch.{key}", "no part of a pod template", rule)


def _one_of(key: str, sources: list[str], rule: str) -> Iterator[Problem]:
    if len(sources) != 1:
        yield Problem(key, " and ".join(sources) or "none of them", f"exactly one of {rule}")


def _unique(key: str, field: str, values: Iterable[str], taken: frozenset[str]) -> Iterator[Problem]:
    for value, count in Counter(values).items():
        if count > 1 or value in taken:
            rule = f"each {field} is used once" if count > 1 else f"the pods of a run have their own {value}"
            yield Problem(key, f"{field} {value!r}", rule)
