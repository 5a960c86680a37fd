"""What a step of one process must not depend on: how many tokens are masked, how a batch is cut into micro-batches, how
experts are padded, and updates that are not made. A comparison of layouts sees none of it: all of them are wrong alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llmrecipes.engine.base import Batch
from llmrecipes.engine.parts.router_balance import RouterBalance
from llmrecipes.recipe.schema import Recipe
from tests.helpers import engine_of
from tests.unit.balance_worker import SEQUENCE, VOCABULARY, moe_recipe

if TYPE_CHECKING:
    from llmrecipes.engine.core.world import World
    from llmrecipes.engine.megatron.engine import MegatronEngine

SAMPLES = 8
ROPE: dict[str, Any] = {"position_embedding_type": "rope"}
BIAS: dict[str, Any] = {
    "moe_router_load_balancing_type": "none",
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.01,
}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def batches(recipe: Recipe, counted: list[int]) -> Iterator[Batch]:
    """The same samples however they are cut; of the last tokens of each, a number is counted."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=random)
    mask = torch.zeros(SAMPLES, SEQUENCE)
    for row, number in zip(mask, counted * SAMPLES, strict=False):
        row[SEQUENCE - number :] = 1
    size = recipe.layout.micro_batch_size
    for ids, of_ids in zip(tokens.split(size), mask.split(size), strict=True):
        positions = torch.arange(SEQUENCE).expand(size, -1)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": of_ids, "position_ids": positions}


def gradients(recipe: Recipe, counted: list[int]) -> dict[str, torch.Tensor]:
    """Those of the first step, by global name and place."""
    engine, seen = engine_of(recipe), dict[str, torch.Tensor]()
    engine.watch_gradients(
        lambda _, slices: seen.update({f"{part.name} {part.offset}": part.tensor for part in slices})
    )
    engine.train_step(batches(recipe, counted))
    return seen


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value - other[name] for name, value in one.items()}


def require_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    whole = torch.stack([value.norm() for value in other.values()]).norm()
    for name, value in other.items():
        assert (one[name] - value).norm() <= rtol * (value.norm() + 1e-2 * whole), name


def term(counted: list[int], size: int = 2, **model: Any) -> dict[str, torch.Tensor]:
    """What keys of a model add to its gradients."""
    layout = {"micro_batch_size": size}
    with_term, without = moe_recipe(layout=layout, **model), moe_recipe(layout=layout)
    return difference(gradients(with_term, counted), gradients(without, counted))


ROUTER_TERMS: dict[str, dict[str, Any]] = {
    kind: {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 1.0}
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
} | {"z-loss": {"moe_z_loss_coeff": 1.0}}
OF_SEQUENCES = ("seq_aux_loss", "z-loss")
"""Whose value by its definition does not depend on what else is in a micro-batch."""


@pytest.mark.parametrize("kind", ROUTER_TERMS)
def test_a_routers_loss_has_the_same_gradient_however_many_tokens_are_masked(world: World, kind: str) -> None:
    keys = ROUTER_TERMS[kind]
    whole = term([SEQUENCE], **keys)
    assert torch.stack([value.norm() for value in whole.values()]).norm() > 1e-3
    require_same(term([2], **keys), whole)
    require_same(term([1, 16, 0, 5], **keys), whole)
    if kind in OF_SEQUENCES:
        require_same(term([1, 16, 0, 5], size=4, **keys), whole)


def test_a_routers_loss_is_all_that_is_left_where_every_token_is_masked(world: World) -> None:
    keys = ROUTER_TERMS["z-loss"]
    require_same(gradients(moe_recipe(**keys), [0]), term([SEQUENCE], **keys))


def test_padding_experts_to_a_capacity_that_holds_all_changes_no_loss_per_sequence(world: World) -> None:
    keys = ROUTER_TERMS["seq_aux_loss"]
    room: dict[str, Any] = {
        "moe_expert_capacity_factor": 2.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_ffn_hidden_size": 16,
    }
    plain = gradients(moe_recipe(moe_ffn_hidden_size=16, **keys), [SEQUENCE])
    require_same(gradients(moe_recipe(**room, **keys), [SEQUENCE]), plain, rtol=1e-5)


