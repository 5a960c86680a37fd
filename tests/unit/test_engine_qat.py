"""Quantisation-aware training: the rounding of `quantize`, gradients of the rounded weights, and what is planned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.engine.core import integers
from llmrecipes.models.quantized_weights import Scheme
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.distill_rules import teacher_recipe
from llmrecipes.recipe.rules.preference_rules import reference_recipe
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.proxy import proxy
from llmrecipes.workflow.plan import plan_on
from tests.helpers import engine_of, random_batches, steps, tiny
from tests.refusals import refused
from tests.unit.test_checkpoint_optimizer_state import saved

pytestmark = pytest.mark.usefixtures("world")

INT4 = {"scheme": "int4", "group_size": 32}


def rounding(qat: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    model = {"init_method_std": 0.2, **sections.pop("model", {})}
    optimizer = {"lr": 1e-2, "clip_grad": 0.0}
    return tiny(model=model, qat={**INT4, **(qat or {})}, optimizer=optimizer, **sections)


def without(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"qat": None})


def matrices(engine: Any) -> dict[str, torch.nn.Parameter]:
    return {
        name: weight
        for name, weight in engine.modules[0].named_parameters()
        if "decoder.layers." in name and name.endswith(".weight") and weight.dim() == 2 and ".router." not in name
    }


# -- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "group"), [("int4", 8), ("int4", 128), ("int8", None)])
def test_rounding_is_that_of_compressed_tensors(scheme: str, group: int | None, dtype: torch.dtype) -> None:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3, :128], weight[7] = 0, 0
    arithmetic = Scheme(scheme, group)
    values = weight.float().unflatten(-1, (-1, group or 256))
    theirs = calculate_qparams(values.amin(-1), values.amax(-1), arithmetic.spec.weights)[0].to(dtype)
    scale = integers.scales(integers.largest(weight, group), arithmetic.kind.bits, dtype)
    assert scale.equal(theirs)
    expected = fake_quantize(
        weight.float(), theirs.float(), torch.zeros_like(theirs).float(), arithmetic.spec.weights
    )  # fmt: skip
    made = torch.empty_like(weight)
    integers.round_into(made, weight, scale, arithmetic.kind.bits)
    assert made.equal(expected.to(dtype)) and arithmetic.rounded(weight).equal(expected)
    assert not made.equal(weight)


def test_pieces_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    whole = Scheme("int4", 32).rounded(weight)
    monkeypatch.setattr(integers, "PIECE", 3 * 256)
    assert Scheme("int4", 32).rounded(weight).equal(whole)


# -- steps -----------------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "int4": {"qat": {}},
    "int8": {"qat": {"scheme": "int8", "group_size": None}},
    "bf16": {"qat": {}, "train": {"precision": "bf16"}},
    "experts": {"qat": {}, "model": {"num_moe_experts": 4, "add_bias_linear": False}},
    "recomputed": {
        "qat": {},
        "layout": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_one_with_rounded_weights_whose_gradients_go_to_the_weights(name: str) -> None:
    recipe = rounding(**MODELS[name])
    assert recipe.qat is not None
    scheme = Scheme(recipe.qat.scheme, recipe.qat.group_size)
    engine, plain = engine_of(recipe), engine_of(without(recipe))
    weights, others = matrices(engine), matrices(plain)
    assert len(weights) == (20 if name == "experts" else 8)
    with torch.no_grad():
        for weight in others.values():
            weight.copy_(scheme.rounded(weight))
    before = {key: weight.detach().clone() for key, weight in weights.items()}
    held_out = engine.evaluate(random_batches(recipe), 1), plain.evaluate(random_batches(recipe), 1)
    assert held_out[0] == held_out[1]
    assert all(weight.equal(before[key]) for key, weight in weights.items()), "the weights stay as they are"
    found: dict[str, dict[str, torch.Tensor]] = {}
    results = []

    def keep(key: str, _weights: Any, gradients: Any) -> None:
        found[key] = {gradient.name: gradient.tensor for gradient in gradients}

    for key, trained in {"rounded": engine, "plain": plain}.items():
        if name != "bf16":  # its gradients are of another type
            trained.watch_gradients(partial(keep, key))
        results.append(trained.train_step(random_batches(recipe)))
    assert (results[0].loss, results[0].grad_norm) == (results[1].loss, results[1].grad_norm)
    assert len(found) == (2 if name != "bf16" else 0)
    assert all(value.equal(found["plain"][key]) for key, value in found.get("rounded", {}).items())
    unrounded = engine_of(without(recipe)).train_step(random_batches(recipe))
    assert abs(unrounded.loss - results[0].loss) > (1e-6 if name == "int8" else 1e-4)
    for key, weight in weights.items():
        assert not weight.equal(before[key]) and not weight.equal(scheme.rounded(weight).to(weight.dtype))


def test_matrices_are_rounded_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[torch.Tensor] = []
    real = integers.round_into

    def counted(*given: Any) -> Any:
        rounded.append(given[1])
        return real(*given)

    monkeypatch.setattr(integers, "round_into", counted)
    recipe = rounding()
    engine = engine_of(recipe)
    batches = random_batches(recipe)
    assert engine.plan.num_microbatches > 1
    for number in (1, 2):
        engine.train_step(batches)
        assert len(rounded) == 8 * number
    engine.evaluate(random_batches(recipe), 2)
    assert len(rounded) == 24


def test_the_first_steps_can_be_without() -> None:
    recipe = rounding({"start_step": 2})
    engine, plain = engine_of(recipe), engine_of(without(recipe))
    pairs = [(random_batches(recipe), engine), (random_batches(recipe), plain)]
    losses = [[each.train_step(batches).loss for batches, each in pairs] for _ in range(2)]
    assert all(mine == theirs for mine, theirs in losses)
    mine, theirs = (each.evaluate(random_batches(recipe), 1) for each in (engine, plain))
    assert mine != theirs, "after that many steps, evaluations are of rounded weights"
    mine, theirs = (each.train_step(batches).loss for batches, each in pairs)
    assert mine != theirs


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    recipe = rounding({"start_step": 2})
    engine = engine_of(recipe)
    batches = random_batches(recipe)
    steps(engine, 1, batches)
    entry = saved(engine, tmp_path)
    after = steps(engine, 3, batches)
    resumed = engine_of(recipe)
    resumed.load_state(entry)
    assert steps(resumed, 3, random_batches(recipe, consumed=8)) == after


# -- plan and rules --------------------------------------------------------------------------------------------------


def test_the_plan_has_the_rounded_matrices_and_their_time() -> None:
    keys = ["qat={scheme: int8}", "layout.tensor_model_parallel_size=4"]
    with_it, plain = (
        plan_on(load("llama3-8b", each).recipe, nproc=None, cluster="h100-ib", nodes=8)[0].largest
        for each in (keys, [*keys[1:], "model.transformer_impl=local"])
    )
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) // 4
    assert with_it.memory.weights == plain.memory.weights + 2 * matrices
    rounding = forecast(with_it, None).step.parts()["rounding"]
    assert 0.01 < rounding < 0.1 and "rounding" not in forecast(plain, None).step.parts()


def test_frozen_models_are_not_rounded() -> None:
    taught = load("gpt-tiny-distil", ["qat={scheme: int8}"]).recipe
    assert taught.qat is not None and teacher_recipe(taught).qat is None
    pairs = load("dpo-tiny", ["qat={scheme: int8}"]).recipe
    assert pairs.qat is not None and reference_recipe(pairs).qat is None


def test_a_rehearsal_has_groups_that_fit() -> None:
    small = proxy(load("llama3-8b", ["qat={scheme: int4, start_step: 9}"]).recipe)
    assert small.qat is not None and small.qat.start_step == 0
    assert small.qat.group is not None and small.model.hidden_size % small.qat.group == 0


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "groups of int8": ("gpt-tiny", ["qat.scheme=int8", "qat.group_size=32"], "qat.group_size"),
    "groups that rows are not": ("gpt-tiny", ["qat.group_size=144"], "qat.group_size"),
    "groups that are split": (
        "gpt-tiny", ["qat.group_size=32", "layout.tensor_model_parallel_size=4"], "qat.group_size",
    ),
    "never": ("gpt-tiny", ["qat.scheme=int8", "qat.start_step=640", "train.train_iters=640"], "qat.start_step"),
    "another scheme": ("gpt-tiny", ["qat.scheme=fp8"], "qat.scheme"),
    "adapters": ("lora-tiny", ["qat.scheme=int8"], "lora"),
    "deepspeed": ("gpt-tiny-zero", ["qat.scheme=int8"], "layout.engine"),
    "compiled": ("gpt-tiny", ["qat.scheme=int8", "layout.torch_compile=true"], "layout.torch_compile"),
    "layers": ("llama3-8b", ["qat.scheme=int8", "model.transformer_impl=transformer_engine"], "model.transformer_impl"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "key"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_rounded_is_refused(name: str, keys: list[str], key: str) -> None:
    scheme = [] if any(each.startswith("qat.scheme") for each in keys) else ["qat.scheme=int4"]
    with refused(key):
        load(name, [*scheme, *keys])
    load("gpt-tiny", ["qat.scheme=int4", "qat.group_size=32", "layout.tensor_model_parallel_size=2"])
