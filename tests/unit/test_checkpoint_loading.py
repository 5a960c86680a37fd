"""What a checkpoint may hold, and which recipe may go on with it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from llmrecipes.checkpoint.compatibility import compatibility, differences, require_compatible
from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.saver import AsyncSaver
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.checkpoint.loader import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.source import make_source
from tests.refusals import refused

INFO = CheckpointInfo(step=1, consumed_samples=1, consumed_tokens=1, layout={}, recipe_hash="r")


def state() -> dict[str, Any]:
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", torch.ones(4)),
        "rng": ShardedObject("rng", [1, 2], (1,), (0,)),
        "step": 1,
    }


@pytest.fixture
def checkpoint(tmp_path: Path, group: Ranks) -> Path:
    store = CheckpointStore(tmp_path / "checkpoints")
    with AsyncSaver(store, group, ShardedFormat(), async_save=False) as saver:
        saver.save(state(), INFO)
    return store.path(1)


def recipe(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 64, "vocab_size": 64},
        "train": {"train_iters": 4, "global_batch_size": 32},
        "optimizer": {"lr": 1e-3},
        "layout": {"micro_batch_size": 4},
    }
    resolved = Recipe.model_validate(document).model_dump(mode="json")
    for key, value in changes.items():
        section, _, name = key.partition("__")
        place = resolved[section] if name else resolved
        assert (name or section) in place, key
        place[name or section] = value
    return resolved


@pytest.mark.parametrize(
    "change",
    [
        {"model__num_layers": 3},
        {"model__seq_length": 128},
        {"model__use_mup": True},
        {"train__global_batch_size": 64},
        {"train__seed": 1},
        {"train__precision": "fp32"},
        {"optimizer__lr": 2e-3},
        {"scheduler__lr_decay_style": "linear"},
        {"data__split": [90.0, 5.0, 5.0]},
        {"data__sources": [{"type": "text", "path": "other"}]},
        {"data__tokenizer": {"type": "huggingface", "path": "gpt2", "revision": None}},
    ],
)
def test_what_decides_the_loss_curve_must_not_change(change: dict[str, Any]) -> None:
    found = compatibility(recipe(**change), recipe())
    key = next(iter(change)).replace("__", ".")
    assert found
    assert all(difference.key.startswith(key) for difference in found)
    with refused("runs/tiny/1") as caught:
        require_compatible(recipe(**change), recipe(), where="runs/tiny/1")
    assert key in caught.value.what


@pytest.mark.parametrize(
    "change",
    [
        {"train__train_iters": 40},
        {"layout__micro_batch_size": 2},
        {"layout__recompute_granularity": "selective"},
        {"train__eval_interval": 5},
        {"layout__use_distributed_optimizer": False},
        {"checkpoint__save_interval": 5},
        {"tracking__mlflow": False},
        {"data__num_workers": 4},
        {"data__multiple_validation_sets": True},
        {"data__sources": [make_source(type="stdlib", label="code").model_dump(mode="json")]},
        {"scheduler__lr_decay_iters": 40},
        {"layout__engine": "deepspeed"},
        {"layout__zero": {"stage": 2}},
    ],
)
def test_what_decides_where_and_how_long_may_change(change: dict[str, Any]) -> None:
    assert len(differences(recipe(**change), recipe())) == 1
    assert compatibility(recipe(**change), recipe()) == []
    require_compatible(recipe(**change), recipe(), where="runs/tiny/1")


def test_a_stage_may_change_what_a_run_may() -> None:
    stage = {"name": "long", "model": {"seq_length": 64}, "layout": {"micro_batch_size": 2}}
    before = recipe(stages=[stage])
    laid_out = {**stage, "layout": {"tensor_model_parallel_size": 2, "manual_gc": True}}
    require_compatible(recipe(stages=[laid_out]), before, where="runs/tiny/1")
    for other in ({"name": "other"}, {"model": {"seq_length": 32}}, {"optimizer": {"lr": 1e-4}}, {"train_iters": 3}):
        with refused("runs/tiny/1"):
            require_compatible(recipe(stages=[{**laid_out, **other}]), before, where="runs/tiny/1")


SPACE = [{"key": "optimizer.lr", "low": 1e-4, "high": 1e-2}]


@pytest.mark.parametrize("now", [None, {"space": SPACE, "n_trials": 3}, {"space": SPACE, "timeout": 60.0}])
@pytest.mark.parametrize("then", ["absent", None, {"space": SPACE, "n_trials": 3}])
def test_a_search_is_no_part_of_a_training(now: Any, then: Any) -> None:
    """Also a run that was started before recipes had the section resumes."""
    before = recipe(search=None if then == "absent" else then)
    if then == "absent":
        del before["search"]
        assert Recipe.model_validate(before).search is None
    require_compatible(recipe(search=now), before, where="runs/tiny/1")


def test_the_same_recipe_is_compatible_however_its_tuples_are_written() -> None:
    now = recipe()
    now["data"]["split"] = tuple(now["data"]["split"])
    assert differences(now, recipe()) == []


def test_loading_logs_nothing_to_worry_about(checkpoint: Path, group: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    entry = CheckpointStore(checkpoint.parent).latest_valid()
    assert entry is not None
    with caplog.at_level(logging.WARNING):
        loaded = load(entry, state())
    assert loaded["rng"] == [1, 2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("saved", [{}, {"model": {"others": []}}, {"model": {"others": [[], []]}}])
def test_a_rank_loads_lists_that_the_first_rank_did_not_have(
    tmp_path: Path, group: Ranks, saved: dict[str, Any]
) -> None:
    """Router biases, of a stage whose first layers are dense: what is not sharded comes from the first rank alone."""
    store = CheckpointStore(tmp_path / "checkpoints")
    with AsyncSaver(store, group, ShardedFormat(), async_save=False) as saver:
        saver.save({**state(), **saved}, INFO)
    entry = store.latest_valid()
    assert entry is not None
    bias = torch.zeros(4)
    own = ShardedTensor.from_rank_offsets("weight", bias)
    loaded = load(entry, {**state(), "model": {"others": [[], [own], []]}})
    assert torch.equal(bias, torch.ones(4)), "it is read in place"
    assert loaded["step"] == 1


def test_norms_of_earlier_latent_attention_are_read_by_their_new_names(tmp_path: Path, group: Ranks) -> None:
    earlier = {
        "a.self_attention.linear_kv_up_proj.weight": "a.self_attention.linear_kv_up_proj.weight",
        "a.self_attention.kv_layernorm.weight": "a.self_attention.linear_kv_up_proj.layer_norm_weight",
        "b.self_attention.q_layernorm.weight": "b.self_attention.q_layernorm.weight",  # without a projection of its own
        "a.mlp.linear_fc1.weight": "a.mlp.linear_fc1.weight",
        "a.pre_mlp_layernorm.bias": "a.mlp.linear_fc1.layer_norm_bias",
        "b.pre_mlp_layernorm.bias": "b.pre_mlp_layernorm.bias",  # of experts
    }
    store = CheckpointStore(tmp_path / "checkpoints")
    values = {name: torch.full((4,), float(number)) for number, name in enumerate(earlier)}
    with AsyncSaver(store, group, ShardedFormat(), async_save=False) as saver:
        saver.save({name: ShardedTensor.from_rank_offsets(name, value) for name, value in values.items()}, INFO)
    wanted = {now: ShardedTensor.from_rank_offsets(now, torch.zeros(4)) for now in earlier.values()}
    entry = store.latest_valid()
    assert entry is not None
    loaded = load(entry, wanted)
    for name, now in earlier.items():
        assert torch.equal(loaded[now], values[name]), now
