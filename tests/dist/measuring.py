"""Ranks that measure the layers of a step. A job of every rank of a joined world."""

from __future__ import annotations

from llmrecipes.engine.meters import LayerMeasurements
from llmrecipes.engine.parts.layer_norms import LayerNorms
from tests.dist.table import Row
from tests.dist.training import loaders, training

INTERVAL = {"tracking": {"layers_interval": 1}}


def measured(row: Row) -> tuple[list[LayerMeasurements | None], list[float | None]]:
    """What two measured steps and one more report of layers, and their gradient norms."""
    with training(row.recipe) as (engine, world):
        batches = loaders(row.recipe, world)
        found, norms = [], []
        for step in range(3):
            if step < 2:
                engine.parts.the(LayerNorms).start()
            result = engine.train_step(batches)
            fields = engine.parts.the(LayerNorms).fields(None)
            found.append(LayerMeasurements(**fields) if fields else None)
            norms.append(result.grad_norm)
    return found, norms
