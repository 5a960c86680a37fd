"""All checks of one node, in order."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llmrecipes.doctor import fabric, gpus, network, nodes, storage, versions
from llmrecipes.doctor.finding import Finding, fail, skip
from llmrecipes.hardware import builds, nics
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
    pins = versions.locked(versions.lock_file(ROOT, len(states)))
    packages = versions.installed()
    yield from versions.check(packages, sys.version_info[:2], driver, len(states), pins, builds.cuda_version())
    yield from versions.check_zero(packages.get("deepspeed"), subject.recipe)
    yield nodes.inventory(packages, driver)
    ports = nics.ports()
    yield from fabric.check(ports, subject.profile, os.environ)
    yield from fabric.check_roce(ports, subject.profile, os.environ)
    yield from fabric.check_gpudirect(fabric.support(), subject.profile)
    if ports and states:
        yield from fabric.access_control()
    ranks = len(states) or (subject.profile.gpus_per_node if subject.profile else 0)
    yield from network.check_limits(network.read_limits(), subject.profile, ranks)
    chosen = {name: str(value) for name, value in (subject.profile.environment if subject.profile else {}).items()}
    yield from network.check(subject.port, subject.several, {**chosen, **os.environ})
    yield from storage.check(subject.runs_dir, "runs", BYTES_A_PARAMETER * subject.parameters, measured=subject.leads)
    yield from storage.check(subject.data_dir, "data")
    if subject.several and (kind := storage.temporary(subject.runs_dir)):
        fix = "--runs-dir on a file system that all nodes mount"
        yield fail("runs", f"{subject.runs_dir} is on {kind}, which other nodes cannot see", fix)
    if subject.recipe is not None:
        yield from storage.check_data(subject.recipe, subject.data_dir)


def _nvlinks(profile: Profile | None, own: frozenset[int] | None) -> Iterator[Finding]:
    try:
        report = gpus.query_nvlink()
    except (OSError, subprocess.SubprocessError) as error:
        yield skip("NVLink", f"nvidia-smi nvlink: {type(error).__name__}")
    else:
        yield from gpus.check_nvlink(gpus.parse_nvlink(report or ""), profile, own)
