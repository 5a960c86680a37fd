"""Which tests are run where, and that none is left out unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import selection
from tests.dist import table
from tests.selection import (
    NVME,
    RANKS,
    TESTS,
    VERSION,
    group,
    has_turn,
    in_vain,
    missing_package,
    rank,
)


def test_every_prefix_of_the_version_names_tests() -> None:
    paths = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    assert not [prefix for prefix in VERSION if not any(path.startswith(prefix) for path in paths)]


def test_every_rotating_test_has_its_turn_on_one_commit_of_four() -> None:
    names = [f"tests/dist/test_layouts.py::test_a_layout_changes_nothing[{row.name}]" for row in table.ROWS]
    turns = [{name for name in names if has_turn(name, f"{commit:040x}")} for commit in range(4)]
    assert sum(map(len, turns)) == len(names)
    assert set().union(*turns) == set(names)
    assert all(len(turn) > len(names) / 8 for turn in turns)


def test_what_only_combines_rotates_and_nothing_else_does() -> None:
    """Every kind, every pair and every option of a model and of an engine is in rows that every commit runs."""
    for engine in ("megatron", "deepspeed"):
        rows = [row for row in table.ROWS if row.engine == engine and not row.nccl]
        always = [row for row in rows if row.name in table.essential(engine) or NVME in row.name]
        assert set().union(*map(table.news, always)) == set().union(*map(table.news, rows))


def test_modules_stay_together_and_ranks_come_first() -> None:
    rows = "tests/dist/test_layouts.py::test_a"
    assert group(f"{rows}[gpt: x::y]") == RANKS[0] == group("tests/unit/test_plan_ranks.py::test_b")
    assert group(f"{rows}[moe: x::y]") == RANKS[1] == group("tests/dist/test_stops.py::test_b")
    assert group("tests/unit/test_cli.py::test_a") == group("tests/unit/test_cli.py::test_b")
    for path in ("train/test_train_faults.py", "system/slurm/test_training.py"):
        assert group(f"tests/{path}::test_a") != group(f"tests/{path}::test_b")
    assert rank("tests/dist/test_layouts.py::test_a") < rank("tests/train/test_train_faults.py::test_a")
    assert rank("tests/train/test_train_faults.py::test_a") < rank("tests/unit/test_cli.py::test_a")


def test_a_module_is_left_out_where_none_of_its_tests_can_be_selected() -> None:
    others = "not system and not fabric and not kubernetes and not gpu8"
    assert in_vain("system/slurm/test_training.py", f"not slow and {others}")
    assert in_vain("system/kubernetes/test_job_controller.py", "system and not kubernetes")
    assert in_vain("unit/test_card.py", f"version and {others}")
    assert in_vain("unit/test_benchmark_mup.py", f"slow and {others}")
    assert in_vain("dist/test_zero.py", f"not slow and {others}")
    for path, markers in (
        ("system/slurm/test_training.py", "system"), ("system/slurm/test_training.py", ""),
        ("system/kubernetes/test_job_controller.py", "kubernetes"), ("unit/test_cli.py", f"not slow and {others}"),
        ("unit/test_cli.py", f"version and {others}"), ("dist/test_layouts.py", f"slow and {others}"),
    ):  # fmt: skip
        assert not in_vain(path, markers)
    # Only the module itself marks its tests as slow, so its text has the word.
    shared = [path for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
    assert shared and not [path for path in shared if "pytest.mark.slow" in path.read_text("utf-8")]


@pytest.mark.parametrize("changed", ["docker/Dockerfile", "tests/system/containers/test_built_image.py"])
def test_tests_of_the_image_run_when_it_or_they_have_changed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("docker/Dockerfile", "tests/system/containers/test_built_image.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as it passed\n")
    monkeypatch.setattr(selection, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(selection, "IMAGE", tmp_path / "image.sha256")
    monkeypatch.setattr(selection, "image_digest", selection.image_digest.__wrapped__)
    selection.IMAGE.write_text(f"{selection.image_digest()}\n")
    assert selection.recorded("system/containers/test_built_image.py")
    (tmp_path / changed).write_text("changed\n")
    assert not selection.recorded("system/containers/test_built_image.py")


def test_what_needs_deepspeed_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.selection.find_spec", lambda _name: None)
    assert "make setup-zero" in missing_package({"slow", "deepspeed"})
    assert not missing_package({"slow"})
    monkeypatch.setattr("tests.selection.find_spec", lambda name: object() if name == "deepspeed" else None)
    assert not missing_package({"deepspeed"})


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(("ci", "code", "said"), [("true", 1, "ERROR"), ("false", 0, "SKIPPED")])
def test_missing_programs_fail_in_ci_and_are_named_elsewhere(ci: str, code: int, said: str, tmp_path: Path) -> None:
    file = "tests/system/containers/test_built_image.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "without_rights", file], cwd=TESTS.parent,
        env={**os.environ, "CI": ci, "PATH": str(tmp_path), "TESTS_COMMIT": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert "podman" in done.stdout or "root" in done.stdout
