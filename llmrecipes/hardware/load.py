"""A cluster profile's file to a validated `Profile`, with all problems reported at once."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from llmrecipes.files import folder
from llmrecipes.hardware.nics import RDMA
from llmrecipes.hardware.profile import PAGES, Kubernetes, Profile, mebibytes
from llmrecipes.hardware.slurm_words import gpus_of
from llmrecipes.recipe import document
from llmrecipes.recipe.document import Kind, Problem, clip
from llmrecipes.recipe.reading.explain import explain
from llmrecipes.redact import is_secret

CLUSTERS = Kind(
    "cluster profile", "--cluster", "recipes/clusters/", "name, gpus_per_node, cpu_cores, memory_gib and both links"
)
OURS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
DANGEROUS = {"PATH", "PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "BASH_ENV", "ENV", "HOME", "USER"}


def clusters_dir() -> Path:
    """Folder of the named profiles: `LLMRECIPES_CLUSTERS`, else `recipes/clusters/` of the checkout or package."""
    configured = os.environ.get("LLMRECIPES_CLUSTERS")
    return Path(configured) if configured else folder("recipes") / "clusters"


def names(directory: Path | None = None) -> list[str]:
    """Names of the profiles in a folder, sorted."""
    return document.names(directory or clusters_dir())


def load_profile(name_or_path: str, directory: Path | None = None) -> Profile:
    """Read and check one profile.

    Args:
        name_or_path: name in `directory`, or path of a YAML file (anything with a slash or a YAML suffix).
        directory: folder of named profiles; None: `clusters_dir()`.

    Raises:
        UserError: no such profile, unreadable file, or any problem in it; all problems are in one message.
    """
    path = document.shown(document.find(name_or_path, directory or clusters_dir(), CLUSTERS))
    parsed = document.parse(document.read(path, CLUSTERS))
    problems = [*parsed.problems, *document.require_mapping(parsed, CLUSTERS)]
    profile = None
    if isinstance(parsed.data, dict):
        try:
            profile = Profile.model_validate(parsed.data)
        except ValidationError as error:
            reported = {problem.key for problem in problems}
            problems += [problem for problem in explain(error, parsed.lines, Profile) if problem.key not in reported]
        else:
            problems += check(profile, path.stem)
    if problems or profile is None:
        raise document.error_of(problems, (), path, parsed.lines, {})
    return profile


def check(profile: Profile, stem: str) -> list[Problem]:
    """Problems between keys of a profile.

    Args:
        stem: name of its file.
    """
    problems = []
    if profile.name != stem:
        rule = "name must match the file name"
        problems.append(Problem("name", f"{profile.name!r} in a file named {stem}.yaml", rule, f"name: {stem}"))
    if bool(profile.gpus_per_node) != bool(profile.gpu):
        what = f"{profile.gpus_per_node} with {'a' if profile.gpu else 'no'} section gpu"
        rule = "a profile needs the section gpu exactly if it has GPUs"
        problems.append(Problem("gpus_per_node", what, rule, "gpus_per_node: 0" if not profile.gpu else "remove gpu"))
    domain = profile.nvlink_domain
    if domain and (not profile.gpus_per_node or domain % profile.gpus_per_node):
        rule = "nvlink_domain must be a multiple of gpus_per_node"
        what = f"{domain} with gpus_per_node {profile.gpus_per_node}"
        problems.append(Problem("nvlink_domain", what, rule, "a multiple of gpus_per_node, or remove it"))
    gpus = None if profile.slurm.gres is None else gpus_of(profile.slurm.gres)
    if gpus is not None and gpus != profile.gpus_per_node:
        what = f"{profile.slurm.gres} with gpus_per_node {profile.gpus_per_node}"
        problems.append(Problem("slurm.gres", what, "a job requests all GPUs of its nodes", "the same number in both"))
    problems += _adapters(profile)
    problems += _measured(profile)
    problems += check_kubernetes(profile.kubernetes)
    problems += _variables("environment", profile.environment)
    problems += _variables("kubernetes.environment", profile.kubernetes.environment)
    return problems


def _measured(profile: Profile) -> Iterator[Problem]:
    seen: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(profile.measured):
        first = seen.setdefault(row.key, number)
        if first != number:
            rule = "a measurement must be unique by operation, kind of group, number of ranks and size"
            yield Problem(f"measured.{number}", f"duplicates measured.{first}", rule, "remove one of the two")
        if row.ranks_per_node is not None and row.ranks_per_node > row.ranks:
            what = f"{row.ranks_per_node} with {row.ranks} ranks"
            yield Problem(f"measured.{number}.ranks_per_node", what, "at most the ranks of the group", f"{row.ranks}")


def _variables(section: str, variables: Mapping[str, str | int | None]) -> Iterator[Problem]:
    for name, value in variables.items():
        key = f"{section}.{name}"
        if name in OURS or name in DANGEROUS:
            rule = (
                "the launcher sets this variable" if name in OURS else "this variable would change which programs run"
            )
            yield Problem(key, "may not be set in a profile", rule, "remove it")
        elif is_secret(name):
            rule = "profiles are shared, so secrets belong in the environment or in a Kubernetes Secret"
            yield Problem(key, "looks like a secret", rule, "remove it")
        elif not str(value).isprintable():
            yield Problem(key, f"{clip(str(value))!r} is not valid", "a value must be one line of printable characters")


def _adapters(profile: Profile) -> list[Problem]:
    adapters, link = profile.adapters, profile.inter_node
    if adapters is None:
        return []
    if link.kind not in RDMA:
        rule = f"only {', '.join(RDMA)} have such ports"
        return [Problem("adapters", f"with inter_node.kind {link.kind}", rule, "remove it")]
    problems = []
    gpus = profile.gpus_per_node or 1
    if adapters.ports * adapters.gb_per_s < 0.9 * gpus * link.gb_per_s:
        what = f"{adapters.ports} × {adapters.gb_per_s:g} GB/s with inter_node.gb_per_s {link.gb_per_s:g} a GPU"
        rule = "the ports of a node must carry what its GPUs send"
        problems.append(
            Problem("adapters.ports", what, rule, f"inter_node.gb_per_s is the send bandwidth of one of {gpus}")
        )
    if adapters.names and len(adapters.names) != adapters.ports:
        what = f"{len(adapters.names)} names for {adapters.ports} ports"
        problems.append(Problem("adapters.names", what, "name every port, or none", "mlx5_0, or mlx5_0:1 and mlx5_0:2"))
    if adapters.names and "NCCL_IB_HCA" in profile.environment:
        rule = "adapters.names sets NCCL_IB_HCA"
        problems.append(Problem("adapters.names", "set with environment.NCCL_IB_HCA", rule, "remove one of the two"))
    return problems


CONTAINERS = frozenset({"node", "doctor"})
VOLUMES = frozenset({"recipe", "workspace", "shm", "tmp"})
MOUNTS = frozenset({"/etc/llmrecipes", "/workspace", "/dev/shm", "/tmp"})  # noqa: S108 - in a pod
CHANNEL = "imex-channel"
"""Names that a rendered pod already has, and the claim for a channel of IMEX."""
PATCHED = ("metadata", "spec")
RESERVED = "llmrecipes/"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Of a container."""


