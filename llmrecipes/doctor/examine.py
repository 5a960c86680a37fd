"""All checks of one node, in order, and those of its packages by their metadata: nothing heavy is imported."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from llmrecipes.doctor import fabric, filesystems, gpus, nodes
from llmrecipes.doctor.finding import Finding, fail, ok, skip, warn
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import UserError
from llmrecipes.hardware import builds, nics
from llmrecipes.hardware.builds import ASYNC_IO, CPU_ADAM, operator_obstacle
from llmrecipes.hardware.profile import Profile
from llmrecipes.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
BYTES_A_PARAMETER = 14
"""Of a checkpoint: bf16 weights, fp32 weights and two fp32 moments."""


@dataclass(frozen=True)
class DoctorContext:
    """What to examine.

    Args:
        profile: expected hardware; None: no expectation.
        recipe: checks its data and checkpoint size; None: neither.
        parameters: of its model; 0 without a recipe.
        several: whether the run spans several nodes.
        leads: whether this node measures shared resources; thousands writing at once would measure each other.
        own_gpus: numbers of the job's GPUs on a shared node; None: all.
    """

    profile: Profile | None
    recipe: Recipe | None
    parameters: int
    runs_dir: Path
    data_dir: Path
    port: int
    several: bool
    leads: bool
    own_gpus: frozenset[int] | None = None


def examine(subject: DoctorContext) -> list[Finding]:
    """Check this node; leaves nothing behind, and imports nothing heavy."""
    return [replace(finding, node=socket.gethostname()) for finding in _findings(subject)]


def _findings(subject: DoctorContext) -> Iterator[Finding]:
    driver: str | None = None
    states: list[gpus.GpuState] = []
    try:
        report = gpus.query()
    except (OSError, subprocess.SubprocessError) as error:
        yield gpus.unanswered(error)
    else:
        try:
            if report is not None:
                driver, states = gpus.parse(report)
                yield from gpus.damaged(report)
            yield from gpus.check(states, subject.profile, subject.own_gpus)
        except gpus.UnreadableReport as error:
            yield gpus.unreadable(report or "", error, subject.profile)
    if states:
        yield from _nvlinks(subject.profile, subject.own_gpus)
        own = [state for number, state in enumerate(states) if subject.own_gpus is None or number in subject.own_gpus]
        fine = {state.address for state in states if state not in own or state.recovery == "None"}
        yield from gpus.check_kernel_log(gpus.kernel_records(), time.clock_gettime(time.CLOCK_MONOTONIC), fine)
    pins = locked(lock_file(ROOT, len(states)))
    packages = installed()
    yield from check_versions(packages, sys.version_info[:2], driver, len(states), pins, builds.cuda_version())
    yield from check_zero(packages.get("deepspeed"), subject.recipe)
    yield nodes.inventory(packages, driver)
    ports = nics.ports()
    yield from fabric.check(ports, subject.profile, os.environ)
    yield from fabric.check_roce(ports, subject.profile, os.environ)
    yield from fabric.check_gpudirect(fabric.support(), subject.profile)
    if ports and states:
        yield from fabric.access_control()
    ranks = len(states) or (subject.profile.gpus_per_node if subject.profile else 0)
    yield from fabric.check_limits(fabric.read_limits(), subject.profile, ranks)
    chosen = {name: str(value) for name, value in (subject.profile.environment if subject.profile else {}).items()}
    yield from fabric.check_network(subject.port, subject.several, {**chosen, **os.environ})
    yield from filesystems.check(
        subject.runs_dir, "runs", BYTES_A_PARAMETER * subject.parameters, measured=subject.leads
    )
    yield from filesystems.check(subject.data_dir, "data")
    if subject.several and (kind := filesystems.temporary(subject.runs_dir)):
        fix = "--runs-dir on a file system that all nodes mount"
        yield fail("runs", f"{subject.runs_dir} is on {kind}, which other nodes cannot see", fix)
    if subject.recipe is not None:
        yield from filesystems.check_data(subject.recipe, subject.data_dir)


def _nvlinks(profile: Profile | None, own: frozenset[int] | None) -> Iterator[Finding]:
    try:
        report = gpus.query_nvlink()
    except (OSError, subprocess.SubprocessError) as error:
        yield skip("NVLink", f"nvidia-smi nvlink: {type(error).__name__}")
    else:
        yield from gpus.check_nvlink(gpus.parse_nvlink(report or ""), profile, own)


PACKAGES = ("torch", "megatron-core", "transformer-engine", "deepspeed", "numpy", "datasets", "mlflow")
MEGATRON = {(3, 11): ("0.16",), (3, 12): ("0.19",)}
"""megatron-core releases that the test suite covers, by Python version; newer ones use the newest entry."""
DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest Linux driver by CUDA major version (CUDA compatibility guide, minor version compatibility)."""


def installed() -> dict[str, str]:
    """Versions of the relevant packages that are installed, by name."""
    versions = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in PACKAGES or name.startswith(("nvidia-nccl", "nvidia-cuda-runtime", "transformer-engine")):
            versions[name] = distribution.version
    return versions


