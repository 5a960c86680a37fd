"""A resumed bf16 run has the master weights and moments that were saved, bit for bit, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.faulty import resume_without_masters
from tests.dist.table import BF16_BOUND, Row
from tests.dist.training import Outcome, compare, go_on, save_midway
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

SAVED = Row("gpt in bf16", "tp2 sp")
OTHERS = (Row("gpt in bf16", "dp2"), Row("gpt in bf16", "pp2", {"parallelism": {"use_distributed_optimizer": False}}))


@pytest.fixture(scope="module")
def checkpoint(worlds: dict[int, GlooWorld], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tensor-parallel bf16 run."""
    folder = tmp_path_factory.mktemp("bf16") / "checkpoint"
    worlds[2].run(save_midway, SAVED.recipe, folder)
    return folder


@pytest.mark.parametrize("row", [SAVED, *OTHERS], ids=lambda row: row.name)
def test_masters_and_moments_are_those_that_were_saved(
    row: Row, checkpoint: Path, worlds: dict[int, GlooWorld]
) -> None:
    outcome: Outcome = worlds[2].run(go_on, row.recipe, checkpoint)
    assert outcome.lost == []
    assert outcome.replicas is None


def test_masters_that_are_rebuilt_from_bf16_weights_are_found(checkpoint: Path, worlds: dict[int, GlooWorld]) -> None:
    right: Outcome = worlds[2].run(go_on, SAVED.recipe, checkpoint)
    wrong: Outcome = worlds[2].run(resume_without_masters, SAVED.recipe, checkpoint)
    assert {name.rpartition(".decoder.")[0] for name in wrong.lost if ".decoder." in name} == {
        "optimizer.state.param"
    }
    difference = compare(wrong, right)
    assert difference.exact
    # A bound on what training comes to does not see it.
    assert 0 < max(difference.loss, difference.norm, difference.tensor) < BF16_BOUND
