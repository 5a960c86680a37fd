"""Which tests run where and when, and which ones pytest-xdist runs in one process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent

VERSION = (
    "dist/test_checkpoint_killed", "dist/test_resume_state", "dist/test_stops", "train/test_train_lost",
    "train/test_train_older_runs", "unit/test_api", "unit/test_checkpoint_", "unit/test_cli", "unit/test_commandline",
    "unit/test_data_encode", "unit/test_data_prepare", "unit/test_data_sources", "unit/test_data_join",
    "unit/test_data_words", "unit/test_docs", "unit/test_faults_", "unit/test_gathering", "unit/test_generate",
    "unit/test_hf_export", "unit/test_launch", "unit/test_model_gpt", "unit/test_platform", "unit/test_recipe_load",
    "unit/test_redact", "unit/test_rendezvous", "unit/test_search_study", "unit/test_tracking_", "unit/test_untrusted",
    "unit/test_wheel", "unit/test_workflow_smoke", "unit/test_workflow_train",
)  # fmt: skip
"""Path prefixes of tests of what a release of Python changes: processes and their starts, threads, signals and sockets,
pickles, typing and dataclasses, command lines, regular expressions and Unicode, files, the import of all packages."""

RANKS = ("ranks 1", "ranks 2")
"""Groups of the tests that need the worlds, so that two processes start some: half of the tests' time is theirs."""

_RANKS_1 = re.compile(r"unit/|dist/test_(hf_|resume_state|verify|waiting)|dist/test_layouts.*\[(gpt|llama|packed)")
"""Ids in the first of these groups, which takes as long as the second. Rows with the same reference are in one."""

APART = ("train/test_train_faults", "system/slurm/test_training")
"""Modules whose tests share nothing expensive within a process, so that any may run each of them. Those of trainings by
Slurm wait most of the time, and took two thirds of `make test-system` behind each other."""

FIRST = (
    "system/slurm/test_training", "system/containers", *RANKS, "train/test_train_signals",
    "unit/test_benchmark_layouts", "unit/test_tracking_mlflow", "unit/test_bench", "train/",
)  # fmt: skip
"""Slow groups, the slowest first, so that short ones run last."""


_MARKED = (("system/kubernetes/", "kubernetes"), ("system/", "system"), ("fabric/", "fabric"), ("gpu/", "gpu8"))
"""Folders whose tests have a marker, the inner one first."""


_ALL_SLOW = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)


def in_vain(path: str, markers: str) -> bool:
    """Whether no test of a module can be selected, so that importing it would be in vain.

    Each process of pytest-xdist imports all modules that it collects, which takes longer than most of them run.

    Args:
        path: of the module, relative to `tests`.
        markers: the expression of `make`: a marker that all tests have, unless it is negated, and `not` ones.
    """
    for folder, marker in _MARKED:
        if path.startswith(folder):
            return f"not {marker} " in f"{markers} "
    wanted = markers.partition(" ")[0]
    if wanted == "version":
        return not path.startswith(VERSION)
    if wanted not in ("slow", "not"):
        return False
    text = (TESTS / path).read_text("utf-8")
    return "slow" not in text if wanted == "slow" else "not slow" in markers and _ALL_SLOW.search(text) is not None


TURNS = 4
"""One commit in so many runs a test that is marked `rotating`."""

NVME = "nvme"
"""Part of the names of tests that offload to NVMe. They have the same turn: the operator that all of them need takes
longer to compile than they take."""


def has_turn(nodeid: str, commit: str) -> bool:
    """Whether a rotating test runs on this commit.

    Args:
        nodeid: pytest's.
        commit: its hash, in hexadecimal digits.
    """
    name = NVME if NVME in nodeid else nodeid
    return (int(hashlib.sha256(name.encode()).hexdigest(), 16) - int(commit, 16)) % TURNS == 0


IMAGE = TESTS / "golden" / "image.sha256"
"""`image_digest` of the last image that passed its tests; `make test-system ARGS="--update-golden -k built_image"`
writes it."""

_IMAGE_INPUTS = (
    "docker", "requirements/lock.txt", "requirements/torch-cpu.txt", ".dockerignore", "tools/build_image.py",
    "tools/not_locked.txt", "tools/runtime_lock.py", "tests/system/containers",
)  # fmt: skip


@cache
def image_digest() -> str:
    """SHA-256 of what the image is built from without this package: Dockerfiles, locks, the programs that build it; and
    of its tests."""
    root = TESTS.parent
    files = [path for name in _IMAGE_INPUTS for path in (root / name, *(root / name).rglob("*"))]
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file() and path.suffix != ".pyc"):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def recorded(path: str) -> bool:
    """Whether a module tests the image, and an image of the same Dockerfiles and locks has passed the same tests."""
    return path.startswith("system/containers") and IMAGE.is_file() and IMAGE.read_text().strip() == image_digest()


@cache
def needs_ranks(path: str) -> bool:
    """Whether a module has tests that use the pool of rank processes: it names the fixture, or one that uses it."""
    return path.startswith("dist/") or re.search(r"\bworlds\b", (TESTS / path).read_text("utf-8")) is not None


def missing_package(markers: Collection[str]) -> str:
    """What a test cannot run without and this environment lacks, with the command that installs it; else empty.

    Args:
        markers: names of the test's markers.
    """
    lacking = "deepspeed" in markers and find_spec("deepspeed") is None
    return "DeepSpeed is not installed: make setup-zero" if lacking else ""


def group(nodeid: str) -> str:
    """Tests of the same group run in one process, sequentially: by default those of a module.

    Args:
        nodeid: pytest's, from the root of the checkout.
    """
    name = nodeid.removeprefix("tests/")
    path = name.partition("::")[0]
    if needs_ranks(path):
        return RANKS[0] if _RANKS_1.match(name) else RANKS[1]
    return nodeid if path.startswith(APART) else path


def rank(nodeid: str) -> int:
    """Position of a test's group in the run; lower runs earlier."""
    name = group(nodeid).removeprefix("tests/")
    return next((number for number, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))


class Groups(LoadScopeScheduling):
    """Distributes whole groups to pytest-xdist's processes."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
