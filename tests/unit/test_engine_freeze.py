"""Frozen parameters have no gradient and no state, and the others are trained as without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.former import ADAMW
from llmrecipes.engine.core.checkpoint.slices import sharded_parameters
from llmrecipes.engine.core.model.groups import names_of
from llmrecipes.plan.derive import derive
from llmrecipes.plan.layout import layout
from llmrecipes.plan.parameters import count_frozen_on_rank, count_on_rank
from llmrecipes.recipe.derived.freezing import frozen, kept, parameters
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import load
from tests.dist.table import VARIANTS, Row, make
from tests.dist.training import compare, go_on, save_midway
from tests.dist.worlds import GlooWorld
from tests.helpers import ROOMY, engine_of, random_batches, steps, tiny
from tests.refusals import refused

PATTERNS = ["embedding.*", "decoder.layers.0.*", "*.linear_fc1.bias"]
LR, CLIP = 1e-2, 0.5


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full", "recompute_method": "uniform"}])
def test_a_step_is_that_of_adamw_with_what_is_not_frozen(recompute: dict[str, Any]) -> None:
    recipe = tiny(
        train={"freeze": PATTERNS}, layout={**recompute, **({"recompute_num_layers": 1} if recompute else {})},
        optimizer={"lr": LR, "clip_grad": CLIP}, scheduler={"lr_decay_style": "constant"},
    )  # fmt: skip
    engine, whole = engine_of(recipe), engine_of(tiny())
    names = dict(engine.modules[0].named_parameters())
    still = {name for name in names if name in frozen(recipe)}
    assert 0 < len(still) < len(names)
    before = {name: each.detach().clone() for name, each in names.items()}
    mine = {name: value.clone().requires_grad_() for name, value in before.items() if name not in still}
    options = recipe.optimizer
    reference = torch.optim.AdamW(
        [
            {"params": [value], "weight_decay": options.weight_decay if value.dim() > 1 else 0.0}
            for value in mine.values()
        ],
        lr=LR, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps,
    )  # fmt: skip
    batches, others = random_batches(recipe), random_batches(recipe)
    for _ in range(2):
        # The gradients of a model of which nothing is frozen, with the same weights.
        with torch.no_grad():
            for name, each in whole.modules[0].named_parameters():
                each.copy_(names[name])
        whole.train_step(others, accept=lambda _loss, _norm: False)
        full = dict(whole.named_tensors())
        for name, value in mine.items():
            value.grad = full[f"{name}.grad"].clone().view_as(value)
        norm = torch.nn.utils.clip_grad_norm_(mine.values(), CLIP)
        assert engine.train_step(batches).grad_norm == pytest.approx(float(norm), rel=1e-5)
        reference.step()
    for name, each in names.items():
        if name in still:
            assert each.equal(before[name]) and each.grad is None and not hasattr(each, "main_grad"), name
        else:
            torch.testing.assert_close(each.detach(), mine[name].detach(), rtol=1e-5, atol=1e-7)
    owned = sum(tensor.numel() for tensor in engine.model_states()["optimizer"])
    assert owned == 2 * sum(value.numel() for value in mine.values())


TOGETHER: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"optimizer": "sgd"}, "layout": {"use_distributed_optimizer": False}},
    "moved embeddings": {"train": {"adversarial": {"type": "fgm", "epsilon": 0.5}}},
    "left out layers": {"model": {"layer_drop": 0.5}},
    "bounded logits": {"optimizer": {"qk_clip": True, "qk_clip_threshold": 1e-3}},
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("sections", TOGETHER.values(), ids=TOGETHER)
def test_what_is_frozen_stays_with_other_changes_of_training(sections: dict[str, Any]) -> None:
    together: Any = {**sections, "train": {"freeze": PATTERNS, **sections.get("train", {})}}
    recipe = tiny(**together)
    engine = engine_of(recipe)
    before = {name: each.detach().clone() for name, each in engine.modules[0].named_parameters()}
    steps(engine, 2)
    still = {name for name, each in engine.modules[0].named_parameters() if each.equal(before[name])}
    assert still == set(frozen(recipe))
    owned = sum(tensor.numel() * tensor.element_size() for tensor in engine.model_states()["optimizer"])
    assert owned == engine.plan.memory.optimizer


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("variant", ["gpt with more weights", "llama", "deepseek", "mla with more weights", "moe"])
def test_names_and_counts_are_those_of_the_model(variant: str) -> None:
    recipe = make(VARIANTS[variant], {"model": {"mtp_num_layers": None}})
    module = engine_of(recipe).modules[0]
    known = names_of(sharded_parameters(module.sharded_state()))
    built = {known[id(parameter)]: tuple(parameter.shape) for parameter in module.parameters()}
    assert built == parameters(recipe.model)


@pytest.mark.parametrize("variant", ["gpt with more weights", "llama", "deepseek", "mla with more weights", "moe"])
@pytest.mark.parametrize("degrees", ["tp2 sp pp2", "pp2 vpp2", "dp2", "tp2 sp pp2 dp2 ep2 etp1"])
def test_a_rank_has_its_share_of_what_is_frozen(variant: str, degrees: str) -> None:
    if "tp2" in degrees and ("ep2" in degrees) != (variant in ("deepseek", "moe")):
        return
    row = Row(variant, degrees, {"model": {"mtp_num_layers": None}})
    recipe, s = row.recipe, shape(row.recipe.model)
    laid_out = layout(recipe, row.ranks, ROOMY)
    for stage in range(laid_out.pipeline_model_parallel_size):
        for device in ("cpu", "cuda"):
            every = count_frozen_on_rank(
                parameters(recipe.model), recipe.model, s, laid_out, stage, split_down=device == "cpu"
            )
            assert every == count_on_rank(recipe.model, s, laid_out, stage, device)


def test_the_plan_has_no_gradients_and_no_state_of_frozen_weights() -> None:
    full = load("gpt-1b").recipe
    part = load("gpt-1b", ["train.freeze=['embedding.*', 'decoder.layers.?.*']"]).recipe
    before, after = (derive(each, full.layout.tensor_model_parallel_size, ROOMY) for each in (full, part))
    still = sum(int(np.prod(size)) for size in frozen(part).values())
    assert still > 0.3 * before.num_parameters.total
    share = 1 - still / before.num_parameters.total
    assert after.memory.weights == before.memory.weights
    assert after.memory.gradients == pytest.approx(share * before.memory.gradients, rel=0.01)
    assert after.memory.optimizer == pytest.approx(share * before.memory.optimizer, rel=0.01)
    assert after.checkpoint_bytes < before.checkpoint_bytes
    assert after.flops_per_token_full < before.flops_per_token_full


@pytest.mark.parametrize(
    ("key", "rule", "overrides"),
    [
        ("train.freeze.1", (), ["train.freeze=['embedding.*', 'decoder.layers.7.*']"]),
        ("train.freeze", (), ["train.freeze=['*']"]),
        ("train.freeze", (), ["train.freeze=['*.linear_qkv.weight']", "model.add_qkv_bias=true"]),
        ("optimizer.ema_decay", (), ["train.freeze=['embedding.*']", "optimizer.ema_decay=0.9"]),
        ("model.mtp_num_layers", (), ["train.freeze=['embedding.*']", "model.mtp_num_layers=1"]),
        ("lora", "train.freeze", ["train.freeze=['embedding.*']", "lora.rank=4", "lora.alpha=8"]),
        ("layout.engine", "layout.zero.stage", ["train.freeze=['embedding.*']", "layout.zero.stage=2"]),
        ("train.freeze.0", (), [
            "stages=[{name: a, train_iters: 300, train: {freeze: ['encoder.*']}}, {name: b}]", "search=null",
        ]),
    ],
)  # fmt: skip
def test_what_cannot_be_frozen_is_refused_with_the_recipe(key: str, rule: str, overrides: list[str]) -> None:
    with refused(key, rule=rule):
        load("gpt-tiny", [*ADAMW, *overrides])


def test_a_pipeline_stage_that_trains_nothing_has_no_loss_scale() -> None:
    half = {"train": {"freeze": ["embedding.*", "decoder.layers.[01].*"]}}
    with refused("train.freeze", rule="0"):
        derive(Row("gpt in fp16", "pp2", half).recipe, 2, ROOMY)
    assert derive(Row("gpt in bf16", "pp2", half).recipe, 2, ROOMY).memory.gradients > 0


def test_a_rehearsal_keeps_the_patterns_that_its_model_has() -> None:
    model = tiny().model
    assert kept(("embedding.*", "decoder.layers.30.*"), model) == ("embedding.*",)
    assert kept(("embedding.*", "decoder.*"), model) == ()


THAWED = {"train": {"freeze": ["embedding.*"]}}


@pytest.mark.dist
@pytest.mark.rotating
@pytest.mark.parametrize(
    "variant", ["gpt with frozen weights", pytest.param("moe with frozen weights", marks=pytest.mark.slow)]
)
def test_what_is_no_longer_frozen_goes_on_alike_in_every_layout(
    variant: str, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    """As at the boundary of a stage that freezes less."""
    saved = Row(variant, "tp2 sp ep2 etp1" if "moe" in variant else "tp2 sp").recipe
    worlds[2].run(save_midway, saved, tmp_path / "checkpoint")
    one = worlds[1].run(go_on, Row(variant, "dp1", THAWED).recipe, tmp_path / "checkpoint")
    for degrees in ("dp2", "pp2"):
        other = worlds[2].run(go_on, Row(variant, degrees, THAWED).recipe, tmp_path / "checkpoint")
        # Moments that the checkpoint does not have are not restored.
        assert compare(replace(other, lost=[]), replace(one, lost=[])).largest <= 1e-5
