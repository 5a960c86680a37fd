"""The rows of the table, for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.dist.suite import Suite
from tests.dist.worlds import GlooWorld


@pytest.fixture(scope="session")
def suite(worlds: dict[int, GlooWorld], tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Runs rows of the table."""
    return Suite(worlds, tmp_path_factory.mktemp("checkpoints"))