def check_kubernetes(kubernetes: Kubernetes) -> Iterator[Problem]:
    """All of them."""
    if bool(kubernetes.rdma_resource) != bool(kubernetes.rdma_count):
        what = f"{kubernetes.rdma_count} of {kubernetes.rdma_resource or 'no resource'}"
        yield Problem("kubernetes.rdma_count", what, "rdma_resource and rdma_count must be set together")
    for page, amount in kubernetes.hugepages.items():
        if mebibytes(amount) % PAGES[page]:
            yield Problem(f"kubernetes.hugepages.{page}", amount, f"must be a multiple of {page}")
    for key in kubernetes.annotations:
        if key.startswith(RESERVED):
            yield Problem(
                f"kubernetes.annotations.{key}", "is set by submit", f"annotations must not begin with {RESERVED}"
            )
    yield from _tolerations(kubernetes)
    yield from _volumes(kubernetes)
    yield from _claims(kubernetes)
    yield from _sidecars(kubernetes)
    for key in kubernetes.patch:
        if key not in PATCHED:
            rule = "a patch may contain metadata and spec of the pod template only"
            yield Problem(f"kubernetes.patch.{key}", "not part of a pod template", rule)


def _tolerations(kubernetes: Kubernetes) -> Iterator[Problem]:
    for number, toleration in enumerate(kubernetes.tolerations):
        if (toleration.operator == "Equal") != (toleration.value is not None):
            rule = "value is only used with the operator Equal"
            yield Problem(f"kubernetes.tolerations.{number}.value", f"with {toleration.operator}", rule)
        elif toleration.key is None and toleration.operator == "Equal":
            yield Problem(f"kubernetes.tolerations.{number}.key", "missing", "the operator Equal needs a key")