def check_versions(
    versions: Mapping[str, str],
    python: tuple[int, int],
    driver: str | None,
    gpus: int,
    locked: Mapping[str, str],
    cuda: str | None,
) -> Iterator[Finding]:
    """Find incompatible versions.

    Args:
        python: major and minor version.
        driver: GPU driver version according to nvidia-smi; None without one.
        gpus: number of GPUs of this machine.
        locked: pinned versions; empty without a lock file.
        cuda: `torch.version.cuda`; None for a build without CUDA.
    """
    for name in ("torch", "megatron-core"):
        if name not in versions:
            yield fail(f"version of {name}", "not installed", "make setup")
    if "megatron-core" in versions:
        yield _megatron(versions["megatron-core"], python)
    if "torch" in versions:
        yield from _torch(versions["torch"], cuda, driver, gpus)
    yield from _transformer_engine(versions)
    nccl = {name: version for name, version in versions.items() if name.startswith("nvidia-nccl")}
    if len(nccl) > 1:
        both = ", ".join(f"{name} {version}" for name, version in sorted(nccl.items()))
        yield fail("version of NCCL", f"several packages provide it: {both}", "keep the one that torch requires")
    other = [f"{name} {versions[name]} (lock {wanted})" for name, wanted in sorted(locked.items())
             if name in versions and _public(versions[name]) != _public(wanted)]  # fmt: skip
    if other:
        fix = "make setup; expected in a container with its own torch"
        yield warn("lock file", f"versions differ from the tested ones: {', '.join(other)}", fix)


def locked(requirements: Path) -> dict[str, str]:
    """Versions that a lock file pins for the relevant packages."""
    if not requirements.is_file():
        return {}
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", requirements.read_text("utf-8"), re.MULTILINE)
    return {name.lower(): version for name, version in pins if name.lower() in PACKAGES}


def lock_file(root: Path, gpus: int) -> Path:
    """The lock file that `make setup` uses on this machine."""
    python = f"py3{sys.version_info.minor}" if sys.version_info < (3, 12) else "py312"
    return (
        root / "requirements" / (f"{python}-{'cuda' if gpus else 'cpu'}.txt" if python == "py311" else f"{python}.txt")
    )


def _megatron(version: str, python: tuple[int, int]) -> Finding:
    tested = MEGATRON[max(key for key in MEGATRON if key <= max(python, min(MEGATRON)))]
    if version.startswith(tuple(f"{release}." for release in tested)):
        return ok("version of megatron-core", f"{version} on Python {python[0]}.{python[1]}")
    what = f"{version} on Python {python[0]}.{python[1]}, tested with {', '.join(tested)}"
    return warn("version of megatron-core", what, f"pip install 'megatron-core~={tested[-1]}.0', or make setup")


def _torch(version: str, cuda: str | None, driver: str | None, gpus: int) -> Iterator[Finding]:
    if gpus and cuda is None:
        yield fail(
            "version of torch", f"{version} is a CPU build on a node with {gpus} GPUs", "make setup LOCK=py311-cuda"
        )
        return
    if not gpus or cuda is None:
        yield ok("version of torch", version)
        return
    present, wanted = (re.match(r"(\d+)(?:\.(\d+))?", text or "") for text in (driver, cuda))
    oldest = DRIVER.get(int(wanted[1])) if wanted else None
    if present is None or oldest is None:
        yield skip("CUDA driver", f"driver {driver or 'unknown'}, torch {version} for CUDA {cuda}")
        return
    if (int(present[1]), int(present[2] or 0)) < oldest:
        what = f"driver {driver} is too old for CUDA {cuda} of torch {version} ({oldest[0]}.{oldest[1]} required)"
        yield fail("CUDA driver", what, f"a driver >= {oldest[0]}.{oldest[1]}, or a torch build for an older CUDA")
    else:
        yield ok("CUDA driver", f"{driver}, torch {version} for CUDA {cuda}")


def _transformer_engine(versions: Mapping[str, str]) -> Iterator[Finding]:
    parts = {name: version for name, version in versions.items() if name.startswith("transformer-engine")}
    if len(set(parts.values())) > 1:
        what = ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))
        yield fail("version of TransformerEngine", f"its parts differ: {what}", "install the same version of all parts")


def _public(version: str) -> str:
    return version.partition("+")[0]


OPERATORS = {
    CPU_ADAM: "offload of the optimizer",
    ASYNC_IO: "offload to NVMe",
}


def check_zero(version: str | None, recipe: Recipe | None) -> Iterator[Finding]:
    """Check DeepSpeed and its operators.

    Args:
        version: of DeepSpeed; None if it is not installed.
        recipe: fails if its engine cannot run on this machine; None: nothing is required.
    """
    if version is None:
        yield skip("zero", "deepspeed is not installed; make setup-zero installs it")
    else:
        yield ok("zero", f"deepspeed {version}")
        for operator, purpose in OPERATORS.items():
            problem = operator_obstacle(operator)
            if problem is None:
                yield ok(f"zero {operator}", f"can be compiled or loaded, for {purpose}")
            else:
                yield warn(f"zero {operator}", f"no {purpose}: {problem.what}", problem.fix)
    if recipe is not None:
        try:
            require_packages(recipe)
        except UserError as error:
            yield fail("zero", f"recipe {recipe.name}: {error.where}: {error.what}", error.fix)
