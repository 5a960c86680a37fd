"""Which tests belong to `make test-version`, and which ones pytest-xdist runs in one process."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

from tests.dist import table

TESTS = Path(__file__).parent

VERSION = (
    "dist/", "train/", "unit/test_bench.py", "unit/test_benchmark_layouts", "unit/test_checkpoint_",
    "unit/test_chat_", "unit/test_coordinates", "unit/test_data_batches", "unit/test_data_chat",
    "unit/test_data_prepare", "unit/test_dryrun", "unit/test_engine_", "unit/test_evaluation",
    "unit/test_faults_memory", "unit/test_faults_numerics", "unit/test_finetune", "unit/test_generate", "unit/test_hf_",
    "unit/test_lora_",
    "unit/test_merge_", "unit/test_model_", "unit/test_network.py", "unit/test_plan_model", "unit/test_plan_placement",
    "unit/test_plan_ranks", "unit/test_platform", "unit/test_recipe_effects", "unit/test_rendezvous", "unit/test_serve",
    "unit/test_train_", "unit/test_workflow_evaluate", "unit/test_workflow_smoke", "unit/test_workflow_train",
    "unit/test_workflow_upcycle",
)  # fmt: skip
"""Path prefixes of tests whose results depend on the versions of Python, torch and megatron-core."""

VERSION_SLOW = ("dist/test_layouts", "unit/test_checkpoint_")
"""Those whose slow tests do so too, and do more than start the same processes with other options. Of the layouts,
every resume, and the rows of `table.of_the_version`: one that only combines what other rows have is left to
`make test-deep`, because the combinations depend on this project's code."""

VERSION_ZERO = (
    "[gpt: dp2, deepspeed, stage=2, reduce_bucket_size=20000, use_distributed_optimizer]",
    "[gpt: tp2 sp dp2, deepspeed, stage=3",
)
"""Beginnings of the ids of those with DeepSpeed that do; DeepSpeed itself has the same version everywhere."""

RANKS = "ranks"
"""Group of all tests that need the worlds: these are started in one process only."""

APART = "train/test_train_faults"
"""Module whose tests share nothing expensive, so that any process may run each of them."""

FIRST = (
    "system/slurm/test_training", "system/containers", RANKS, "train/test_train_signals",
    "unit/test_benchmark_layouts", "unit/test_tracking_mlflow", "unit/test_bench", "train/",
)  # fmt: skip
"""Slow groups, the slowest first, so that short ones run last."""


def of_the_version(path: str, slow: bool = False, zero: str = "", row: str = "") -> bool:
    """Whether a test belongs to `make test-version`.

    Args:
        path: of its module, relative to `tests`.
        slow: whether `make test` excludes it.
        zero: its id, if it needs DeepSpeed.
        row: name of the layout, if it compares one with one process.
    """
    if not path.startswith(VERSION_SLOW if slow else VERSION):
        return False
    if zero:
        return any(start in zero for start in VERSION_ZERO)
    return not row or row in table.of_the_version()


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
    path = nodeid.partition("::")[0].removeprefix("tests/")
    if needs_ranks(path):
        return RANKS
    return nodeid if path.startswith(APART) else path


def rank(nodeid: str) -> int:
    """Position of a test's group in the run; lower runs earlier."""
    name = group(nodeid).removeprefix("tests/")
    return next((number for number, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))


class Groups(LoadScopeScheduling):
    """Distributes whole groups to pytest-xdist's processes."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
