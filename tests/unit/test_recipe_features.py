"""Features of the section `speed`: chosen by rule for a machine, or refused where they are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.features import FEATURES, Choice, Target, resolve
from llmrecipes.recipe.rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speed import Speed
from tests.helpers import LLAMA, ROOMY, tiny
from tests.refusals import refused

GPU = Target("cuda", transformer_engine=True, version=(2, 9))
LOCAL = Target("cuda", transformer_engine=False)
CPU = Target("cpu", transformer_engine=False)
NODE = replace(ROOMY, gpus=(DetectedGpu("NVIDIA H100", 1 << 40, 1 << 40, None),) * 8)
BF16: dict[str, Any] = {"train": {"precision": "bf16"}}


def chosen(recipe: Recipe, target: Target) -> dict[str, Choice]:
    return {choice.key.removeprefix("speed."): choice for choice in resolve(recipe, target)}


def on(recipe: Recipe, target: Target) -> set[str]:
    return {name for name, choice in chosen(recipe, target).items() if choice.on}


def test_every_key_is_a_feature() -> None:
    assert list(FEATURES) == list(Speed.model_fields)


def test_fusions_need_a_gpu_with_a_compiler() -> None:
    llama, fusions = tiny(model=LLAMA), {"bias_activation_fusion", "bias_dropout_fusion"}
    assert on(llama, GPU) & fusions == {"bias_activation_fusion"}
    assert on(llama, LOCAL) & fusions == {"bias_activation_fusion"}
    assert on(tiny(model={"hidden_dropout": 0.1}), GPU) & fusions == {"bias_dropout_fusion"}
    assert not on(llama, replace(GPU, no_compiler="no C compiler")) & fusions
    assert not on(llama, CPU) & fusions
    assert on(tiny(model=LLAMA, train={"torch_compile": True}), CPU) & fusions == fusions


def test_what_transformer_engine_has_needs_its_layers() -> None:
    names = {"apply_rope_fusion", "gradient_accumulation_fusion"}
    assert on(tiny(model=LLAMA), GPU) & names == names
    assert not on(tiny(model=LLAMA), LOCAL) & names


def test_a_key_that_a_recipe_rules_out_is_refused() -> None:
    (problem,) = check(tiny(speed={"bias_activation_fusion": True}))
    assert problem.key == "speed.bias_activation_fusion"
    assert not check(tiny(speed={"bias_activation_fusion": False}))
    assert not check(tiny(model=LLAMA, speed={"bias_activation_fusion": True}))


@pytest.mark.parametrize(("cluster", "train"), [(ROOMY, BF16["train"]), (NODE, {"precision": "fp32"})])
def test_a_key_that_a_machine_cannot_give_is_refused_by_the_plan(cluster: Cluster, train: dict[str, Any]) -> None:
    recipe = tiny(model=LLAMA, train=train, speed={"apply_rope_fusion": True})
    assert not check(recipe)
    with refused("speed.apply_rope_fusion"):
        derive(recipe, 1, cluster)
    assert derive(tiny(model=LLAMA, speed={"apply_rope_fusion": True}, **BF16), 1, NODE).fits


def test_a_plan_has_every_feature_and_its_reason() -> None:
    planned = derive(tiny(model=LLAMA, **BF16), 1, NODE).as_dict()["speed"]
    assert [choice["key"] for choice in planned] == [f"speed.{name}" for name in FEATURES]
    assert all(choice["reason"] for choice in planned)


def test_a_fused_activation_keeps_less() -> None:
    fused, unfused = (
        derive(tiny(model=LLAMA, speed={"bias_activation_fusion": value}, **BF16), 1, NODE).memory.activations
        for value in (True, False)
    )
    assert fused < unfused
