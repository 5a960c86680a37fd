"""Which tests belong to `make test-version`, and which of them pytest-xdist gives to one process."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

VERSION = (
    "dist/", "train/", "unit/test_benchmark_layouts", "unit/test_checkpoint_", "unit/test_data_batches",
    "unit/test_engine_", "unit/test_faults_memory", "unit/test_faults_numerics", "unit/test_generate",
    "unit/test_model_", "unit/test_plan_ranks", "unit/test_platform", "unit/test_train_", "unit/test_workflow_smoke",
    "unit/test_workflow_train", "unit/test_workflow_upcycle",
)  # fmt: skip
"""Beginnings of the paths of tests whose results depend on the versions of Python, torch and megatron-core."""

VERSION_SLOW = ("dist/test_layouts", "unit/test_checkpoint_")
"""Those of them whose slow tests do so too, and do more than start the same processes with other options."""

RANKS = "ranks"
"""Group of all tests that need the worlds: they are started in one process only."""

APART = ("train/test_train_faults", "train/test_train_nodes")
"""Modules whose tests share nothing that is dear, so that any process may run each of them."""

FIRST = (RANKS, "train/test_train_signals", "train/")
"""Groups that take long, the longest first: what starts last should be short."""


def of_the_version(path: str, slow: bool = False) -> bool:
    """Whether a test belongs to `make test-version`.

    Args:
        path: of its module, relative to `tests`.
        slow: whether `make test` leaves it out.
    """
    return path.startswith(VERSION_SLOW if slow else VERSION)


def needs_ranks(item: pytest.Item) -> bool:
    """Whether a test uses the pool of rank processes."""
    return "worlds" in getattr(item, "fixturenames", ())


def group(item: pytest.Item, path: str) -> str:
    """Tests of the same group run in one process, after one another: by default those of a module.

    Args:
        item: the test.
        path: of its module, relative to `tests`.
    """
    if needs_ranks(item):
        return RANKS
    module = str(PurePosixPath(path).with_suffix(""))
    return f"{module}::{item.name}" if path.startswith(APART) else module


def place(item: pytest.Item, path: str) -> None:
    """Give a test its marks."""
    if of_the_version(path, slow=item.get_closest_marker("slow") is not None):
        item.add_marker(pytest.mark.version)
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(group(item, path)))


def rank(item: pytest.Item) -> int:
    """Position of a test's group among all: small is early."""
    mark = item.get_closest_marker("xdist_group")
    name = mark.args[0] if mark else ""
    return next((number for number, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))
