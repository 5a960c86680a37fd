"""Every row of the table computes what one process computes, and goes on where another layout stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.launch.local import run_ranks
from llmrecipes.recipe.derived import degrees
from llmrecipes.recipe.rules import recipe_rules
from llmrecipes.recipe.schema import Recipe
from tests.dist.suite import Suite
from tests.dist.table import (
    BOUND,
    CORE,
    NVME_ROW,
    RESUMES,
    ROUNDED,
    ROWS,
    SIMILAR,
    STAGED,
    VARIANTS,
    Resume,
    Row,
    Staged,
    essential,
)
from tests.dist.training import loaders, training
from tests.dist.worlds import ROOT, GlooWorld, WorldFailed, say
from tests.selection import NVME

pytestmark = pytest.mark.dist

HERE = [row for row in ROWS if not row.nccl]
DEGREES = ("cp", "dp", "ep", "pp", "tp")
PAIRS = [*combinations(DEGREES, 2), *((name, "vpp") for name in ("cp", "dp", "ep", "tp"))]


def cases(table: Sequence[Row | Resume | Staged]) -> list[Any]:
    """Parameters of a test; those outside the core are slow."""
    return [pytest.param(each, id=each.name, marks=_marks(each)) for each in table]


def _marks(case: Row | Resume | Staged) -> list[pytest.MarkDecorator]:
    marks = [] if case.core else [pytest.mark.slow]
    if NVME in case.name or (isinstance(case, Row) and case.name not in essential(case.engine)):
        marks.append(pytest.mark.rotating)
    return [*marks, pytest.mark.deepspeed] if "deepspeed" in case.engines else marks


@pytest.mark.parametrize("row", cases(HERE))
def test_a_layout_changes_nothing(row: Row, suite: Suite) -> None:
    one = suite.reference(row.reference_recipe)
    assert one.losses[0] - one.losses[-1] > 1e-3, "the reference does not learn"
    difference = suite.row(row)
    assert difference.largest <= row.bound, str(difference)
    if row.why == ROUNDED:
        assert max(difference.first, difference.gradient) <= BOUND, str(difference)


@pytest.mark.parametrize("case", cases(RESUMES))
def test_a_checkpoint_resumes_in_a_different_layout(case: Resume, suite: Suite) -> None:
    difference = suite.resume(case)
    assert difference.largest <= case.bound, str(difference)


@pytest.mark.parametrize("case", cases(STAGED))
def test_stages_of_other_layouts_change_nothing(case: Staged, suite: Suite) -> None:
    difference = suite.staged(case)
    assert difference.largest <= case.bound, str(difference)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.deepspeed
def test_offload_to_nvme_uses_the_disk_while_it_runs(suite: Suite, worlds: dict[int, GlooWorld]) -> None:
    recipe = suite.runnable(NVME_ROW)
    assert worlds[2].run(_files_of_a_step, recipe) >= 3 * 2**20
    assert recipe.layout.zero is not None and recipe.layout.zero.nvme_path is not None
    left = [path for path in Path(recipe.layout.zero.nvme_path).rglob("*") if path.is_file() and path.stat().st_size]
    assert left == []


def _files_of_a_step(recipe: Recipe) -> int:
    """Bytes that the first rank has on the disk."""
    assert recipe.layout.zero is not None and recipe.layout.zero.nvme_path is not None
    with training(recipe) as (engine, world):
        engine.train_step(loaders(recipe, world))
        return sum(path.stat().st_size for path in Path(recipe.layout.zero.nvme_path).rglob("rank0/*.swp"))


def test_a_failed_rank_is_reported_and_its_world_restarts(worlds: dict[int, GlooWorld]) -> None:
    world = worlds[2]
    with pytest.raises(WorldFailed, match=r"rank 1: Traceback(.|\n)*ZeroDivisionError"):
        world.run(_fail_on_rank_one)
    assert world.run(_size) == 2


def test_a_killed_rank_is_reported_and_its_world_restarts(worlds: dict[int, GlooWorld]) -> None:
    job = worlds[2].start(_wait_for_the_other)
    assert {job.said()[0], job.said()[0]} == {0, 1}
    job.kill(1)
    assert job.end() == [1, -signal.SIGKILL]
    assert worlds[2].run(_size) == 2


def _wait_for_the_other() -> None:
    import torch.distributed as dist

    dist.barrier()
    say("here")
    if dist.get_rank() == 1:
        signal.pause()
    dist.barrier()


def _fail_on_rank_one() -> float:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        return 1 / 0
    dist.barrier()
    return 0.0


def _size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


@pytest.mark.slow
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
        assert not recipe_rules.check(row.recipe), row.name
        assert not recipe_rules.check(row.reference_recipe), row.name
        assert row.why or (row.bound == BOUND and not row.reference), row.name


def pairs_in(rows: Iterable[Row]) -> set[tuple[str, str]]:
    return {pair for row in rows for pair in combinations(sorted(row.degrees), 2)}


def _degrees_and(row: Row) -> dict[str, Any]:
    """What a row sets of `layout`, with all keys that spread the work."""
    return {name: getattr(row.recipe.layout, name) for name in (*degrees.DEGREES, *degrees.SHARING)} | row.changes.get(
        "layout", {}
    )


def test_the_core_has_every_kind_of_parallelism_and_every_pair() -> None:
    core = [row for row in HERE if row.core]
    others = [case for case in (*RESUMES, *STAGED) if case.core]
    assert len(core) + len(others) == len(CORE), "a name of CORE is in no table"
    assert set(PAIRS) <= pairs_in(core)
    # Each degree has a row without another one; experts are spread over ranks that another degree has.
    alone = {tuple(name for name in row.degrees if name not in ("sp", "etp")) for row in core}
    assert {("dp",), ("tp",), ("pp",), ("cp",), ("pp", "vpp"), ("dp", "ep")} <= alone

    def kinds(rows: Iterable[Row]) -> set[str]:
        return {
            f"{section}.{key}={value}"
            for row in rows
            for section, keys in {**row.changes, "layout": _degrees_and(row)}.items()
            for key, value in keys.items()
            if not key.endswith(("_size", "_layout"))
        }

    left_out = {
        "layout.overlap_moe_expert_parallel_comm=True",
        # The other end of what the core has.
        "layout.num_layers_in_last_pipeline_stage=1",
        "layout.account_for_loss_in_pipeline_split=True",
        # One layout of each on every commit, by `make test-deep`: `table.essential` has them.
        "layout.recompute_modules=['core_attn', 'mla_up_proj', 'layernorm']",
        "layout.recompute_modules=['mlp', 'layernorm']",
        "layout.recompute_modules=['moe', 'layernorm']",
        "layout.bias_activation_fusion=True",
        "layout.bias_dropout_fusion=True",
        "layout.apply_rope_fusion=True",
        "layout.cross_entropy_loss_fusion=True",
        "layout.moe_shared_expert_overlap=True",
        "layout.ddp_pad_buckets_for_high_nccl_busbw=True",
        "layout.deterministic_mode=True",
        "train.reduce_scatter_with_fp32_accumulation=True",
        "train.grad_reduce_in_fp32=False",
        "optimizer.weight_decay=1.0",
    }
    # DeepSpeed is an extra that `make test` does without.
    assert kinds(row for row in HERE if row.engine == "megatron") - kinds(core) == left_out
    assert set(VARIANTS) - {row.variant for row in core} == SIMILAR


def test_the_table_has_every_pair_of_degrees() -> None:
    assert set(PAIRS) <= pairs_in(HERE)
