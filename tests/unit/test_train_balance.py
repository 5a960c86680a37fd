"""Counting what routers do, and balancing by expert bias, on real megatron-core routers."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from llmrecipes.engine.base import Progress
from llmrecipes.engine.parts.router_balance import RouterBalance
from llmrecipes.faults.signals import StopRequest
from llmrecipes.train.loaders import DataLoaders
from llmrecipes.train.loop import Loop
from tests.dist.worlds import GlooWorld
from tests.helpers import engine_of
from tests.unit.balance_worker import (
    EXPERTS,
    SEQUENCE,
    TOPK,
    balances,
    micro_batches,
    moe_recipe,
    one_step,
)

if TYPE_CHECKING:
    from llmrecipes.engine.core.world import World
    from llmrecipes.engine.megatron.engine import MegatronEngine

TOKENS = 8 * SEQUENCE
CAPACITY_OF_A_MICRO_BATCH = 2 * SEQUENCE * TOPK // EXPERTS  # at capacity factor 1


def routers(engine: MegatronEngine) -> list[TopKRouter]:
    return [module for module in engine.modules[0].modules() if isinstance(module, TopKRouter)]


def indifferent(engine: MegatronEngine) -> None:
    """Make all logits 0: every expert is equally likely, and a tie sends all tokens to the same two of them."""
    for router in routers(engine):
        router.weight.data.zero_()


def test_counts_are_those_of_all_micro_batches(world: World) -> None:
    engine = engine_of(moe_recipe())
    chosen = [torch.zeros(EXPERTS, dtype=torch.long) for _ in routers(engine)]
    for seen, router in zip(chosen, routers(engine), strict=True):

        def count(_router: object, _input: object, output: Any, seen: torch.Tensor = seen) -> None:
            seen += output[1].sum(0)

        router.register_forward_hook(count)
    layers = one_step(engine).layers
    assert [layer.layer for layer in layers] == [1, 2]
    for layer, seen in zip(layers, chosen, strict=True):
        assert list(layer.tokens_per_expert) == seen.tolist()
        assert sum(layer.tokens_per_expert) == TOKENS * TOPK and layer.dropped == 0
        assert layer.imbalance == pytest.approx(max(seen.tolist()) * EXPERTS / (TOKENS * TOPK))
        assert 0 < layer.entropy < math.log(EXPERTS)


def test_jitter_disturbs_the_input_of_routers_by_eps_and_only_in_training(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    eps = 0.25
    engine = engine_of(moe_recipe(moe_input_jitter_eps=eps))
    gating = TopKRouter.gating
    given: list[torch.Tensor] = []
    factors: list[torch.Tensor] = []

    def remember(_router: TopKRouter, inputs: tuple[torch.Tensor, ...]) -> None:
        given.append(inputs[0].detach().clone())

    def seen(router: TopKRouter, values: torch.Tensor) -> torch.Tensor:
        factors.append(values.detach() / given[-1])
        logits: torch.Tensor = gating(router, values)
        return logits

    monkeypatch.setattr(TopKRouter, "gating", seen)
    for router in routers(engine):
        router.register_forward_pre_hook(remember)
    engine.train_step(micro_batches())
    trained = torch.cat([factor.flatten() for factor in factors])
    # Uniform over the whole interval: the ends and the mean say so.
    assert 1 - eps - 1e-5 <= trained.min() < 1 - 0.9 * eps
    assert 1 + 0.9 * eps < trained.max() <= 1 + eps + 1e-5
    assert trained.mean() == pytest.approx(1, abs=0.01)
    factors.clear()
    one, other = (engine.evaluate(micro_batches(), 1) for _ in range(2))
    assert one == other
    assert all((factor == 1).all() for factor in factors) and factors


@pytest.mark.parametrize(
    ("model", "each", "dropped"),
    [
        ({}, TOKENS, 0),
        ({"moe_router_score_function": "sigmoid"}, TOKENS, 0),
        ({"moe_expert_capacity_factor": 1.0}, 4 * CAPACITY_OF_A_MICRO_BATCH, TOKENS),
        (
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            4 * CAPACITY_OF_A_MICRO_BATCH,
            TOKENS,
        ),
    ],
)
def test_a_router_that_has_no_preference(world: World, model: dict[str, Any], each: int, dropped: int) -> None:
    engine = engine_of(moe_recipe(**model))
    indifferent(engine)
    layer = one_step(engine).layers[0]
    assert sorted(layer.tokens_per_expert) == [0, 0, each, each]
    assert layer.imbalance == 2.0
    assert layer.dropped == dropped
    assert layer.entropy == pytest.approx(math.log(EXPERTS))
    assert layer.z_loss == pytest.approx(math.log(EXPERTS) ** 2)


def test_recomputation_and_evaluation_are_not_counted(world: World) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain = one_step(engine_of(moe_recipe()))
    engine = engine_of(moe_recipe(layout=full))
    engine.parts.the(RouterBalance).start()
    engine.evaluate(micro_batches(), 1)
    engine.train_step(micro_batches())
    assert engine.parts.the(RouterBalance).collect() == plain


def test_steps_that_are_not_counted_leave_no_trace(world: World) -> None:
    engine = engine_of(moe_recipe(moe_aux_loss_coeff=0.01))
    indifferent(engine)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    first = one_step(engine)
    indifferent(engine)
    engine.train_step(micro_batches())
    indifferent(engine)
    assert one_step(engine).layers[0] == first.layers[0]


def test_a_run_measures_some_of_its_steps(world: World) -> None:
    engine = engine_of(moe_recipe(train={"train_iters": 12}))
    measured: list[int] = []
    sink: Any = SimpleNamespace(
        step=lambda metrics: measured.append(metrics.step) if metrics.experts else None,
        note=lambda _: None,
        save=lambda *_: None,
        poll=list,
        wait=list,
    )
    loaders = DataLoaders(
        train=lambda _: (micro_batch for micro_batch in micro_batches(48)), valid=None, bits_per_byte=lambda loss: loss
    )
    Loop(engine.plan, engine, world, loaders, sink, sink, StopRequest(), recipe_hash="", peak_flops=None).run(
        Progress()
    )
    assert measured == [1, 10, 12]


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_auxiliary_loss_is_the_mean_of_layers_and_micro_batches(world: World, kind: str) -> None:
    engine = engine_of(moe_recipe(moe_aux_loss_coeff=0.01, moe_router_load_balancing_type=kind))
    # All tokens on two of four experts, each expert with probability 1/4: 4 · (2 · 1/2 · 1/4) = 1, in every step.
    for _ in range(2):
        indifferent(engine)
        assert one_step(engine).aux_loss == pytest.approx(1.0)


def test_there_is_no_auxiliary_loss_without_its_coefficient(world: World) -> None:
    assert one_step(engine_of(moe_recipe())).aux_loss is None


def test_dense_layers_and_dense_models_have_no_balance(world: World) -> None:
    (layer,) = one_step(engine_of(moe_recipe(moe_layer_freq=[0, 1]))).layers
    assert layer.layer == 2
    dense = engine_of(moe_recipe(num_moe_experts=None))
    assert not any(isinstance(part, RouterBalance) for part in dense.parts)


def test_prediction_layers_follow_the_others(world: World) -> None:
    layers = one_step(engine_of(moe_recipe(mtp_num_layers=1, position_embedding_type="rope"))).layers
    assert [layer.layer for layer in layers] == [1, 2, 3]
    assert all(sum(layer.tokens_per_expert) == TOKENS * TOPK for layer in layers)


@pytest.mark.rotating
def test_expert_bias_turns_tokens_away_from_crowded_experts(world: World) -> None:
    recipe = moe_recipe(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.01,
        moe_router_load_balancing_type="none",
    )
    # The bias alone has to do it: the weights stay.
    engine = engine_of(recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"lr": 1e-12})}))
    crooked = [0.3, 0.0, 0.0, -0.3]
    for router in routers(engine):
        router.expert_bias.copy_(torch.tensor(crooked))
    first = one_step(engine).layers
    for layer, router in zip(first, routers(engine), strict=True):
        mean = sum(layer.tokens_per_expert) / EXPERTS
        moved = [now - then for now, then in zip(router.expert_bias.tolist(), crooked, strict=True)]
        for count, move in zip(layer.tokens_per_expert, moved, strict=True):
            assert move == pytest.approx(0.01 * ((count < mean) - (count > mean)), abs=1e-7)  # biases are in fp32
    for _ in range(60):
        last = one_step(engine).layers
    for before, after in zip(first, last, strict=True):
        assert before.imbalance > 1.4 and after.imbalance < 1.1


@pytest.mark.dist
@pytest.mark.rotating
def test_two_ranks_count_what_one_does(world: World, worlds: dict[int, GlooWorld]) -> None:
    layouts = {
        "data": {},
        "experts": {"expert_model_parallel_size": 2},
        "stages": {"pipeline_model_parallel_size": 2},
        "tensor": {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    }
    alone = one_step(engine_of(moe_recipe(moe_aux_loss_coeff=0.01)))
    found = worlds[2].run(balances, layouts)
    assert list(found) == list(layouts)
    for name, balance in found.items():
        assert balance.aux_loss == pytest.approx(alone.aux_loss, rel=1e-5), name
        for there, here in zip(balance.layers, alone.layers, strict=True):
            assert there.entropy == pytest.approx(here.entropy, rel=1e-5)
            assert there.z_loss == pytest.approx(here.z_loss, rel=1e-5)
            assert replace(there, entropy=here.entropy, z_loss=here.z_loss) == here, name
