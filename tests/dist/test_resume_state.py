"""What a resumed run has bit for bit: masters and moments in every layout, and in the same layout all that follows."""

from __future__ import annotations

import logging
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from llmrecipes.recipe.schema import Recipe
from tests.dist.faulty import resume_without_masters
from tests.dist.table import BF16_BOUND, Row
from tests.dist.training import Outcome, compare, go_on, save_midway, train
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

SAVED = Row("gpt in bf16", "tp2 sp")
OTHERS = (Row("gpt in bf16", "dp2"), Row("gpt in bf16", "pp2", {"layout": {"use_distributed_optimizer": False}}))
DROPOUT = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}
SAME = (
    Row("gpt", "tp2 sp pp2", DROPOUT),
    Row("llama", "cp2 dp2", DROPOUT),
    Row("moe", "tp2 sp ep2 etp1", DROPOUT),
    Row("gpt with frozen weights", "tp2 sp pp2"),
)
FIRST = SAME[0]  # the others are left to make test-deep
ZERO = (
    Row("gpt in bf16", "dp2", {**DROPOUT, "layout": {"zero": {"stage": 1}}}, engine="deepspeed"),
    Row("gpt", "dp2", {**DROPOUT, "layout": {"zero": {"stage": 2}}}, engine="deepspeed"),
    Row("gpt in fp16", "dp2", {**DROPOUT, "layout": {"zero": {"stage": 3}}}, engine="deepspeed"),
    # hpZ gathers from its second copy of the weights, which is older than those that are loaded.
    Row(
        "gpt",
        "dp4",
        {
            **DROPOUT,
            "layout": {"zero": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100}},
        },
        engine="deepspeed",
    ),
)


@pytest.fixture(scope="module")
def checkpoint(worlds: dict[int, GlooWorld], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tensor-parallel bf16 run."""
    folder = tmp_path_factory.mktemp("bf16") / "checkpoint"
    worlds[2].run(save_midway, SAVED.recipe, folder)
    return folder


@pytest.mark.parametrize("row", [SAVED, *OTHERS], ids=lambda row: row.name)
@pytest.mark.rotating
def test_masters_and_moments_are_those_that_were_saved(
    row: Row, checkpoint: Path, worlds: dict[int, GlooWorld]
) -> None:
    outcome: Outcome = worlds[2].run(go_on, row.recipe, checkpoint)
    assert outcome.lost == []
    assert outcome.replicas is None


def messages(recipe: Recipe, folder: Path) -> list[str]:
    """What the first rank logs when it resumes. To be called on every rank."""
    kept: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler, log = QueueHandler(kept), logging.getLogger("llmrecipes.engine.core.random_states")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        go_on(recipe, folder)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [kept.get().getMessage() for _ in range(kept.qsize())]


def test_a_different_layout_logs_that_random_states_are_reseeded(
    checkpoint: Path, worlds: dict[int, GlooWorld]
) -> None:
    assert worlds[2].run(messages, SAVED.recipe, checkpoint) == []
    (said,) = worlds[2].run(messages, OTHERS[0].recipe, checkpoint)
    assert "random states are re-seeded" in said


@pytest.mark.rotating
def test_masters_that_are_rebuilt_from_bf16_weights_are_found(checkpoint: Path, worlds: dict[int, GlooWorld]) -> None:
    right: Outcome = worlds[2].run(go_on, SAVED.recipe, checkpoint)
    wrong: Outcome = worlds[2].run(resume_without_masters, SAVED.recipe, checkpoint)
    assert {name.rpartition(".decoder.")[0] for name in wrong.lost if ".decoder." in name} == {"optimizer.state.param"}
    difference = compare(wrong, right)
    assert difference.exact
    # A bound on what training comes to does not see it.
    assert 0 < max(difference.loss, difference.norm, difference.tensor) < BF16_BOUND


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, id=row.name, marks=[] if row is FIRST else pytest.mark.slow) for row in SAME),
        *(pytest.param(row, id=row.name, marks=[pytest.mark.slow, pytest.mark.deepspeed]) for row in ZERO),
    ],
)
def test_a_run_resumed_in_its_layout_is_the_uninterrupted_one(
    row: Row, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    world = worlds[row.ranks]
    whole: Outcome = world.run(train, row.recipe)
    world.run(save_midway, row.recipe, tmp_path / "checkpoint")
    resumed: Outcome = world.run(go_on, row.recipe, tmp_path / "checkpoint")
    assert (resumed.losses, resumed.norms) == (whole.losses[-1:], whole.norms[-1:])
    assert resumed.valid == whole.valid
    assert all(np.array_equal(tensor, resumed.tensors[name]) for name, tensor in whole.tensors.items())
