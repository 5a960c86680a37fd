"""The weights of a Hugging Face model reach every layout as they reach one process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.backends import backend
from llmrecipes.engine.core.platform import select
from llmrecipes.hf.weights import open_weights
from llmrecipes.models.importing import import_model
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.resume import choose, resume
from tests.dist.training import everything, model_parallel
from tests.dist.worlds import GlooWorld
from tests.hf_models import saved
from tests.unit.balance_worker import ROOMY

pytestmark = pytest.mark.dist

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gpt2", 2, PP2),
    ("qwen2", 2, TP2),
    ("mixtral", 2, {**EP2, "expert_tensor_parallel_size": 1}),
    ("deepseek_v3", 2, PP2),
    ("deepseek_v3", 4, {**TP2, **EP2, "expert_tensor_parallel_size": 1}),
)
ZERO: dict[str, Any] = {"layout": {"engine": "deepspeed", "zero": {"stage": 3}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in dict.fromkeys(kind for kind, _, _ in CASES):
        saved(kind, folder / kind)
    return folder


def imported(kind: str, models: Path, runs: Path, precision: str) -> tuple[Recipe, Path]:
    """A recipe for every layout here, and its imported run; the vocabulary has grown."""
    overrides = [
        "data.tokenizer.type=bpe", "model.vocab_size=400", f"train.precision={precision}", "train.global_batch_size=8",
    ]  # fmt: skip
    run = runs / kind / precision
    if not run.exists():
        import_model(str(models / kind), overrides, runs, precision)
    return load(str(run / "recipe.yaml")).recipe, run


def in_layout(recipe: Recipe, layout: dict[str, Any], **others: Any) -> Recipe:
    return Recipe.model_validate({**recipe.model_dump(mode="json"), "layout": layout, **others})


def from_folder(recipe: Recipe, folder: Path) -> dict[str, np.ndarray] | None:
    """What `train.pretrained` starts from: weights, master weights and moments."""
    with model_parallel(recipe.train.seed, recipe.layout) as world:
        weights = open_weights(folder, recipe.model)
        engine = backend(recipe).build(derive(recipe, world.size, ROOMY), select(), weights)
        found = everything(engine, world)
        engine.close()
    return found if world.is_first else None


def from_checkpoint(recipe: Recipe, run: Path) -> dict[str, np.ndarray] | None:
    """The same, of what `llmrecipes import` has written."""
    with model_parallel(recipe.train.seed, recipe.layout) as world:
        entry = choose(CheckpointStore(run / "checkpoints"), world).entry
        assert entry is not None
        engine = backend(recipe).construct(derive(recipe, world.size, ROOMY), select())
        assert resume(engine, entry, world).step == 0
        found = everything(engine, world)
        engine.close()
    return found if world.is_first else None


def require_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys() and len(one) > 20
    different = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not different, different


@pytest.mark.parametrize(("kind", "ranks", "layout"), CASES)
@pytest.mark.rotating
def test_every_layout_starts_from_the_weights_of_one_process(
    kind: str, ranks: int, layout: dict[str, Any], models: Path, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    recipe, run = imported(kind, models, tmp_path, "bf16")
    alone = worlds[1].run(from_folder, in_layout(recipe, {}), models / kind)
    apart = in_layout(recipe, layout)
    require_equal(worlds[ranks].run(from_folder, apart, models / kind), alone)
    require_equal(worlds[ranks].run(from_checkpoint, apart, run), alone)


@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_rank_of_stage_3_reads_its_partition(models: Path, worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    recipe, run = imported("qwen2", models, tmp_path, "bf16")
    alone = worlds[1].run(from_folder, in_layout(recipe, {}), models / "qwen2")
    apart = in_layout(recipe, {}, **ZERO)
    require_equal(worlds[2].run(from_folder, apart, models / "qwen2"), alone)
    require_equal(worlds[2].run(from_checkpoint, apart, run), alone)
