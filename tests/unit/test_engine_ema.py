"""The moving average of the weights: its formula, where it is kept, and what begins and ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.compatibility import compatibility
from llmrecipes.engine.base import Progress
from llmrecipes.engine.megatron.backend import MegatronBackend
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOMY, engine_of, random_batches, steps, tiny
from tests.refusals import refused
from tests.unit.test_checkpoint_optimizer_state import saved, whole

pytestmark = pytest.mark.usefixtures("world")

DECAY = 0.75


def recipe(precision: str = "fp32", distributed: bool = True, decay: float | None = DECAY, **train: Any) -> Recipe:
    return tiny(
        optimizer={"ema_decay": decay},
        layout={"use_distributed_optimizer": distributed},
        train={"precision": precision, **train},
    )


def states(engine: MegatronEngine, kind: str) -> dict[str, torch.Tensor]:
    """Copies of the optimizer's state of a kind, by the names of the weights."""
    prefix = f"optimizer.state.{kind}."
    found = whole(engine.state(Progress())["optimizer"])
    return {name.removeprefix(prefix): value.clone() for name, value in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "whole"])
def test_it_is_the_formula_over_the_master_weights(precision: str, distributed: bool) -> None:
    engine = engine_of(recipe(precision, distributed))
    batches = random_batches(engine.recipe)
    expected = states(engine, "param")
    for _ in range(3):
        steps(engine, 1, batches)
        for name, weight in states(engine, "param").items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weight
    found = states(engine, "ema")
    assert found.keys() == expected.keys()
    for name, average in found.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-8)
    assert differing(found, states(engine, "param"))
    engine.close()


def test_a_step_that_overflows_leaves_it_as_it_is() -> None:
    engine = engine_of(recipe("fp16", initial_loss_scale=2.0**40, hysteresis=1))
    before = states(engine, "ema")
    (result,) = steps(engine, 1)
    assert result.skipped
    assert not differing(states(engine, "ema"), before)
    engine.close()


@pytest.mark.parametrize(("one", "other"), [(True, False), (False, True)], ids=["to whole", "to sharded"])
def test_a_resumed_run_goes_on_with_it(one: bool, other: bool, tmp_path: Path) -> None:
    engine = engine_of(recipe("bf16", one))
    batches = random_batches(engine.recipe)
    steps(engine, 2, batches)
    entry, kept = saved(engine, tmp_path), states(engine, "ema")
    steps(engine, 1, batches)
    after = states(engine, "ema")
    engine.close()
    resumed = engine_of(recipe("bf16", other, seed=99))
    resumed.load_state(entry)
    assert not differing(states(resumed, "ema"), kept)
    steps(resumed, 1, random_batches(resumed.recipe, consumed=2 * resumed.recipe.train.global_batch_size))
    assert not differing(states(resumed, "ema"), after)
    resumed.close()


def test_it_is_turned_on_and_off_by_resuming(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = engine_of(recipe(decay=None))
    steps(plain, 2)
    assert not states(plain, "ema")
    without = saved(plain, tmp_path / "without")
    weights = states(plain, "param")
    plain.close()
    averaged = engine_of(recipe(seed=99))
    with caplog.at_level("INFO", logger="llmrecipes.engine.megatron.state"):
        averaged.load_state(without)
    (note,) = (record for record in caplog.records if record.name == "llmrecipes.engine.megatron.state")
    assert str(without.path) in note.getMessage() and "optimizer.ema_decay" in note.getMessage()
    assert not differing(states(averaged, "ema"), weights)
    steps(averaged, 1)
    having, weights = saved(averaged, tmp_path / "with"), states(averaged, "param")
    averaged.close()
    off = engine_of(recipe(decay=None, seed=99))
    off.load_state(having)
    assert not states(off, "ema")
    assert not differing(states(off, "param"), weights)
    off.close()


def test_a_model_for_sampling_has_it_in_place_of_the_weights(tmp_path: Path) -> None:
    engine = engine_of(recipe("bf16"))
    steps(engine, 2)
    entry, average = saved(engine, tmp_path / "with"), states(engine, "ema")
    engine.close()
    here = derive(engine.recipe, 1, ROOMY)
    for averaged in (True, False):
        model = MegatronBackend().load_weights(here, engine.platform, entry, averaged=averaged)
        found = whole(model._built.module.sharded_state())
        same = [torch.equal(found[name], average[name].to(torch.bfloat16)) for name in average]
        assert all(same) == averaged
    plain = engine_of(recipe("bf16", decay=None))
    without = saved(plain, tmp_path / "without")
    plain.close()
    with refused(without.path, rule="optimizer.ema_decay=0.999"):
        MegatronBackend().load_weights(here, engine.platform, without, averaged=True)


def test_the_engine_deepspeed_has_none() -> None:
    zero: dict[str, Any] = {"layout": {"zero": {"stage": 1}}, "optimizer": {"ema_decay": 0.9}}
    assert not check(tiny(**zero))
    (problem,) = check(tiny(**zero).with_layout(engine="deepspeed"))
    assert problem.key == "optimizer.ema_decay"


def test_a_run_may_change_it() -> None:
    now, then = (recipe(decay=decay).model_dump(mode="json") for decay in (0.5, None))
    assert not compatibility(now, then)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the same bit for bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]
