"""Every row of the table computes what one process computes, and goes on where another layout stopped."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from llmrecipes.launch.local import run_ranks
from llmrecipes.recipe import rules
from tests.dist.suite import Suite
from tests.dist.table import BOUND, RESUMES, ROWS, Resume, Row
from tests.dist.worlds import ROOT, WorldFailed

pytestmark = pytest.mark.dist

HERE = [row for row in ROWS if not row.nccl]


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_a_layout_changes_nothing(row: Row, suite: Suite) -> None:
    one = suite.reference(row.reference_recipe)
    assert one.losses[0] - one.losses[-1] > 1e-3, "the reference does not learn"
    difference = suite.row(row)
    assert difference.largest <= row.bound, str(difference)


@pytest.mark.parametrize("case", RESUMES, ids=lambda case: case.name)
def test_a_checkpoint_goes_on_in_another_layout(case: Resume, suite: Suite) -> None:
    difference = suite.resume(case)
    assert difference.largest <= case.bound, str(difference)


def test_a_rank_that_fails_is_told_of_and_its_world_starts_again(suite: Suite) -> None:
    world = suite.worlds[2]
    with pytest.raises(WorldFailed, match=r"rank 1: Traceback(.|\n)*ZeroDivisionError"):
        world.run(_fail_on_rank_one)
    assert world.run(_size) == 2


def _fail_on_rank_one() -> float:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        return 1 / 0
    dist.barrier()
    return 0.0


def _size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def test_the_table_runs_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    arguments = ["--out", str(tmp_path), "--only", "llama: cp2"]

    def run(size: int) -> int:
        return run_ranks("tests.dist.under_torchrun", arguments, world_size=size, threads=1, logs=tmp_path)

    assert run(2) == 2, "there is no reference yet"
    assert run(1) == 0
    assert run(2) == 0
    assert "llama: cp2" in (tmp_path / "ranks-2.json").read_text("utf-8")


def test_every_row_is_a_recipe_that_users_may_write() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert not rules.check(row.recipe), row.name
        assert not rules.check(row.reference_recipe), row.name
        assert row.why or (row.bound == BOUND and not row.reference), row.name


def test_the_table_has_every_pair_of_degrees() -> None:
    there = {pair for row in HERE for pair in combinations(sorted(row.degrees), 2)}
    pairs = [*combinations(("cp", "dp", "ep", "pp", "tp"), 2), *((name, "vpp") for name in ("cp", "dp", "ep", "tp"))]
    assert [pair for pair in pairs if pair not in there] == []
