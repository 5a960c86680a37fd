"""Parameters by patterns of their names have another learning rate and weight decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmrecipes.engine.core.checkpoint.slices import sharded_parameters
from llmrecipes.engine.core.model.groups import group_of, names_of
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from tests.dist.table import Row
from tests.dist.training import training
from tests.dist.worlds import GlooWorld
from tests.helpers import engine_of, random_batches, tiny
from tests.refusals import refused

LR, DECAY, EPS = 1e-2, 0.1, 1e-8
GROUPS: list[dict[str, Any]] = [
    {"pattern": "embedding.*", "lr_mult": 0.1, "wd_mult": 0.0},
    {"pattern": "decoder.layers.0.*", "lr_mult": 0.0},
    {"pattern": "decoder.layers.*", "wd_mult": 3.0},
]


def recipe_with(groups: list[dict[str, Any]], **sections: Any) -> Recipe:
    return tiny(
        optimizer={"lr": LR, "weight_decay": DECAY, "clip_grad": 0.0, "groups": groups},
        scheduler={"lr_decay_style": "constant"}, **sections,
    )  # fmt: skip


@pytest.mark.usefixtures("world")
def test_an_update_is_that_of_adamw_with_the_groups_of_the_names() -> None:
    engine = engine_of(recipe_with(GROUPS))
    module = engine.modules[0]
    whole = names_of(sharded_parameters(module.sharded_state()))
    names = dict(module.named_parameters())
    assert all(whole[id(parameter)] == name for name, parameter in names.items())
    mine = {name: parameter.detach().clone().requires_grad_() for name, parameter in names.items()}
    factors = {0: (0.1, 0.0), 1: (0.0, 1.0), 2: (1.0, 3.0), None: (1.0, 1.0)}
    options = engine.recipe.optimizer
    reference = torch.optim.AdamW(
        [
            {
                "params": [value], "lr": LR * factors[group_of(name, options)][0],
                "weight_decay": DECAY * factors[group_of(name, options)][1] if value.dim() > 1 else 0.0,
            }
            for name, value in mine.items()
        ],
        betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps,
    )  # fmt: skip
    batches = random_batches(engine.recipe)
    for _ in range(3):
        engine.train_step(batches)
        gradients = {name: value.clone() for name, value in engine.named_tensors() if name.endswith(".grad")}
        for name, value in mine.items():
            value.grad = gradients[f"{name}.grad"].view_as(value)
        reference.step()
    for name, value in mine.items():
        torch.testing.assert_close(names[name].detach(), value.detach(), rtol=1e-5, atol=1e-7)
    engine.close()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("style", ["linear", "exponential"])
def test_groups_keep_their_share_of_the_rate_in_warm_up_and_decay(style: str) -> None:
    schedule = {"lr_warmup_iters": 3, "lr_warmup_init": 1e-4, "lr_warmup_style": style, "lr_decay_iters": 8}
    recipe = tiny(optimizer={"lr": LR, "min_lr": 1e-3, "groups": GROUPS}, scheduler=schedule)
    engine = engine_of(recipe)
    for _ in range(10):
        rates = {group["lr_mult"]: group["lr"] for group in engine.optimizer.param_groups if group["params"]}
        assert rates == pytest.approx({factor: factor * engine.learning_rate for factor in (0.0, 0.1, 1.0)})
        engine.scheduler.step(increment=1)
    engine.close()


def test_a_parameter_belongs_to_the_first_pattern() -> None:
    options = recipe_with(GROUPS).optimizer
    assert group_of("decoder.layers.0.mlp.linear_fc1.weight", options) == 1
    assert group_of("decoder.layers.1.mlp.linear_fc1.weight", options) == 2
    assert group_of("decoder.final_layernorm.weight", options) is None


def moved(recipe: Recipe) -> dict[str, bool]:
    """Whether each parameter of the whole model has changed after two steps."""
    with training(recipe) as (engine, world):

        def values() -> dict[str, torch.Tensor]:
            with engine.params_synced():
                return {f"{weight.name} {weight.offset}": weight.tensor.clone() for weight in engine.weights()}

        before = values()
        batches = random_batches(recipe, rank=world.data_parallel_rank, ranks=world.data_parallel_size)
        for _ in range(2):
            engine.train_step(batches)
        after = values()
        found = {name: not torch.equal(before[name], after[name]) for name in before}
        everyones: list[dict[str, bool]] = [{}] * world.size
        torch.distributed.all_gather_object(everyones, found)
        return {name: value for everyone in everyones for name, value in everyone.items()}


STILL = {"optimizer": {"groups": [{"pattern": "decoder.layers.[02].mlp.*", "lr_mult": 0.0}]}}


@pytest.mark.dist
@pytest.mark.parametrize(
    "row",
    [
        Row("gpt", "tp2 pp2", STILL),
        Row("gpt in bf16", "dp2", STILL),
        pytest.param(
            Row("gpt", "dp2", {**STILL, "layout": {"zero": {"stage": 2}}}, engine="deepspeed"),
            marks=[pytest.mark.deepspeed, pytest.mark.slow],
        ),
    ],
    ids=lambda row: row.name,
)
def test_names_are_those_of_the_whole_model_in_every_layout(row: Row, worlds: dict[int, GlooWorld]) -> None:
    found = worlds[row.ranks].run(moved, row.recipe)
    for name, has_moved in found.items():
        if ".mlp." in name and "layer_norm" not in name and ("[0]" in name or "[2]" in name):
            assert not has_moved, name
        elif "linear_fc1.weight" in name or "linear_qkv.weight" in name:
            assert has_moved, name
    assert len({name for name in found if "linear_fc1.weight[2]" in name}) >= 1


def refusal(recipe: Recipe) -> str:
    """What a rank says of a pattern that has no parameter on any."""
    try:
        with training(recipe):
            return "built"
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'where', '')}"


@pytest.mark.dist
def test_a_pattern_that_matches_nothing_is_refused_on_every_rank(worlds: dict[int, GlooWorld]) -> None:
    row = Row("gpt", "pp2", {"optimizer": {"groups": [{"pattern": "decoder.layers.9.*", "lr_mult": 0.0}]}})
    assert worlds[2].run(refusal, row.recipe) == "UserError optimizer.groups.0.pattern"


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("optimizer.groups.0", ["optimizer.groups=[{pattern: 'embedding.*'}]"]),
        ("optimizer.groups.1.pattern", ["optimizer.groups=[{pattern: '*', lr_mult: 0}, {pattern: '*', lr_mult: 2}]"]),
        ("optimizer.groups.0.pattern", ["optimizer.groups=[{pattern: 'decoder.layers.9.*', lr_mult: 0}]"]),
        ("optimizer.groups.1.pattern", ["optimizer.groups=[{pattern: '*', wd_mult: 0}, {pattern: 'e*', lr_mult: 2}]"]),
        ("optimizer.groups", ["optimizer.groups=[{pattern: '*', lr_mult: 0}]", "model.use_mup=true"]),
        ("optimizer.groups.0.lr_mult", ["optimizer.groups=[{pattern: '*', lr_mult: -1}]"]),
    ],
)
def test_groups_that_contradict_are_refused(key: str, overrides: list[str]) -> None:
    with refused(key):
        load("gpt-tiny", overrides)
