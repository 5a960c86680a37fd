"""The moving average of the weights is that of a single process in every layout, and another layout goes on with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrecipes.recipe.schema import Recipe
from tests.dist.table import BOUND, STEPS, Row
from tests.dist.training import Outcome, everything, go_on, loaders, save_midway, training
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

AVERAGED = {"optimizer": {"ema_decay": 0.75}}
WHOLE = {"layout": {"use_distributed_optimizer": False}}
LAYOUTS = (
    Row("gpt", "tp2 sp", AVERAGED),
    Row("gpt", "dp2", AVERAGED),
    Row("gpt", "pp2", AVERAGED),
    pytest.param(Row("gpt", "dp2", {**AVERAGED, **WHOLE}), marks=pytest.mark.slow),
    pytest.param(Row("moe", "ep2 dp2", AVERAGED), marks=pytest.mark.slow),  # experts have an optimizer of their own
)


def averages(recipe: Recipe) -> dict[str, np.ndarray]:
    """Of a whole training, on the first rank. To be called on every rank."""
    with training(recipe) as (engine, world):
        batches = loaders(recipe, world)
        for _ in range(STEPS):
            engine.train_step(batches)
        found = everything(engine, world)
    return {name: value for name, value in found.items() if name.startswith("optimizer.state.ema.")}


def require_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert found
    for name, value in found.items():
        distance = float(np.linalg.norm(value - expected[name]))
        assert distance <= BOUND * max(float(np.linalg.norm(expected[name])), 1e-3), name


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
@pytest.mark.rotating
def test_it_is_the_one_of_a_single_process(row: Row, worlds: dict[int, GlooWorld]) -> None:
    alone = worlds[1].run(averages, Row(row.variant, "dp1", AVERAGED).recipe)
    require_close(worlds[2].run(averages, row.recipe), alone)


def test_it_goes_on_bit_for_bit_in_another_layout(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    row = Row("gpt in bf16", "tp2 sp", AVERAGED)
    worlds[2].run(save_midway, row.recipe, tmp_path / "checkpoint")
    with np.load(tmp_path / "checkpoint.npz", allow_pickle=False) as saved:
        assert any(name.startswith("optimizer.state.ema.") for name in saved.files)
    for other in (Row("gpt in bf16", "dp2", AVERAGED), Row("gpt in bf16", "pp2", {**AVERAGED, **WHOLE})):
        outcome: Outcome = worlds[2].run(go_on, other.recipe, tmp_path / "checkpoint")
        assert outcome.lost == []
