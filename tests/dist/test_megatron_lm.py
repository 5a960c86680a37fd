"""What Megatron-LM's ranks save together becomes a run that any layout loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.models.importing import import_megatron
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.resume import choose, resume
from tests import megatron_lm
from tests.dist.table import Row
from tests.dist.training import _whole_tensors, loaders, training
from tests.dist.worlds import GlooWorld
from tests.helpers import write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LAYOUTS = {
    "gpt": ("tp2 sp pp2", "pp2 dp2"),
    "llama": ("tp2 sp pp2", "tp4"),
    "moe": ("tp2 sp ep2 etp1 dp2", "pp2 dp2"),
}
Seen = tuple[float, dict[str, np.ndarray]]


def save(recipe: Recipe, folder: Path) -> Seen | None:
    """Train two steps and save as Megatron-LM does. Like `look`, to be called on every rank; the first answers."""
    with training(recipe) as (engine, world):
        batches = loaders(recipe, world)
        for _ in range(2):
            engine.train_step(batches)
        megatron_lm.save(engine, folder, megatron_lm.arguments(recipe))  # type: ignore[arg-type]
        return seen(engine, world)


def look(recipe: Recipe, checkpoints: Path) -> Seen | None:
    """Validation loss and weights of a run before its first step."""
    with training(recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 99})})) as (engine, world):
        entry = choose(CheckpointStore(checkpoints), world).entry
        assert entry is not None
        assert resume(engine, entry, world).step == 0
        return seen(engine, world)


def seen(engine: Any, world: Any) -> Seen | None:
    with engine.params_synced():
        loss = engine.evaluate(loaders(engine.recipe, world), 1)
        weights = _whole_tensors(engine.weights(), world)
    return (loss, weights) if world.is_first else None


@pytest.mark.parametrize("variant", LAYOUTS)
def test_a_checkpoint_of_many_ranks_is_loaded_in_any_layout(
    variant: str, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    ours, other = (Row(variant, layout) for layout in LAYOUTS[variant])
    loss, weights = worlds[4].run(save, ours.recipe, tmp_path / "saved")
    recipe = write_recipe(ours.recipe, tmp_path)
    made = import_megatron(tmp_path / "saved", recipe, [], tmp_path / "runs", "made")
    for row in (ours, other):
        found: Seen = worlds[4].run(look, row.recipe, Path(made.run_dir) / "checkpoints")
        assert found[1].keys() == weights.keys()
        assert [name for name, value in weights.items() if value.tobytes() != found[1][name].tobytes()] == []
        assert found[0] == loss if row is ours else found[0] == pytest.approx(loss, rel=1e-5)
