"""What a reference and a teacher say is that of one process in every layout, and so is the training that reads it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrecipes.data.folder.prepared import open_prepared
from llmrecipes.data.prepare import prepare
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.recipe.rules.preference_rules import with_frozen_model
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.loaders import open_loaders
from llmrecipes.workflow.precompute import REQUEST, PrecomputeSpec, compute, work_folder
from tests.dist.training import training
from tests.dist.worlds import GlooWorld
from tests.unit.test_precompute import pairs, preferring, taught

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 3
LAYOUTS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "tp2 sp pp2": (4, True, {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}),
    "dp2 cp2": (4, False, {"context_parallel_size": 2}),
}  # fmt: skip
"""Ranks, packing, degrees."""


def computed(recipe: Recipe, data_dir: Path, folder: Path) -> None:
    (work_folder(folder) / "parts").mkdir(parents=True, exist_ok=True)
    (work_folder(folder) / REQUEST).write_text(json.dumps({"facts": {}}))
    live = with_frozen_model(recipe)
    with model_parallel(recipe.train.seed, recipe.layout) as world:
        compute(
            PrecomputeSpec(recipe=live, data_dir=data_dir, folder=folder, frozen=None, on_gpus=False), select(), world
        )


def losses(recipe: Recipe, data_dir: Path) -> list[tuple[float, float | None]]:
    with training(recipe) as (engine, world):
        loaders = open_loaders(recipe, open_prepared(recipe, data_dir), world, pin_memory=False)
        with closing(loaders.train(0)) as batches:
            steps = [engine.train_step(batches) for _ in range(STEPS)]
            return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize(("ranks", "packing", "degrees"), LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_training_are_those_of_one_process(
    ranks: int, packing: bool, degrees: dict[str, Any], worlds: dict[int, GlooWorld], tmp_path: Path, data_dir: Path
) -> None:
    source = pairs(tmp_path)
    model = {"num_layers": 4}
    one = preferring(source, tmp_path / "one", packing=packing, model=model)
    prepare(one, data_dir)
    worlds[1].run(computed, one, data_dir, tmp_path / "one")
    read = preferring(source, tmp_path / "many", packing=packing, model=model, layout=degrees)
    worlds[ranks].run(computed, read, data_dir, tmp_path / "many")
    names = sorted(path.name for path in (tmp_path / "one").glob("*.npy"))
    assert len(names) == 2
    for name in names:
        alone, together = np.load(tmp_path / "one" / name), np.load(tmp_path / "many" / name)
        np.testing.assert_allclose(together, alone, rtol=1e-5)
    live = preferring(source, packing=packing, model=model, layout=degrees)
    values = [worlds[ranks].run(losses, recipe, data_dir) for recipe in (read, live)]
    values.append(worlds[1].run(losses, one, data_dir))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)
    np.testing.assert_allclose(values[0], values[2], rtol=1e-5)


@pytest.mark.parametrize(("ranks", "packing", "degrees"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_student_is_the_one_with_its_teacher(
    ranks: int, packing: bool, degrees: dict[str, Any], worlds: dict[int, GlooWorld], tmp_path: Path, corpus: Path,
    data_dir: Path,
) -> None:  # fmt: skip
    wide = {"hidden_size": 96, "init_method_std": 0.2}
    one = taught(corpus, "student", tmp_path / "one", model={"num_layers": 4}, distill={"model": wide})
    prepare(one, data_dir)
    worlds[1].run(computed, one, data_dir, tmp_path / "one")
    read, live = (
        taught(corpus, "student", folder, model={"num_layers": 4}, distill={"model": wide}, layout=degrees)
        for folder in (tmp_path / "many", None)
    )
    worlds[ranks].run(computed, read, data_dir, tmp_path / "many")
    values = [worlds[ranks].run(losses, recipe, data_dir) for recipe in (read, live)]
    values.append(worlds[1].run(losses, one, data_dir))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)
    np.testing.assert_allclose(values[0], values[2], rtol=1e-5)
