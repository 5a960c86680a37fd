"""Options and fixtures of all tests."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from tests import selection
from tests.dist.table import Row
from tests.dist.worlds import GlooWorld, freeze_modules, pool

if TYPE_CHECKING:
    from llmrecipes.checkpoint.rank_groups import Ranks
    from llmrecipes.engine.core.world import World

# The tests are about the CPU platform, on machines with a GPU too; one thread a process, so that sums have one order.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
Command = Callable[..., tuple[int, str]]
THREADS, MOST_THREADS = Path("/proc/self/task"), 40
WORLDS = pytest.StashKey[dict[int, GlooWorld]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption(
        "--commit",
        default=os.environ.get("TESTS_COMMIT", ""),
        help="leave out rotating tests that have no turn on this commit, and the image if its record is up to date; "
        "default: TESTS_COMMIT",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while modules are imported, nor later in what they hold: it takes half of this time."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_modules()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or not collection_path.match("test_*.py"):
        return None
    return selection.in_vain(collection_path.relative_to(HERE).as_posix(), config.option.markexpr) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = config.getoption("--commit")
    later = set()
    here = f"{HERE}/"  # as text: pathlib took a quarter of the time of a collection
    for item in items:
        path = str(item.path).removeprefix(here)
        slow = item.get_closest_marker("slow") is not None
        if path.startswith(selection.VERSION) and not slow:
            item.add_marker(pytest.mark.version)
        row = (
            item.callspec.params.get("row") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
        )
        # Rows that have something new always run.
        marker = item.get_closest_marker("rotating")
        rotates = marker is not None or (slow and not isinstance(row, Row))
        turn = marker.args[0] if marker is not None and marker.args else item.nodeid
        if commit and ((rotates and not selection.has_turn(turn, commit)) or selection.recorded(path)):
            later.add(item)
    if later:
        config.hook.pytest_deselected(items=list(later))
        items[:] = [item for item in items if item not in later]
    items.sort(key=lambda item: selection.rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> selection.Groups | None:
    return selection.Groups(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, before any fixture is made, what needs a package that `make setup` leaves out; in CI this is a failure."""
    if reason := selection.missing_package({mark.name for mark in item.iter_markers()}):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """End the ranks after the last test that needs them: they would be memory and children of all others.

    After a module its engines are closed: each keeps its model and the threads of its process groups.
    """
    if nextitem is None or selection.group(nextitem.nodeid) not in selection.RANKS:
        for world in item.config.stash.get(WORLDS, {}).values():
            world.close()
    result = yield
    if (nextitem is None or nextitem.path != item.path) and len(list(THREADS.iterdir())) > MOST_THREADS:
        from tests.helpers import close_engines

        close_engines()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, what cannot run has failed: everything that tests need is installed there."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"not run, which CI=true does not allow: {reason}"
    return report


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


@pytest.fixture
def command(folder: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command of the program on the runs in `folder`, a fixture of the module: exit code, and what it printed."""
    from llmrecipes.cli import app

    def run(*arguments: str) -> tuple[int, str]:
        code = app.run([*arguments, "--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir)])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return run


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as a world of one, with the CPU platform installed (which stays, as it does in a run)."""
    from llmrecipes.engine.core.platform import select
    from llmrecipes.engine.core.world import join
    from llmrecipes.recipe.schema import LayoutKeys
    from tests.helpers import close_engines

    platform = select()
    platform.install()
    with join(platform, 1234, LayoutKeys()) as joined:
        yield joined
        close_engines()


@pytest.fixture(scope="session")
def worlds(pytestconfig: pytest.Config) -> Iterator[dict[int, GlooWorld]]:
    """The pool of rank processes: worlds by their number of ranks."""
    with pool() as made:
        pytestconfig.stash[WORLDS] = made
        yield made


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of pytest-xdist have in common, new in each run of pytest."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The saver's ranks in a gloo world of this process alone, without model-parallel groups."""
    import torch.distributed as dist

    from llmrecipes.checkpoint.saver import saver_group

    rendezvous = tmp_path_factory.mktemp("world") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield saver_group()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def corpus(shared: Path) -> Path:
    """A folder of small texts that a small model can learn from."""
    folder = shared / "corpus"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            written = folder.with_suffix(".part")
            written.mkdir()
            draw = random.Random(0)
            for number in range(250):
                text = "".join(f"word {draw.randrange(1000)} döcument {number}.{line}\n" for line in range(8))
                (written / f"{number:04d}.txt").write_text(text, "utf-8")
            written.rename(folder)
    return folder


@pytest.fixture(scope="session")
def data_dir(shared: Path) -> Path:
    """Where all tests keep prepared data, so that the same recipe is prepared once."""
    folder = shared / "data"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def unused_port() -> int:
    """A port with free ones behind it, below those that the kernel gives to connections."""
    for port in range(20000 + os.getpid() % 5000, 32000, 10):
        try:
            for number in range(6):
                socket.create_server(("", port + number)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no ports are free")
