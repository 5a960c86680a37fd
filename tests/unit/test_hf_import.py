"""Models of transformers become runs that compute the same, and leave again with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.engine.megatron.backend import MegatronBackend
from llmrecipes.engine.megatron.checkpoint.loader import load
from llmrecipes.engine.megatron.model.gpt import RecipeGPTModel, build, construct
from llmrecipes.engine.megatron.platform import select
from llmrecipes.engine.megatron.state import load_model, model_state
from llmrecipes.engine.megatron.world import join
from llmrecipes.hf.family import family_of
from llmrecipes.hf.views import AsHuggingFace
from llmrecipes.hf.weights import open_weights
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load as load_recipe
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.importing import import_model
from tests.hf_models import CONFIGS, LENGTH, VOCABULARY, saved
from tests.unit.balance_worker import ROOMY

BPE = "data.tokenizer.type=bpe"
FP32 = "train.precision=fp32"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def opened(run_dir: Path) -> tuple[Recipe, Entry]:
    (entry,) = CheckpointStore(run_dir / "checkpoints").entries()
    return load_recipe(str(run_dir / "recipe.yaml")).recipe, entry


def loaded(recipe: Recipe, entry: Entry) -> RecipeGPTModel:
    built = construct(derive(recipe, 1, ROOMY), select())
    load_model(built.modules, load(entry, model_state(built.modules)))
    return built.module


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_import_computes_the_same_and_leaves_with_the_same_bytes(kind: str, models: Path, tmp_path: Path) -> None:
    theirs = saved(kind, models / kind)
    made = import_model(str(models / kind), [BPE, FP32], tmp_path, "a")
    recipe, entry = opened(Path(made.run_dir))
    assert made.model_type == kind and made.new_rows == 384 - VOCABULARY
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    with join(select(), recipe.train.seed, recipe.parallelism), torch.no_grad():
        ours = loaded(recipe, entry)
        logits = ours.eval()(tokens, torch.arange(LENGTH).expand(2, -1), None)
        expected = theirs(tokens).logits
        assert float((logits[..., :VOCABULARY] - expected).norm() / expected.norm()) < 1e-5
        # Rows of padding have the mean of the others' logits.
        assert logits[..., VOCABULARY:].sub(expected.mean(-1, keepdim=True)).abs().max() < 1e-4
        given = open_weights(models / kind, recipe.model)
        straight = build(derive(recipe, 1, ROOMY), select(), given).module
        for name, value in ours.state_dict().items():
            assert value is None or value.equal(straight.state_dict()[name]), name
    source = AsHuggingFace(MegatronBackend().tensors(entry), family_of(recipe.model, kind), recipe.model)
    original = load_file(models / kind / "model.safetensors")
    assert set(source.names()) == set(original)
    for name, value in original.items():
        assert source.read(name).equal(value), name
