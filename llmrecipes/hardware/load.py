"""A cluster profile's file to a validated `Profile`, with all problems reported at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from llmrecipes.files import folder
from llmrecipes.hardware import pod_rules
from llmrecipes.hardware.adapters import RDMA
from llmrecipes.hardware.profile import Profile
from llmrecipes.recipe import document, files
from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.explain import explain
from llmrecipes.recipe.files import Kind
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
    return files.names(directory or clusters_dir())


def load_profile(name_or_path: str, directory: Path | None = None) -> Profile:
    """Read and check one profile.

    Args:
        name_or_path: name in `directory`, or path of a YAML file (anything with a slash or a YAML suffix).
        directory: folder of named profiles; None: `clusters_dir()`.

    Raises:
        UserError: no such profile, unreadable file, or any problem in it; all problems are in one message.
    """
    path = files.shown(files.find(name_or_path, directory or clusters_dir(), CLUSTERS))
    parsed = document.parse(files.read(path, CLUSTERS))
    found = [*parsed.problems, *files.require_mapping(parsed, CLUSTERS)]
    profile = None
    if isinstance(parsed.data, dict):
        try:
            profile = Profile.model_validate(parsed.data)
        except ValidationError as error:
            reported = {problem.key for problem in found}
            found += [problem for problem in explain(error, parsed.lines, Profile) if problem.key not in reported]
        else:
            found += check(profile, path.stem)
    if found or profile is None:
        raise files.error_of(found, (), path, parsed.lines, {})
    return profile


def check(profile: Profile, stem: str) -> list[Problem]:
    """Problems between keys of a profile.

    Args:
        profile: of the right types.
        stem: name of its file.
    """
    found = []
    if profile.name != stem:
        rule = "a profile has the name of its file"
        found.append(Problem("name", f"{profile.name!r} in a file named {stem}.yaml", rule, f"name: {stem}"))
    if bool(profile.gpus_per_node) != bool(profile.gpu):
        what = f"{profile.gpus_per_node} with {'a' if profile.gpu else 'no'} section gpu"
        rule = "a profile with GPUs says which, one without says none"
        found.append(Problem("gpus_per_node", what, rule, "gpus_per_node: 0" if not profile.gpu else "leave gpu out"))
    domain = profile.nvlink_domain
    if domain and (not profile.gpus_per_node or domain % profile.gpus_per_node):
        rule = "an NVLink domain is a number of whole nodes"
        what = f"{domain} with gpus_per_node {profile.gpus_per_node}"
        found.append(Problem("nvlink_domain", what, rule, "a multiple of gpus_per_node, or leave it out"))
    found += _adapters(profile)
    found += _measured(profile)
    found += pod_rules.check(profile.kubernetes)
    found += _variables("environment", profile.environment)
    found += _variables("kubernetes.environment", profile.kubernetes.environment)
    return found


def _measured(profile: Profile) -> Iterator[Problem]:
    seen: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(profile.measured):
        first = seen.setdefault(row.key, number)
        if first != number:
            rule = "each operation is measured once in groups of a kind, number of ranks and size"
            yield Problem(f"measured.{number}", f"the same as measured.{first}", rule, "remove one of the two")
        if row.ranks_per_node is not None and row.ranks_per_node > row.ranks:
            what = f"{row.ranks_per_node} of {row.ranks} ranks"
            yield Problem(f"measured.{number}.ranks_per_node", what, "at most all ranks of the group", f"{row.ranks}")


def _variables(section: str, variables: Mapping[str, str | int | None]) -> Iterator[Problem]:
    for name, value in variables.items():
        key = f"{section}.{name}"
        if name in OURS or name in DANGEROUS:
            rule = "the launcher sets it" if name in OURS else "it would change which programs run"
            yield Problem(key, "may not be set here", rule, "remove it")
        elif is_secret(name):
            rule = "profiles are shared: secrets stay in the environment, or in a Kubernetes Secret"
            yield Problem(key, "looks like a secret", rule, "remove it")
        elif not str(value).isprintable():
            yield Problem(key, f"{clip(str(value))!r} does not fit", "a value is one line of printable characters")


def _adapters(profile: Profile) -> list[Problem]:
    adapters, link = profile.adapters, profile.inter_node
    if adapters is None:
        return []
    if link.kind not in RDMA:
        rule = f"only {', '.join(RDMA)} have such ports"
        return [Problem("adapters", f"with inter_node.kind {link.kind}", rule, "leave it out")]
    found = []
    gpus = profile.gpus_per_node or 1
    if adapters.ports * adapters.gb_per_s < 0.9 * gpus * link.gb_per_s:
        what = f"{adapters.ports} × {adapters.gb_per_s:g} GB/s with inter_node.gb_per_s {link.gb_per_s:g} a GPU"
        rule = "the ports of a node carry what its GPUs send"
        found.append(
            Problem("adapters.ports", what, rule, f"inter_node.gb_per_s is the send bandwidth of one of {gpus}")
        )
    if adapters.names and len(adapters.names) != adapters.ports:
        what = f"{len(adapters.names)} names for {adapters.ports} ports"
        found.append(Problem("adapters.names", what, "each port is named, or none", "mlx5_0, or mlx5_0:1 and mlx5_0:2"))
    if adapters.names and "NCCL_IB_HCA" in profile.environment:
        rule = "adapters.names sets NCCL_IB_HCA"
        found.append(Problem("adapters.names", "and environment.NCCL_IB_HCA", rule, "one of the two"))
    return found
