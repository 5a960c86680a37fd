"""The gloo worlds of the layout tests, each started when a test first needs it, and ended with the last of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.suite import Suite
from tests.dist.worlds import ROOT, GlooWorld

SUITE = pytest.StashKey[Suite]()
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Suite:
    """Runs rows of the table."""
    request.config.stash[SUITE] = Suite(tmp_path_factory.mktemp("worlds"))
    return request.config.stash[SUITE]


@pytest.fixture(autouse=True)
def _path_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ranks' server does not have pytest's path.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="session")
def worlds(suite: Suite) -> dict[int, GlooWorld]:
    """Worlds by their number of ranks."""
    return suite.worlds


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the worlds' processes, which would be children and memory of all tests after these."""
    suite = item.config.stash.get(SUITE, None)
    if suite is not None and (nextitem is None or HERE not in nextitem.path.parents):
        suite.close()
