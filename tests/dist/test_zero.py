"""What DeepSpeed's stages draw, keep, send and print."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import count
from typing import Any

import pytest

from benchmarks.ranks import counted
from benchmarks.traffic import Call
from benchmarks.zero_formulas import FP32, sent
from llmrecipes.engine.backends import backend
from llmrecipes.engine.core.model import philox
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.engine.deepspeed.partition import full_shape
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from tests.dist.table import ROWS
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld
from tests.helpers import ROOMY

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.deepspeed]


def recipe_of(variant: str, stage: int) -> Recipe:
    return next(
        row.recipe
        for row in ROWS
        if row.variant == variant and row.layout == "dp2" and row.engine == "deepspeed"
        if row.recipe.layout.zero is not None and row.recipe.layout.zero.stage == stage
    )


def test_stage_1_in_bf16_keeps_one_gradient_of_a_parameter_and_prints_nothing(worlds: dict[int, GlooWorld]) -> None:
    printed, kept = worlds[2].run(_gradients_besides_their_sum, recipe_of("gpt in bf16", 1))
    assert kept == []
    assert printed == ""


def _gradients_besides_their_sum(recipe: Recipe) -> tuple[str, list[str]]:
    """What a training step prints, and the parameters that still have a bf16 gradient when gradients are reduced."""
    kept: list[str] = []
    printed = io.StringIO()
    with redirect_stdout(printed), training(recipe) as (engine, world):
        seen = count()

        def see(*_: object) -> None:
            next(seen)
            kept.extend(name for name, _ in engine.named_tensors() if name.endswith(".grad"))

        engine.watch_gradients(see)
        engine.train_step(loaders(recipe, world))
        assert next(seen) == 1
    return printed.getvalue(), kept


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_sent_to_their_owner_alone(stage: int, worlds: dict[int, GlooWorld]) -> None:
    """2Ψ with a micro-batch a step, as in the paper; an all-reduce would make it 3Ψ."""
    parameters, volume = worlds[2].run(_sent_in_a_step, recipe_of("gpt", stage))
    assert volume == pytest.approx(sent(parameters, 2, stage, FP32), rel=0.05)


def _sent_in_a_step(recipe: Recipe) -> tuple[int, float]:
    one = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"global_batch_size": 2 * recipe.layout.micro_batch_size})}
    )
    with training(one) as (engine, world):
        batches = loaders(one, world)
        engine.train_step(batches)
        calls = counted(lambda: engine.train_step(batches))
        return engine.plan.num_parameters_on_rank, sum(Call(*call).volume for call in calls)


def test_a_rank_of_stage_3_draws_its_partition_and_nothing_for_a_checkpoint(worlds: dict[int, GlooWorld]) -> None:
    drawn, for_a_checkpoint, parameters = worlds[2].run(_drawn, recipe_of("gpt", 3))
    assert drawn == pytest.approx(parameters / 2, rel=0.01)
    assert for_a_checkpoint == 0


def _drawn(recipe: Recipe) -> tuple[int, int, int]:
    """Values that a rank draws for an engine that trains and for one that loads; elements of all matrices."""
    sizes: list[int] = []
    bits = philox.bits

    def watched(key: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Any:
        sizes.append(math.prod(size))
        return bits(key, shape, offset, size)

    platform, engines = select(), backend(recipe)
    with pytest.MonkeyPatch.context() as patch, model_parallel(recipe.train.seed, recipe.layout) as world:
        patch.setattr(philox, "bits", watched)
        plan = derive(recipe, world.size, ROOMY)
        engine = engines.build(plan, platform)
        shapes = [full_shape(parameter) for module in engine.modules for parameter in module.parameters()]
        engine.close()
        drawn = sum(sizes)
        engines.construct(plan, platform).close()
    return drawn, sum(sizes) - drawn, sum(math.prod(shape) for shape in shapes if len(shape) > 1)
