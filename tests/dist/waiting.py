"""What ranks of a layout wait for in an optimizer step. Jobs of every rank of a joined world."""

from __future__ import annotations

import pytest
from megatron.core.pipeline_parallel import schedules

from llmrecipes.engine.base import Engine
from llmrecipes.engine.parts.gradient_check import GradientCheck
from llmrecipes.engine.parts.layer_norms import LayerNorms
from llmrecipes.recipe.schema import Recipe
from tests.dist.training import loaders, training
from tests.waits import waits


def waits_of_a_step(
    recipe: Recipe, package: str = "", *, compared: bool = False
) -> tuple[list[str], list[tuple[int, int]]]:
    """Waits of the first rank's second step (see `waits`), and the elements that its stage's outputs had and keep.

    Args:
        compared: gradients are compared in this step, as in the first.
    """
    freed: list[tuple[int, int]] = []
    deallocate = schedules.deallocate_output_tensor

    def counted(output: object, *options: bool) -> None:
        before = getattr(output, "numel", lambda: 0)()
        deallocate(output, *options)
        if before:
            freed.append((before, output.numel()))  # type: ignore[attr-defined]

    with training(recipe) as (engine, world), pytest.MonkeyPatch.context() as patch:
        batches = loaders(recipe, world)
        ready = iter([next(batches) for _ in range(2 * engine.plan.num_microbatches)])  # loaders read on the host
        _measure_layers(engine)
        engine.train_step(ready)
        _measure_layers(engine)
        engine.parts.the(GradientCheck).due = compared
        patch.setattr(schedules, "deallocate_output_tensor", counted)
        with waits(package) as found:
            engine.train_step(ready)
    return found, freed


def _measure_layers(engine: Engine) -> None:
    for part in engine.parts:
        if isinstance(part, LayerNorms):
            part.start()
