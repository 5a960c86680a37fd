"""The optimizer state that is saved is megatron-core's own, and comes back, for a real model and either optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core import random_states
from llmrecipes.engine.core.checkpoint.loader import load
from llmrecipes.engine.core.checkpoint.slices import sharded_parameters
from llmrecipes.engine.core.model.gpt import build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.rank_weights import load_model, model_state
from llmrecipes.engine.core.world import join
from llmrecipes.engine.megatron import state
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.megatron.state import needed_state, saved_state
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe


def recipe(precision: str, distributed: bool) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "small",
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "seq_length": 16,
                "vocab_size": 128,
                # A gated MLP is saved by halves: its tensors are made by factories.
                "activation_func": "silu",
                "gated_linear_unit": True,
            },
            "layout": {"use_distributed_optimizer": distributed, "micro_batch_size": 1},
            "train": {"train_iters": 1, "global_batch_size": 1, "precision": precision},
            "optimizer": {"lr": 1e-3},
        }
    )


@pytest.fixture(
    params=[("fp32", True), ("fp32", False), ("bf16", True), ("bf16", False)], ids=lambda case: f"{case[0]}-{case[1]}"
)
def engine(request: pytest.FixtureRequest) -> Iterator[MegatronEngine]:
    chosen = recipe(*request.param)
    platform = select()
    platform.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        with join(platform, 1, chosen.layout) as world:
            plan = derive(chosen, world.size, detect())
            engine = MegatronEngine(plan, build(plan, platform), platform)
            for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
                for state in part.optimizer.state.values():
                    for value in state.values():
                        value.copy_(torch.randn_like(value) if value.dim() else torch.tensor(3.0))
            yield engine
            engine.close()


def whole(state: Any) -> dict[str, torch.Tensor]:
    """The global tensors of a sharded state dict in one process, by name; layers are stacked."""
    found: dict[str, torch.Tensor] = {}
    apply_factories(state)
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor):
            shape = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
            ends = (first + size for first, size in zip(shard.global_offset, shape, strict=True))
            into = found.setdefault(shard.key, torch.full(shard.global_shape, torch.nan, dtype=shard.data.dtype))
            into[tuple(map(slice, shard.global_offset, ends))] = shard.data.detach().view(shape)
    return found


@pytest.mark.parametrize("engine", [("fp32", True), ("bf16", True)], ids=("fp32", "bf16"), indirect=True)
def test_it_is_what_megatron_core_makes(engine: MegatronEngine) -> None:
    ours = whole(engine.state(Progress())["optimizer"])
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    model = engine.modules[0].sharded_state()
    theirs = whole(engine.optimizer.sharded_state_dict(model, is_loading=False, metadata=metadata))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_it_loads_back(engine: MegatronEngine, tmp_path: Path) -> None:
    inner = [part.optimizer for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])]

    def state() -> list[torch.Tensor]:
        masters_and_moments = [
            value
            for each in inner
            for group in each.param_groups
            for parameter in group["params"]
            for value in (parameter.detach(), *each.state[parameter].values())
            if isinstance(value, torch.Tensor)
        ]
        return [*masters_and_moments, *(parameter.detach() for parameter in engine.modules[0].parameters())]

    store = CheckpointStore(tmp_path)
    info = CheckpointInfo(step=1, consumed_samples=1, consumed_tokens=1, layout={}, recipe_hash="r")
    wanted = [value.clone() for value in state()]
    assert wanted
    with AsyncSaver(store, saver_group(), engine.checkpoint_format()) as saver:
        saver.save(engine.state(Progress(step=1)), info)
        for value in state():
            value.fill_(7)
        saver.wait()
    entry = store.latest_valid()
    assert entry is not None
    assert engine.load_state(entry) == Progress(step=1)
    assert all(torch.equal(new, old) for new, old in zip(state(), wanted, strict=True))


@pytest.mark.parametrize("engine", [("fp32", False), ("bf16", False)], ids=("fp32", "bf16"), indirect=True)
def test_the_shares_of_replicas_are_the_whole(engine: MegatronEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of weights and moments, once and in its place, whichever rank writes it."""
    parameters = sharded_parameters(engine.modules[0].saved_state())
    (whole,) = needed_state(engine.optimizer, parameters).values()
    monkeypatch.setattr(state, "LEAST_PIECE", 64)
    ranks = 3
    shares = []
    for rank in range(ranks):
        monkeypatch.setattr(state, "_replicas", lambda _, rank=rank: (rank, ranks))
        (share,) = saved_state(engine.optimizer, parameters).values()
        shares.append(share)
    assert max(each.start for share in shares for each in share) > 0, "something is cut"
    for each in whole:
        pieces = [one for share in shares for one in share if one.sharded is each.sharded]
        pieces.sort(key=lambda one: one.start)
        for name, values in each.tensors.items():
            ends = [one.start + one.tensors[name].numel() for one in pieces]
            assert [one.start for one in pieces] == [0, *ends[:-1]]
            assert torch.equal(torch.cat([one.tensors[name] for one in pieces]), values)
            assert name == "param" or values.unique().numel() > 1, "moments that are all alike show nothing"


def saved(engine: MegatronEngine, folder: Path) -> Entry:
    """A checkpoint of now."""
    info = CheckpointInfo(
        step=1, consumed_samples=1, consumed_tokens=1, layout=engine.plan.layout.as_dict(), recipe_hash="r"
    )
    store = CheckpointStore(folder)
    with AsyncSaver(store, saver_group(), engine.checkpoint_format(), async_save=False) as saver:
        saver.save(engine.state(Progress(step=1)), info)
    entry = store.latest_valid()
    assert entry is not None
    return entry


@pytest.mark.parametrize("engine", [("fp32", True)], ids=("fp32",), indirect=True)
def test_random_states_of_another_kind_of_device_are_not_loaded(
    engine: MegatronEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states = random_states.random_states
    with monkeypatch.context() as patch:
        patch.setattr(
            random_states, "random_states", lambda: {**states(), "device": torch.zeros(16, dtype=torch.uint8)}
        )
        entry = saved(engine, tmp_path)
    with caplog.at_level("INFO", logger=random_states.__name__):
        assert engine.load_state(entry) == Progress(step=1)
    (note,) = caplog.records
    assert note.args is not None
    assert str(entry.path) in note.getMessage()
    assert "device cpu" in note.args
    assert {"device": "cpu", "layers": "local"}.items() <= entry.manifest.versions.items()


@pytest.mark.parametrize("engine", [("fp32", True)], ids=("fp32",), indirect=True)
def test_layers_that_keep_an_extra_state_read_what_layers_without_have_saved(
    engine: MegatronEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TransformerEngine's do."""
    entry = saved(engine, tmp_path)
    norm = type(engine.modules[0].decoder.final_layernorm)
    monkeypatch.setattr(norm, "get_extra_state", lambda _: None, raising=False)
    assert any(name.endswith("_extra_state") for name in engine.modules[0].sharded_state())
    weight = engine.modules[0].decoder.final_layernorm.weight
    for load_again in (
        lambda: engine.load_state(entry),
        lambda: load_model(engine.modules, load(entry, model_state(engine.modules))),
    ):
        weight.data.fill_(7)
        load_again()
        assert torch.equal(weight.detach(), torch.ones_like(weight))
