"""The state in a checkpoint, in the form that the megatron engine writes: either engine reads the other's.

Each rank stores the ranges of weights, master weights and moments that ZeRO gave it, as slices of the global tensors:
nothing is gathered, and any number of ranks, at any stage, can read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core.checkpoint.loader import load, rehearse
from llmrecipes.engine.core.checkpoint.reading import read_index
from llmrecipes.engine.core.checkpoint.slices import OptimizerSlice
from llmrecipes.engine.core.random_states import load_random_states, same_random_states, sharded_random_states
from llmrecipes.engine.core.rank_weights import load_model, model_state
from llmrecipes.engine.core.update import load_schedule
from llmrecipes.engine.deepspeed.build import zero
from llmrecipes.engine.deepspeed.partition import drop_second_copy, other_state, own_partition

if TYPE_CHECKING:
    from llmrecipes.engine.deepspeed.engine import DeepSpeedEngine


def sharded_state(engine: DeepSpeedEngine, progress: Progress) -> dict[str, Any]:
    """The state to save; its tensors are the engine's own, but copies where the engine keeps them on a disk."""
    owned = list(engine.partition.owned())
    return _sharded_state(engine, progress, _owned_weights(engine, owned), owned, random=True)


def load_state(engine: DeepSpeedEngine, entry: Entry) -> Progress:
    """Load a checkpoint into the engine and the random generators; a collective of all ranks."""
    index = read_index(entry)
    random = same_random_states(engine.recipe, entry, index)
    owned = list(engine.partition.owned())
    wanted = _sharded_state(engine, Progress(), _weights(engine), owned, random)
    return _restore(engine, load(entry, wanted, index), owned)


def rehearse_load(engine: DeepSpeedEngine) -> list[int]:
    """`load_state` without reading; returns the bytes of each part that this rank would read."""
    owned = list(engine.partition.owned())
    loaded, sizes = rehearse(_sharded_state(engine, Progress(), _weights(engine), owned, random=False))
    _restore(engine, loaded, owned)
    return sizes


def _restore(engine: DeepSpeedEngine, loaded: dict[str, Any], owned: list[OptimizerSlice]) -> Progress:
    """Set what is not read in place."""
    if zero(engine.recipe).stage < 3:
        load_model([engine.module], loaded["model"])
    else:
        for sharded in engine.sharded_parameters:
            drop_second_copy(sharded.parameter)
    engine.partition.write_back(owned)
    engine.partition.updates = loaded["optimizer"]["step"]
    _load_scaler(engine, loaded["optimizer"]["grad_scaler"])
    progress = Progress(**loaded["progress"])
    load_schedule(engine.scheduler, loaded["scheduler"], engine.recipe, progress.step)
    load_random_states(loaded.get("random"), engine.recipe.train.seed + progress.step)
    return progress


def _sharded_state(
    engine: DeepSpeedEngine, progress: Progress, model: dict[str, Any], owned: Sequence[OptimizerSlice], random: bool
) -> dict[str, Any]:
    state = {
        "model": model,
        "optimizer": {
            "param_state": {0: _optimizer(engine, owned)},
            "step": engine.partition.updates,
            "grad_scaler": _scaler(engine),
        },
        "scheduler": engine.scheduler.state_dict(),
        "progress": asdict(progress),
    }
    if random:
        state["random"] = sharded_random_states()
    return state


def _weights(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Weights that this rank has, and buffers that training changes."""
    if zero(engine.recipe).stage < 3:
        return model_state([engine.module])
    parameters = []
    for sharded in engine.sharded_parameters:
        partition = own_partition(sharded.parameter)
        parameters.append(sharded.shards("", partition.start, partition.values, exclusive=True))
    return {"parameters": parameters, "others": other_state(engine.module)}


def _owned_weights(engine: DeepSpeedEngine, owned: Sequence[OptimizerSlice]) -> dict[str, Any]:
    """`_weights`, but in stages 1 and 2, where all data-parallel ranks have the same, those that this rank updates."""
    if zero(engine.recipe).stage not in (1, 2):
        return _weights(engine)
    parameters = [each.weight_shards(exclusive=True) for each in owned]
    return {"parameters": parameters, "others": other_state(engine.module)}


def _optimizer(engine: DeepSpeedEngine, owned: Sequence[OptimizerSlice]) -> dict[int, Any]:
    replicated = zero(engine.recipe).stage == 0
    return {number: each.optimizer_shards(exclusive=not replicated) for number, each in enumerate(owned)}


def _scaler(engine: DeepSpeedEngine) -> dict[str, Any] | None:
    """The loss scaler in megatron-core's form: scale, steps since the last change, overflows that are left."""
    if engine.recipe.train.precision != "fp16":
        return None
    scaler = engine.optimizer.loss_scaler
    grown = (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window
    return {
        "scale": torch.tensor([float(scaler.cur_scale)]),
        "growth_tracker": grown,
        "hysteresis_tracker": scaler.cur_hysteresis,
    }


def _load_scaler(engine: DeepSpeedEngine, loaded: dict[str, Any] | None) -> None:
    if loaded is None:
        return
    scaler = engine.optimizer.loss_scaler
    scaler.cur_scale = float(loaded["scale"])
    scaler.cur_iter = loaded["growth_tracker"]
    scaler.last_overflow_iter = -1
    scaler.cur_hysteresis = max(1, loaded["hysteresis_tracker"])
