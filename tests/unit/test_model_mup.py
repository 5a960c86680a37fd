"""Maximal-update parametrisation: megatron-core's factors, our initial values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import Progress
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.plan.plan_table import rows
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.derived.shape import mup
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import LayoutKeys, Recipe
from tests.helpers import LLAMA, ROOMY, engine_of, steps, tiny

pytestmark = pytest.mark.usefixtures("world")

LR, MIN_LR, EPS, STD, WIDTH, LAYERS = 1e-2, 1e-3, 1e-6, 0.02, 4.0, 2
MUP: dict[str, Any] = {
    "use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 4.0, "mup_embedding_mult": 2.0,
    "init_method_std": STD,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "moe": {"num_moe_experts": 4, "add_bias_linear": False, "share_embeddings_and_output_weights": False},
    "mtp": {"position_embedding_type": "rope", "mtp_num_layers": 1},
}
LOSSES = {
    "gpt": (6.233678, 6.236102, 6.189298, 5.996666),
    "llama": (6.241227, 6.240035, 6.231477, 6.170131),
    "moe": (6.240382, 6.240496, 6.228496, 6.125903),
    "mtp": (6.235346, 6.232877, 6.174781, 5.974494),
}
"""Of four steps with megatron-core 0.19's own parametrisation."""

NORMS = ("layernorm.weight", "norm.weight")
BASE_RATE = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight", ".bias", *NORMS)


def recipe(name: str = "gpt", **model: Any) -> Recipe:
    return tiny(
        model={**MODELS[name], **MUP, **model},
        optimizer={"lr": LR, "min_lr": MIN_LR, "adam_eps": EPS},
        scheduler={"lr_warmup_iters": 2},
    )


@contextmanager
def running(wanted: Recipe) -> Iterator[MegatronEngine]:
    engine = engine_of(wanted)
    try:
        yield engine
    finally:
        engine.close()


def groups(engine: MegatronEngine) -> list[dict[str, Any]]:
    """Parameter groups that have parameters, with a `count` of elements."""
    return [
        {**group, "count": sum(parameter.numel() for parameter in group["params"])}
        for group in engine.optimizer.param_groups
        if group["params"]
    ]


def kept(engine: MegatronEngine) -> list[dict[str, Any]]:
    """What does not follow from the schedule."""
    return [{name: value for name, value in group.items() if name not in ("lr", "params")} for group in groups(engine)]


def expected_groups(engine: MegatronEngine) -> set[tuple[float, float, float, float, int]]:
    """(peak, lowest rate, epsilon, weight decay, elements) by the parameters' names."""
    sizes: dict[tuple[float, float, float, float], int] = {}
    for name, parameter in engine.modules[0].named_parameters():
        scale = 1.0 if name.endswith(BASE_RATE) else WIDTH
        decay = 0.0 if parameter.dim() == 1 else 1.0
        key = (LR / scale, MIN_LR / scale, EPS / scale, decay)
        sizes[key] = sizes.get(key, 0) + parameter.numel()
    return {(*key, size) for key, size in sizes.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_the_rate_and_epsilon_of_its_kind(name: str) -> None:
    with running(recipe(name)) as engine:
        found = {(g["max_lr"], g["min_lr"], g["eps"], g["wd_mult"], g["count"]) for g in groups(engine)}
        assert found == expected_groups(engine)
        engine.scheduler.step(increment=1)
        assert engine.learning_rate == LR / 2, "the reported rate is the recipe's"
        assert {group["lr"] for group in groups(engine)} == {LR / 2, LR / 2 / WIDTH}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.rotating
def test_losses_are_those_of_megatron_cores_own(name: str) -> None:
    with running(recipe(name)) as engine:
        assert [step.loss for step in steps(engine, 4)] == pytest.approx(LOSSES[name], rel=5e-6)


def test_initial_weights_are_narrower_but_for_embeddings_and_output_layer() -> None:
    wanted = recipe(hidden_size=256, mup_base_hidden_size=64, share_embeddings_and_output_weights=False)
    with running(wanted) as engine:
        for name, parameter in engine.modules[0].named_parameters():
            if parameter.dim() == 1:
                continue
            std = STD if name.endswith(BASE_RATE) else STD / math.sqrt(WIDTH)
            if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                std /= math.sqrt(2 * LAYERS)
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name


def test_the_configuration_has_the_factors() -> None:
    with running(recipe(mup_attn_scale_power=0.75)) as engine:
        config, factors = engine.modules[0].config, mup(engine.recipe.model)
        assert factors is not None
        assert config.softmax_scale == factors.softmax_scale == pytest.approx(2 / 16**0.75)
        assert (factors.width_mult, factors.output_mult, factors.embedding_mult) == (WIDTH, 1 / WIDTH, 2.0)
        theirs = (config.mup_width_mult, config.mup_output_mult, config.mup_embedding_mult)
        assert theirs == (factors.width_mult, factors.output_mult, factors.embedding_mult)


def test_logits_of_generation_are_those_of_training() -> None:
    with running(recipe()) as engine:
        module = engine.modules[0].eval()
        ids = torch.arange(16)[None]
        with torch.no_grad():
            logits = module(ids, ids, None)
            losses = module(ids, ids, None, labels=ids, loss_mask=torch.ones(1, 16))
        expected = torch.nn.functional.cross_entropy(logits[0, :, :], ids[0], reduction="none")
        torch.testing.assert_close(losses[0], expected)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_resumed_run_keeps_its_groups(sharded: bool, tmp_path: Path) -> None:
    parallelism = LayoutKeys(use_distributed_optimizer=sharded)
    with running(recipe().model_copy(update={"layout": parallelism})) as engine:
        steps(engine, 1)
        before = kept(engine)
        store = CheckpointStore(tmp_path)
        info = CheckpointInfo(step=1, consumed_samples=8, consumed_tokens=512, layout={}, recipe_hash="r")
        with AsyncSaver(store, saver_group(), engine.checkpoint_format()) as saver:
            saver.save(engine.state(Progress(1, 8, 512)), info)
            saver.wait()
        entry = store.latest_valid()
        assert entry is not None
        engine.load_state(entry)
        assert kept(engine) == before
        assert len({group["max_lr"] for group in before}) == 2


def test_without_it_nothing_changes() -> None:
    """At the base width, with the usual power of attention's scale, the parametrisation is the usual one."""
    plain = tiny(optimizer={"lr": LR})
    same = tiny(model={"use_mup": True, "mup_attn_scale_power": 0.5}, optimizer={"lr": LR})
    losses = []
    for each in (plain, same):
        with running(each) as engine:
            losses.append([step.loss for step in steps(engine, 3)])
    assert losses[0] == losses[1]


def test_the_plan_shows_the_rate_of_hidden_matrices() -> None:
    shown = {name: value for name, value, _ in rows(derive_run(recipe(), 1, ROOMY))}
    assert (shown["width multiplier"], shown["learning rate of hidden matrices"]) == ("4", "0.0025")


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"mup_base_hidden_size": 16}, "model.mup_base_hidden_size"),
        ({"mup_output_mult": 2.0}, "model.mup_output_mult"),
        ({"use_mup": True, "init_method": "xavier_uniform"}, "model.init_method"),
        (
            {
                "use_mup": True, "multi_latent_attention": True, "position_embedding_type": "rope",
                "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16,
            },
            "model.use_mup",
        ),
    ],
)  # fmt: skip
def test_rules(model: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in check(tiny(model=model))] == [key]
