"""Options and fixtures of all tests."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from llmrecipes.train.world import World

# The tests are about the CPU platform, on machines with a GPU too; one thread a process, so that sums have one order.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """Compare data or text with tests/golden/<name>, or write it under --update-golden."""

    def compare(name: str, actual: Any) -> None:
        path = GOLDEN / name
        text = actual if isinstance(actual, str) else json.dumps(actual, indent=2) + "\n"
        if request.config.getoption("--update-golden"):
            path.write_text(text, "utf-8")
            return
        assert path.is_file(), f"{path} is missing: run pytest --update-golden and read the difference"
        assert text == path.read_text("utf-8"), f"{path} differs: if that is meant, run pytest --update-golden"

    return compare


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as a world of one, with the CPU platform installed (which stays, as it does in a run)."""
    from llmrecipes.platform import select
    from llmrecipes.recipe.schema import Parallelism
    from llmrecipes.train.world import join

    platform = select()
    platform.install()
    with join(platform, 1234, Parallelism()) as joined:
        yield joined


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small texts that a small model can learn from."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(250):
        text = "".join(f"word {draw.randrange(1000)} döcument {number}.{line}\n" for line in range(8))
        (folder / f"{number:04d}.txt").write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests keep prepared data, so that the same recipe is prepared once."""
    return tmp_path_factory.mktemp("data")
