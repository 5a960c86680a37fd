"""The state in a checkpoint, as a megatron-core sharded state dict.

Weights and optimizer state are stored by global name, shape and offset, so that any layout can read them. Random
states are byte tensors and progress is plain numbers: nothing in a checkpoint needs unpickling.

A rank saves the weights of the ranges whose optimizer state it saves; see `optimizer_state`. With the distributed
optimizer it loads no weights but makes those of its ranges from the master weights, and gathers the others as after
every update: nothing is read more than once for the data-parallel ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core import ema
from llmrecipes.engine.core.checkpoint.loader import load, read_index, rehearse
from llmrecipes.engine.core.checkpoint.slices import (
    OptimizerSlice,
    ShardedParameter,
    other_state,
    sharded_parameters,
)
from llmrecipes.engine.core.random_states import load_random_states, same_random_states, sharded_random_states
from llmrecipes.engine.core.weights import saved_states
from llmrecipes.engine.megatron.optimizer_state import (
    finish_load,
    needed_state,
    saved_state,
    scaler_state,
    update_count,
)

if TYPE_CHECKING:
    from llmrecipes.engine.megatron.engine import MegatronEngine

logger = logging.getLogger(__name__)


def sharded_state(engine: MegatronEngine, progress: Progress) -> dict[str, Any]:
    """The state to save; the engine's tensors are referenced, not copied, and there is no communication.

    Weights that another rank updates may be those before the update (`overlap_param_gather`): they are not saved here.

    Args:
        engine: the engine.
        progress: of the run.
    """
    model = saved_states(engine.modules)
    owned = saved_state(engine.optimizer, _sharded_parameters(model))
    weights = [each.weight_shards(exclusive=True) for part in owned.values() for each in part]
    return _state(engine, model, weights, owned, progress, exclusive=True, random=True)


def load_state(engine: MegatronEngine, entry: Entry) -> Progress:
    """Load a checkpoint into the engine and the random generators; a collective of all ranks.

    Without random states, which only the layout that saved them can use, dropout is reseeded for this step. Without an
    average of the weights, one that the recipe wants begins with the loaded weights.

    Returns:
        Progress of the run.
    """
    index = read_index(entry)
    random = same_random_states(engine.recipe, entry, index)
    averaged = ema.is_in(index)
    progress = _restore(engine, load(entry, _wanted(engine, random=random, averaged=averaged), index))
    if engine.recipe.optimizer.ema_decay is not None and not averaged:
        ema.start(engine.optimizer)
        if dist.get_rank() == 0:
            logger.info("%s has no average of the weights: optimizer.ema_decay begins with them", entry.path)
    return progress


def rehearse_load(engine: MegatronEngine) -> list[int]:
    """`load_state` without reading; returns the bytes of each part that this rank would read."""
    loaded, sizes = rehearse(_wanted(engine, random=False, averaged=True))
    _restore(engine, loaded)
    return sizes


def _wanted(engine: MegatronEngine, *, random: bool, averaged: bool) -> dict[str, Any]:
    """What this rank needs of a checkpoint; it is read into the engine's tensors."""
    distributed = engine.recipe.parallelism.use_distributed_optimizer
    model = saved_states(engine.modules)
    needed = needed_state(engine.optimizer, _sharded_parameters(model))
    if not averaged:
        needed = {number: ema.left_out(part) for number, part in needed.items()}
    weights = [] if distributed else [each.weight_shards(exclusive=False) for part in needed.values() for each in part]
    return _state(engine, model, weights, needed, Progress(), exclusive=distributed, random=random)


def _restore(engine: MegatronEngine, loaded: dict[str, Any]) -> Progress:
    """Set what is not read in place."""
    finish_load(engine.optimizer, loaded["optimizer"]["step"], loaded["optimizer"]["grad_scaler"])
    if engine.recipe.parallelism.use_distributed_optimizer:
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)
    engine.scheduler.load_state_dict(loaded["scheduler"])
    progress = Progress(**loaded["progress"])
    load_random_states(loaded.get("random"), engine.recipe.train.seed + progress.step)
    return progress


def _sharded_parameters(states: Sequence[dict[str, Any]]) -> list[ShardedParameter]:
    return [sharded for state in states for sharded in sharded_parameters(state)]


def _state(
    engine: MegatronEngine,
    model: Sequence[dict[str, Any]],
    weights: list[list[Any]],
    owned: Mapping[int, Sequence[OptimizerSlice]],
    progress: Progress,
    *,
    exclusive: bool,
    random: bool,
) -> dict[str, Any]:
    state = {
        "model": {"parameters": weights, "others": [other_state(each) for each in model]},
        "optimizer": {
            "param_state": {
                number: {index: each.optimizer_shards(exclusive=exclusive) for index, each in enumerate(part)}
                for number, part in owned.items()
            },
            "step": update_count(engine.optimizer),
            "grad_scaler": scaler_state(engine.optimizer),
        },
        "scheduler": engine.scheduler.state_dict(),
        "progress": asdict(progress),
    }
    if random:
        state["random"] = sharded_random_states()
    return state
