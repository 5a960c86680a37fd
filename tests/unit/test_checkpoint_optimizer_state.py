"""The optimizer state made in place is megatron-core's own, and comes back, for a real model and either optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    apply_factories,
)

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.megatron.checkpoint.format import ShardedFormat
from llmrecipes.engine.megatron.checkpoint.loader import load
from llmrecipes.engine.megatron.checkpoint.optimizer_state import load_optimizer_state, sharded_optimizer_state
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.megatron.model.gpt import build
from llmrecipes.engine.megatron.platform import select
from llmrecipes.engine.megatron.state import model_state
from llmrecipes.engine.megatron.world import join
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
            "parallelism": {"use_distributed_optimizer": distributed},
            "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1, "precision": precision},
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
        with join(platform, 1, chosen.parallelism) as world:
            plan = derive(chosen, world.size, detect())
            engine = MegatronEngine(plan, build(plan, platform), platform)
            for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
                for state in part.optimizer.state.values():
                    for value in state.values():
                        value.copy_(torch.randn_like(value) if value.dim() else torch.tensor(3.0))
            yield engine


def metadata() -> dict[str, Any]:
    return {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


def differing(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Paths at which two sharded state dicts are not the same."""
    if type(ours) is not type(theirs):
        return [f"{path}: {type(ours)} {type(theirs)}"]
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return [f"{path}: {list(ours)} {list(theirs)}"]
        return [found for key in ours for found in differing(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(ours, list):
        pairs = zip(ours, theirs, strict=True)
        return [found for index, pair in enumerate(pairs) for found in differing(*pair, f"{path}.{index}")]
    if isinstance(ours, ShardedTensor):
        same = ours.without_data() == theirs.without_data() and torch.equal(ours.data, theirs.data)
        return [] if same else [path]
    if isinstance(ours, LocalNonpersistentObject):
        return []
    return [] if ours == theirs else [path]


@pytest.mark.parametrize("engine", [("fp32", True), ("bf16", True)], ids=("fp32", "bf16"), indirect=True)
def test_it_is_what_megatron_core_makes(engine: MegatronEngine) -> None:
    ours = sharded_optimizer_state(engine.optimizer, model_state(engine.modules), metadata())
    theirs = engine.optimizer.sharded_state_dict(model_state(engine.modules), is_loading=False, metadata=metadata())
    apply_factories(ours)
    apply_factories(theirs)
    assert differing(ours["param_state"][0], theirs["param_state"]) == []


def test_it_loads_back(engine: MegatronEngine, tmp_path: Path) -> None:
    inner = [part.optimizer for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])]

    def state() -> list[torch.Tensor]:
        return [
            value
            for each in inner
            for group in each.param_groups
            for parameter in group["params"]
            for value in (parameter.detach(), *each.state[parameter].values())
            if isinstance(value, torch.Tensor)
        ]

    store = CheckpointStore(tmp_path)
    info = CheckpointInfo(step=1, consumed_samples=1, consumed_tokens=1, layout={}, recipe_hash="r")
    wanted = [value.clone() for value in state()]
    assert wanted
    with AsyncSaver(store, saver_group(), ShardedFormat()) as saver:
        model = model_state(engine.modules)
        saver.save({"optimizer": sharded_optimizer_state(engine.optimizer, model, metadata())}, info)
        for value in state():
            value.fill_(7)
        saver.wait()
    entry = store.latest_valid()
    assert entry is not None
    frame = sharded_optimizer_state(engine.optimizer, model_state(engine.modules), metadata(), loading=True)
    load_optimizer_state(engine.optimizer, load(entry, {"optimizer": frame})["optimizer"])
    assert all(torch.equal(new, old) for new, old in zip(state(), wanted, strict=True))
