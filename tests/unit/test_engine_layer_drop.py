"""Layers that are left out at random: a step is plain PyTorch's, and the decisions are those of a step in any run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.parts.layer_drop import keeps, rate
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from tests.helpers import engine_of, random_batches, steps, tiny
from tests.refusals import refused
from tests.unit.test_checkpoint_optimizer_state import saved

pytestmark = pytest.mark.usefixtures("world")

LAST = 0.6


def dropping(**sections: Any) -> Recipe:
    model = {"num_layers": 4, **sections.pop("model", {})}
    return tiny(model={**model, "layer_drop": LAST}, optimizer={"lr": 1e-2, "clip_grad": 0.0}, **sections)


def plain(engine: MegatronEngine, step: int) -> tuple[float, float, int]:
    """Loss and gradient norm of a step, layer by layer, of a model that has all of them; and the layers left out."""
    (module,) = engine.modules
    seed, total, tokens, left_out = engine.recipe.train.seed, torch.zeros(()), 0.0, 0
    for number, batch in enumerate(islice(random_batches(engine.recipe), engine.plan.num_microbatches)):
        hidden = module.embedding(batch["tokens"], batch["position_ids"])
        for layer in module.decoder.layers:
            probability = LAST * layer.layer_number / 4
            if keeps(seed, step, layer.layer_number, number, probability):
                output, _ = layer(hidden_states=hidden, attention_mask=None)
                hidden = hidden + (output - hidden) / (1 - probability)
            else:
                left_out += 1
        logits = module.output_layer(module.decoder.final_layernorm(hidden), module.shared_embedding_or_output_weight())
        losses = F.cross_entropy(logits[0].transpose(0, 1).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        total = total + (losses * batch["loss_mask"].flatten()).sum()
        tokens += float(batch["loss_mask"].sum())
    gradients = torch.autograd.grad(
        total / tokens, [parameter for parameter in module.parameters() if parameter.requires_grad]
    )
    return total.item() / tokens, float(torch.stack([gradient.norm() for gradient in gradients]).norm()), left_out


@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_step_is_that_of_plain_pytorch(recompute: str | None) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recipe = dropping(layout=full if recompute else {})
    whole = engine_of(recipe.model_copy(update={"model": recipe.model.model_copy(update={"layer_drop": 0.0})}))
    loss, norm, left_out = plain(whole, 1)
    assert left_out > 1
    engine = engine_of(recipe)
    held_out = engine.evaluate(random_batches(recipe), 1)
    assert held_out == whole.evaluate(random_batches(recipe), 1), "an evaluation has all layers"
    result = engine.train_step(random_batches(recipe))
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_layers_are_left_out_as_often_as_the_recipe_says() -> None:
    for layer in (1, 4):
        expected = rate(LAST, layer, 4)
        out = [not keeps(1, step, layer, number, expected) for step in range(100) for number in range(40)]
        assert sum(out) / len(out) == pytest.approx(LAST * layer / 4, abs=0.03)


def test_a_resumed_run_leaves_out_the_same_layers(tmp_path: Path) -> None:
    recipe = dropping()
    engine = engine_of(recipe)
    batches = random_batches(recipe)
    steps(engine, 1, batches)
    entry = saved(engine, tmp_path)
    after = steps(engine, 2, batches)
    resumed = engine_of(recipe)
    resumed.load_state(entry)
    assert steps(resumed, 2, random_batches(recipe, consumed=8)) == after


def test_the_passes_of_moved_embeddings_have_the_same_layers() -> None:
    """An epsilon of nothing: the second loss is the first."""
    keys = {"adversarial": {"type": "fgm", "epsilon": 1e-30}}
    once, twice = (engine_of(dropping(train=each)) for each in ({}, keys))
    assert twice.train_step(random_batches(twice.recipe)).loss == pytest.approx(
        once.train_step(random_batches(once.recipe)).loss, rel=1e-6
    )


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "always": ("gpt-tiny", ["model.layer_drop=1.0"], "model.layer_drop"),
    "layout.engine": ("gpt-tiny-zero", [], "model.layer_drop"),
    "pairs": ("dpo-tiny", [], "dpo"),
    "experts": ("moe-tiny", [], "model.num_moe_experts"),
    "overlap": ("gpt-tiny", ["layout.overlap_grad_reduce=true"], "layout.overlap_grad_reduce"),
    "compiled": ("gpt-tiny", ["layout.torch_compile=true"], "layout.torch_compile"),
    "graphs": ("llama3-8b", ["layout.cuda_graph_impl=transformer_engine"], "layout.cuda_graph_impl"),
    "fp8": ("llama3-8b", ["train.fp8=e4m3"], "train.fp8"),
}


@pytest.mark.parametrize(("name", "keys", "key"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_leave_layers_out_is_refused(name: str, keys: list[str], key: str) -> None:
    with refused(key):
        load(name, ["model.layer_drop=0.1", *keys])