def test_what_routers_report_does_not_depend_on_masked_tokens(world: World) -> None:
    recipe = moe_recipe(**ROUTER_TERMS["aux_loss"])

    def reported(counted: list[int]) -> object:
        engine = engine_of(recipe)
        engine.parts.the(RouterBalance).start()
        engine.train_step(batches(recipe, counted))
        return engine.parts.the(RouterBalance).collect()

    assert reported([1, 16, 0, 5]) == reported([SEQUENCE])


@pytest.mark.parametrize("chunk", [0, 12])
def test_a_predicted_token_has_the_same_weight_in_every_micro_batch(world: World, chunk: int) -> None:
    counted = [16, 3, 16, 16, 1, 0, 9, 16]

    def of(size: int, counted: list[int]) -> dict[str, torch.Tensor]:
        layout = {"micro_batch_size": size, "loss_chunk_tokens": chunk}
        model = {"num_moe_experts": None, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 1.0, **ROPE}
        return gradients(moe_recipe(layout=layout, **model), counted)

    one = of(1, counted)
    for size in (2, 8):
        require_same(of(size, counted), one, rtol=1e-5)


@pytest.mark.parametrize("layout", [{}, FULL], ids=["plain", "recomputed"])
def test_labels_of_masked_tokens_have_no_effect_on_predictions(world: World, layout: dict[str, Any]) -> None:
    model = {"num_moe_experts": None, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 1.0, **ROPE}
    recipe = moe_recipe(layout=layout, **model)

    def of(label: int | None) -> dict[str, torch.Tensor]:
        engine, seen = engine_of(recipe), dict[str, torch.Tensor]()
        engine.watch_gradients(
            lambda _, slices: seen.update({f"{each.name} {each.offset}": each.tensor for each in slices})
        )
        engine.train_step(
            batch if label is None else {**batch, "labels": batch["labels"].where(batch["loss_mask"] > 0, label)}
            for batch in batches(recipe, [5, 3, 16, 0])
        )
        return seen

    written = of(None)
    for label in (0, 7):
        assert all(torch.equal(value, written[name]) for name, value in of(label).items())


def biases(engine: MegatronEngine) -> list[float]:
    named = engine.modules[0].named_buffers()
    return [value for name, buffer in named if name.endswith("expert_bias") for value in buffer.tolist()]


@pytest.mark.parametrize("capacity", [1.0, 2.0])
def test_experts_that_are_padded_to_their_capacity_are_balanced_alike(world: World, capacity: float) -> None:
    found = []
    for padded in (False, True):
        recipe = moe_recipe(
            **BIAS, moe_expert_capacity_factor=capacity, moe_pad_expert_input_to_capacity=padded, moe_ffn_hidden_size=16
        )
        engine = engine_of(recipe)
        for _ in range(3):
            engine.train_step(batches(recipe, [SEQUENCE]))
        found.append(biases(engine))
    assert found[0] == found[1] and any(found[0])


def test_the_bias_of_experts_counts_each_trained_token_once(world: World) -> None:
    """Neither those of a second forward pass for recomputation nor those of an evaluation."""

    def trained(evaluating: bool, **layout: Any) -> list[float]:
        recipe = moe_recipe(layout=layout, **BIAS)
        engine = engine_of(recipe)
        for _ in range(3):
            engine.train_step(batches(recipe, [SEQUENCE]))
            if evaluating:
                engine.evaluate(({**batch, "tokens": 0 * batch["tokens"]} for batch in batches(recipe, [SEQUENCE])), 1)
        return biases(engine)

    plain = trained(False)
    assert any(plain)
    assert trained(False, **FULL) == trained(True) == plain


def test_a_step_without_an_update_leaves_the_bias_of_experts(world: World) -> None:
    overflowing = {"precision": "fp16", "initial_loss_scale": 1e12}
    engine = engine_of(moe_recipe(train=overflowing, **BIAS))
    assert engine.train_step(batches(engine.recipe, [SEQUENCE])).skipped
    assert not any(biases(engine))
    fitting = {"precision": "fp16", "initial_loss_scale": 8.0}
    engine = engine_of(moe_recipe(train=fitting, **BIAS))
    assert not engine.train_step(batches(engine.recipe, [SEQUENCE])).skipped
    assert any(biases(engine))
