"""An optimizer whose gradients and moments have other types than the weights, on megatron-core's own optimizer.

TransformerEngine's kernel needs a GPU; `tests.fused_adam` computes the same in its place.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.engine.base import Progress
from llmrecipes.engine.core import update
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.hardware.cluster import DetectedGpu
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from tests.fused_adam import install
from tests.helpers import LLAMA, ROOMY, engine_of, random_batches, steps, tiny
from tests.refusals import refused
from tests.unit.test_checkpoint_optimizer_state import saved, whole

BF16: dict[str, Any] = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def recipe(precise: bool = True, fp32_gradients: bool = True, **optimizer: Any) -> Recipe:
    return tiny(
        model=LLAMA,
        optimizer={"lr": 1e-2, "use_precision_aware_optimizer": precise, **optimizer},
        train={"precision": "bf16", "grad_reduce_in_fp32": fp32_gradients},
    )


def state(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Copies of weights, master weights and moments, by their names in a checkpoint."""
    found = engine.state(Progress())
    return {name: value.clone() for name, value in whole({key: found[key] for key in ("model", "optimizer")}).items()}


def trained(chosen: Recipe, number: int = 3) -> MegatronEngine:
    engine = engine_of(chosen)
    steps(engine, number, random_batches(chosen))
    return engine


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("clip_grad", [1.0, 1e-3], ids=["loose", "tight"])
def test_with_moments_in_fp32_it_is_the_same_training(clip_grad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among others the norm and the clip act on the gradients that this optimizer reads."""
    plain = state(trained(recipe(precise=False, clip_grad=clip_grad, adam_eps=1e-2)))
    install(monkeypatch)
    precise = state(trained(recipe(clip_grad=clip_grad, adam_eps=1e-2)))
    assert plain.keys() == precise.keys()
    for name, value in plain.items():
        torch.testing.assert_close(precise[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fp32_gradients", [True, False], ids=["fp32", "bf16"])
def test_gradients_are_clipped_as_they_were_reduced(fp32_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    engine = trained(recipe(fp32_gradients=fp32_gradients, clip_grad=0.0), 1)
    before = update.squared_norm(engine.optimizer, engine.platform.device).sqrt().item()
    parameters = engine.optimizer.get_parameters()
    assert {parameter.decoupled_grad.dtype for parameter in parameters} == {
        torch.float32 if fp32_gradients else torch.bfloat16
    }
    exact = (
        torch.stack([parameter.decoupled_grad.double().square().sum() for parameter in parameters]).sum().sqrt().item()
    )
    assert before == pytest.approx(exact, rel=1e-5)
    update.clip(engine.optimizer, before / 10, before)
    after = update.squared_norm(engine.optimizer, engine.platform.device).sqrt().item()
    assert after == pytest.approx(before / 10, rel=1e-2)


@pytest.mark.usefixtures("world")
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its moments are saved as they are, and weights are made from its master weights."""
    install(monkeypatch)
    chosen = recipe(**BF16, ema_decay=0.5)
    engine = trained(chosen, 2)
    entry, there = saved(engine, tmp_path), state(engine)
    kinds = {name.split(".")[2]: value.dtype for name, value in there.items() if name.startswith("optimizer.state.")}
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)
    assert kinds == {"param": torch.float32, "ema": torch.float32, **moments}
    other = engine_of(chosen)
    assert any(not torch.equal(value, there[name]) for name, value in state(other).items())
    other.load_state(entry)
    for each in (engine, other):
        steps(each, 2, random_batches(chosen))
    after = state(engine)
    for name, value in state(other).items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=0, msg=name)


@pytest.mark.usefixtures("world")
def test_a_run_may_change_the_types_of_its_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(recipe(precise=False), 2)
    entry, there = saved(plain, tmp_path), state(plain)
    install(monkeypatch)
    engine = engine_of(recipe(**BF16))
    engine.load_state(entry)
    for name, value in state(engine).items():
        assert torch.equal(value, there[name].to(value.dtype)), name


@pytest.mark.usefixtures("world")
def test_the_average_is_of_the_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    engine = engine_of(recipe(ema_decay=0.75))
    before = state(engine)
    steps(engine, 1, random_batches(engine.recipe))
    after = state(engine)
    averages = [name for name in after if name.startswith("optimizer.state.ema.")]
    assert averages
    for name in averages:
        master = name.replace(".ema.", ".param.")
        torch.testing.assert_close(after[name], before[master].lerp(after[master], 0.25))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("use_precision_aware_optimizer", {"train": {"precision": "fp32"}}),
        ("use_precision_aware_optimizer", {"layout": {"use_distributed_optimizer": False}}),
        ("exp_avg_dtype", {"optimizer": {"use_precision_aware_optimizer": False, "exp_avg_dtype": "bf16"}}),
    ],
)
def test_what_rules_it_out(key: str, change: dict[str, dict[str, Any]]) -> None:
    base: dict[str, Any] = {
        "optimizer": {"use_precision_aware_optimizer": True}, "train": {"precision": "bf16"}, "layout": {},
    }  # fmt: skip
    assert not check(tiny(**base))
    changed: dict[str, Any] = {name: {**keys, **change.get(name, {})} for name, keys in base.items()}
    assert f"optimizer.{key}" in [problem.key for problem in check(tiny(**changed))]


def test_a_machine_without_transformer_engine_is_refused() -> None:
    with refused("optimizer.use_precision_aware_optimizer"):
        derive(recipe(), 1, ROOMY)


@pytest.mark.usefixtures("world")
def test_a_rank_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrecipes.plan.derive.require_fused_adam", lambda *_args: None)
    with refused("optimizer.use_precision_aware_optimizer", rule="FusedAdam"):
        engine_of(recipe())


def test_the_plan_counts_moments_by_their_types() -> None:
    node = replace(ROOMY, gpus=(DetectedGpu("NVIDIA H100", 1 << 40, 1 << 40, None),))
    plain, half, both = (
        derive(each, 1, node) for each in (recipe(False), recipe(exp_avg_dtype="bf16"), recipe(**BF16))
    )
    for plan, saves in ((half, 2), (both, 4)):
        parameters = plan.num_parameters.total
        assert plain.memory.optimizer - plan.memory.optimizer == saves * parameters
        assert plain.checkpoint_bytes - plan.checkpoint_bytes == saves * parameters
