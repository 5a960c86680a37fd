"""The share of the tokens predicted right is that of one process in every layout, with a loss in chunks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmrecipes.engine.base import Progress, World
from llmrecipes.engine.parts.accuracy import Accuracy
from tests.dist.table import Row, Sections
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LEARNING: Sections = {"model": {"vocab_size": 301}, "optimizer": {"adam_eps": 1e-8, "lr": 3e-3}}
"""Of few tokens, whose number no ranks divide, fast: at the end a part of them is known."""
CHUNKS: Sections = {"layout": {"loss_chunk_tokens": 5}}
STEPS = 8
LAYOUTS: list[tuple[str, str, Sections]] = [
    ("gpt", "dp1", CHUNKS),
    ("gpt", "tp2", {}),
    ("gpt", "tp2", CHUNKS),
    ("gpt", "tp2 sp", CHUNKS),
    ("gpt", "pp2 vpp2", {}),
    ("gpt", "cp2", {}),
    ("gpt", "dp2", {}),
    ("mtp", "tp2", {}),
]
ZERO: Sections = {"layout": {"zero": {"stage": 2}}}


def accuracies(row: Row) -> tuple[list[float | None], float | None, float | None]:
    """Of steps on the same global batch, of an evaluation on it after them, and the latter from all logits."""
    with training(row.recipe) as (engine, world):
        shares, accuracy = [], engine.parts.the(Accuracy)
        for step in range(STEPS):
            engine.parts.start(10 if step else 2)  # every tenth is due
            engine.train_step(loaders(row.recipe, world))
            shares.append(accuracy.fields(Progress())["token_accuracy"])
        accuracy.start()
        with engine.params_synced():
            engine.evaluate(loaders(row.recipe, world), 1)
        return (
            shares,
            accuracy.fields(Progress())["token_accuracy"],
            None if world.size > 1 or row.changes.get("train") else _by_hand(engine, world),
        )


def _by_hand(engine: Any, world: World) -> float:
    (module,) = engine.modules
    seen: list[torch.Tensor] = []
    hook = module.logits.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits.clone()))
    engine.evaluate(loaders(engine.recipe, world), 1)
    hook.remove()
    right = tokens = 0.0
    # With multi-token prediction the logits of the next token are the last of a micro-batch.
    every = 1 + (engine.recipe.model.mtp_num_layers or 0)
    for batch, logits in zip(loaders(engine.recipe, world), seen[every - 1 :: every], strict=False):
        likeliest = logits[..., : engine.recipe.model.vocab_size].argmax(-1).t()
        right += float(((likeliest == batch["labels"]) * batch["loss_mask"]).sum())
        tokens += float(batch["loss_mask"].sum())
    return right / tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("model", "layout", "changes"), LAYOUTS)
def test_accuracy_is_that_of_one_process(
    model: str, layout: str, changes: Sections, alone: dict[str, Any], worlds: dict[int, GlooWorld]
) -> None:
    if model not in alone:
        alone[model] = worlds[1].run(accuracies, Row(model, "dp1", LEARNING))
    usual, valid, by_hand = alone[model]
    assert usual[0] is None and valid == by_hand and 0.02 < valid < 1
    assert trained(model, layout, changes, worlds) == (usual, valid)


@pytest.mark.deepspeed
def test_deepspeed_counts_the_same(alone: dict[str, Any], worlds: dict[int, GlooWorld]) -> None:
    if "gpt" not in alone:
        alone["gpt"] = worlds[1].run(accuracies, Row("gpt", "dp1", LEARNING))
    usual, valid, _ = alone["gpt"]
    assert trained("gpt", "dp2", ZERO, worlds, engine="deepspeed") == (usual, valid)


def trained(
    model: str, layout: str, changes: Sections, worlds: dict[int, GlooWorld], engine: str = "megatron"
) -> tuple[list[float | None], float | None]:
    both = {key: {**LEARNING.get(key, {}), **changes.get(key, {})} for key in LEARNING.keys() | changes.keys()}
    ranks = 1 if layout == "dp1" else 2
    shares, valid, _ = worlds[ranks].run(accuracies, Row(model, layout, both, engine=engine))
    return shares, valid
