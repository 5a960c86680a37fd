"""`train.fp8`: what it needs, which scaling a rule chooses, and what it changes in a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.plan.derive import derive
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import FeatureChoice, SpeedTarget, resolve
from llmrecipes.recipe.speedups.fp8 import FP8
from llmrecipes.recipe.variants.proxy import proxy
from tests.helpers import LLAMA, ROOMY, tiny
from tests.refusals import refused

HOPPER = SpeedTarget("cuda", transformer_engine=True, version=(2, 9), capability=(9, 0), cuda=(13, 0))
BLACKWELL = replace(HOPPER, capability=(10, 0))


def of(fp8: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    """A recipe with fp8."""
    sections["model"] = {**LLAMA, "ffn_hidden_size": 192, **sections.get("model", {})}
    sections["train"] = {"precision": "bf16", "fp8": "e4m3", **sections.get("train", {}), **(fp8 or {})}
    return tiny(**sections)


def node(gpu: str, number: int = 8) -> Cluster:
    return replace(ROOMY, gpus=(DetectedGpu(f"NVIDIA {gpu}", 1 << 40, 1 << 40, None),) * number)


def choice(recipe: Recipe, target: SpeedTarget, name: str) -> FeatureChoice:
    return next(each for each in resolve(recipe, target) if each.key == f"train.{name}")


def test_the_scaling_is_chosen_for_the_gpu() -> None:
    assert choice(of(), HOPPER, "fp8_recipe").value == "blockwise"
    assert choice(of(), BLACKWELL, "fp8_recipe").value == "mxfp8"
    assert choice(of(), replace(HOPPER, cuda=(12, 8)), "fp8_recipe").value == "tensorwise"
    assert choice(tiny(model=LLAMA, train={"precision": "bf16"}), HOPPER, "fp8_recipe").value is None
    assert choice(of(model={"ffn_hidden_size": 176}), BLACKWELL, "fp8_recipe").value == "blockwise"


@pytest.mark.parametrize(
    ("key", "speed", "target"),
    [
        ("fp8", {}, replace(HOPPER, capability=(8, 0))),
        ("fp8", {}, replace(HOPPER, transformer_engine=False)),
        ("fp8", {}, replace(HOPPER, version=(2, 5))),
        ("fp8_recipe", {"fp8_recipe": "mxfp8"}, HOPPER),
        ("fp8_recipe", {"fp8_recipe": "blockwise"}, replace(HOPPER, cuda=(12, 8))),
    ],
)
def test_what_a_machine_cannot_give_is_refused(key: str, speed: dict[str, Any], target: SpeedTarget) -> None:
    recipe = of(speed)
    assert not check(recipe)
    found = choice(recipe, target, key)
    assert found.refused and found.value is None
    assert not [each for each in resolve(recipe, HOPPER if not speed else BLACKWELL) if each.refused]


def test_a_plan_for_another_machine_is_refused() -> None:
    for cluster in (ROOMY, node("A100-SXM4-80GB")):
        with refused("train.fp8"):
            derive(of(), 1, cluster)
    with refused("train.fp8_recipe", rule="10.0"):
        derive(of({"fp8_recipe": "mxfp8"}), 1, node("H100 80GB HBM3"))
    planned = {each["key"]: each["value"] for each in derive(of(), 1, node("B200")).as_dict()["speed"]}
    assert (planned["train.fp8"], planned["train.fp8_recipe"]) == ("e4m3", "mxfp8")


@pytest.mark.parametrize(
    ("key", "speed", "sections"),
    [
        ("fp8", {}, {"train": {"precision": "fp16"}}),
        ("fp8", {}, {"model": {"seq_length": 24}, "layout": {"micro_batch_size": 1}}),
        ("fp8", {}, {"model": {"ffn_hidden_size": 168}}),
        ("fp8", {}, {"model": {"ffn_hidden_size": 176}, "layout": {"tensor_model_parallel_size": 2}}),
        ("fp8", {}, {"lora": {"rank": 4}}),
        ("fp8", {}, {"layout": {"zero": {"stage": 2}, "engine": "deepspeed"}}),
        ("fp8", {"fp8_recipe": "mxfp8"}, {"model": {"ffn_hidden_size": 176}}),
        ("fp8_recipe", {"fp8_recipe": "delayed"}, {}),
        ("fp8_recipe", {"fp8": None, "fp8_recipe": "tensorwise"}, {}),
        ("first_last_layers_bf16", {"fp8": None, "first_last_layers_bf16": True}, {}),
        ("num_layers_at_end_in_bf16", {"num_layers_at_end_in_bf16": 1}, {}),
        ("num_layers_at_start_in_bf16", {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 3}, {}),
    ],
)
def test_what_no_machine_can_give_is_a_problem_of_the_recipe(
    key: str, speed: dict[str, Any], sections: dict[str, Any]
) -> None:
    engine = sections.pop("engine", None)
    recipe = of(speed, **sections)
    recipe = recipe if engine is None else recipe.with_layout(engine=engine)
    assert f"train.{key}" in [problem.key for problem in check(recipe)]
    assert not check(of({"fp8_recipe": "mxfp8"}))


def test_inputs_of_products_take_a_byte_and_weights_two_more() -> None:
    plain = derive(of({"fp8": None}), 1, node("H100")).memory
    fp8 = derive(of(), 1, node("H100")).memory
    assert fp8.activations < plain.activations
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 192
    assert fp8.weights - plain.weights == 2 * layer * 2 * 33 // 32
    tokens, one, two = 2 * 64, 1 + 1 / 32, 2
    # Two norms' results and the activation. The output projection keeps attention's output, which attention keeps, too.
    saved = (64 + 64 + 192) * (two - one)
    assert plain.activations - fp8.activations == pytest.approx(tokens * 2 * saved, abs=2)


def test_layers_that_stay_in_bf16_are_counted_as_such() -> None:
    plain, fp8, some = (
        derive(of(speed), 1, node("H100"))
        for speed in (
            {"fp8": None},
            {},
            {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0},
        )
    )
    half = (plain.memory.weights + fp8.memory.weights) / 2
    assert plain.recipe.model.num_layers == 2
    assert some.memory.weights == pytest.approx(half, abs=2)
    assert fp8.memory.activations < some.memory.activations < plain.memory.activations


def test_a_step_with_fp8_is_faster() -> None:
    profile = load_profile("h100-ib")
    seconds = {}
    for name, changes in {
        "bf16": [], "fp8": ["train.fp8=e4m3"], "some": ["train.fp8=e4m3", "train.first_last_layers_bf16=true"],
    }.items():  # fmt: skip
        made = derive(load("llama3-8b", changes).recipe, 8, machine(profile, 1))
        seconds[name] = forecast(made, profile).step.seconds
    assert 0.6 < seconds["fp8"] / seconds["bf16"] < 0.9
    assert seconds["fp8"] < seconds["some"] < seconds["bf16"]


def test_a_rehearsal_is_without_it() -> None:
    recipe = of({"fp8_recipe": "blockwise", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2})
    rehearsed = proxy(recipe, "cpu").train
    assert {getattr(rehearsed, name) for name in FP8} == {None}