def _volumes(kubernetes: Kubernetes) -> Iterator[Problem]:
    for number, volume in enumerate(kubernetes.volumes):
        sources = [name for name in ("host_path", "claim", "empty_dir") if getattr(volume, name) is not None]
        yield from _one_of(f"kubernetes.volumes.{number}", sources, "host_path, claim and empty_dir")
    yield from _unique("kubernetes.volumes", "name", (volume.name for volume in kubernetes.volumes), VOLUMES)
    paths = (volume.mount_path for volume in kubernetes.volumes if volume.mount_path is not None)
    yield from _unique("kubernetes.volumes", "mount_path", paths, MOUNTS)


def _claims(kubernetes: Kubernetes) -> Iterator[Problem]:
    for number, claim in enumerate(kubernetes.resource_claims):
        sources = [name for name in ("template", "claim") if getattr(claim, name) is not None]
        yield from _one_of(f"kubernetes.resource_claims.{number}", sources, "template and claim")
    claims = (claim.name for claim in kubernetes.resource_claims)
    taken = frozenset({CHANNEL}) if kubernetes.compute_domain else frozenset[str]()
    yield from _unique("kubernetes.resource_claims", "name", claims, taken)


def _sidecars(kubernetes: Kubernetes) -> Iterator[Problem]:
    for number, sidecar in enumerate(kubernetes.sidecars):
        for key in ("name", "image"):
            if not isinstance(sidecar.get(key), str):
                rule = "a sidecar is a container as in a pod: it needs name and image"
                what = "missing" if key not in sidecar else "not a string"
                yield Problem(f"kubernetes.sidecars.{number}.{key}", what, rule)
        if isinstance(name := sidecar.get("name"), str) and not NAME.fullmatch(name):
            rule = "at most 63 lowercase letters, digits and dashes"
            yield Problem(f"kubernetes.sidecars.{number}.name", repr(name), rule)
    yield from _unique(
        "kubernetes.sidecars", "name", (str(sidecar.get("name")) for sidecar in kubernetes.sidecars), CONTAINERS
    )


def _one_of(key: str, sources: list[str], rule: str) -> Iterator[Problem]:
    if len(sources) != 1:
        yield Problem(key, " and ".join(sources) or "none of them", f"exactly one of {rule}")


def _unique(key: str, field: str, values: Iterable[str], taken: frozenset[str]) -> Iterator[Problem]:
    for value, count in Counter(values).items():
        if count > 1 or value in taken:
            rule = f"each {field} must be unique" if count > 1 else f"the pods of a run already have {value}"
            yield Problem(key, f"{field} {value!r}", rule)
