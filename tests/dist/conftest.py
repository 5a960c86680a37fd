"""The gloo worlds of all distributed tests, each started when a test first needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.dist.worlds import GlooWorld

ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, GlooWorld]]:
    """Worlds by their number of ranks."""
    folder = tmp_path_factory.mktemp("worlds")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # The ranks' server does not have pytest's path.
        patch.setenv("PYTHONPATH", str(ROOT))
        yield {size: stack.enter_context(GlooWorld(size, folder)) for size in SIZES}
