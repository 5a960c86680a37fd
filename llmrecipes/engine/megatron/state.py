"""The state in a checkpoint, as a megatron-core sharded state dict.

Weights and optimizer state are stored by global name, shape and offset, so that any layout can read them. Random
states are byte tensors and progress is plain numbers: nothing in a checkpoint needs unpickling.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Progress
from llmrecipes.engine.megatron.checkpoint.loader import load
from llmrecipes.engine.megatron.checkpoint.optimizer_state import load_optimizer_state, sharded_optimizer_state
from llmrecipes.engine.megatron.model.gpt import CHECKPOINT_FORMAT, RecipeGPTModel
from llmrecipes.engine.megatron.world import seed_random_states

if TYPE_CHECKING:
    from llmrecipes.engine.megatron.engine import MegatronEngine

logger = logging.getLogger(__name__)


def sharded_state(
    engine: MegatronEngine, progress: Progress, *, loading: bool = False, random: bool = True
) -> dict[str, Any]:
    """The state to save, or the state dict that a checkpoint is loaded into.

    Args:
        engine: the engine; its tensors are referenced, not copied.
        progress: of the run; ignored when loading.
        loading: whether the result is for loading.
        random: whether to include random states, which only the same layout can use.
    """
    model = model_state(engine.modules)
    optimizer = sharded_optimizer_state(engine.optimizer, model, _metadata(), loading=loading)
    state = {
        **model,
        "optimizer": optimizer,
        "scheduler": engine.scheduler.state_dict(),
        "progress": asdict(progress),
    }
    if random:
        state["random"] = {name: _byte_tensor(f"random.{name}", value) for name, value in random_states().items()}
    return state


def model_state(modules: Sequence[RecipeGPTModel]) -> dict[str, Any]:
    """Sharded state dict of the weights only, by chunk; the names inside are global."""
    if len(modules) == 1:
        return {"model": modules[0].sharded_state()}
    return {f"model{number}": module.sharded_state() for number, module in enumerate(modules)}


def load_model(modules: Sequence[RecipeGPTModel], loaded: dict[str, Any]) -> None:
    """Copy loaded weights into the chunks."""
    for number, module in enumerate(modules):
        module.load_state_dict(loaded["model" if len(modules) == 1 else f"model{number}"])


def load_state(engine: MegatronEngine, entry: Entry) -> Progress:
    """Load a checkpoint into the engine and the random generators; a collective of all ranks.

    Without random states, which only the layout that saved them can use, dropout is reseeded for this step.

    Returns:
        Progress of the run.
    """
    now = random_layout(engine)
    then = {key: entry.manifest.layout.get(key, 1) for key in now}
    if then != now and dist.get_rank() == 0:
        logger.info(
            "%s was saved with %s and is resumed with %s: random states are re-seeded for step %d; only dropout draws "
            "from them",
            entry.path,
            _degrees(then),
            _degrees(now),
            entry.step,
        )
    loaded = load(entry, sharded_state(engine, Progress(), loading=True, random=then == now))
    load_model(engine.modules, loaded)
    load_optimizer_state(engine.optimizer, loaded["optimizer"])
    engine.scheduler.load_state_dict(loaded["scheduler"])
    progress = Progress(**loaded["progress"])
    if "random" in loaded:
        set_random_states(loaded["random"])
    else:
        seed_random_states(engine.recipe.train.seed + progress.step)
    return progress


def random_layout(engine: MegatronEngine) -> dict[str, int]:
    """Degrees that random states belong to."""
    keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return {key: getattr(engine.recipe.parallelism, key) for key in keys}


def _degrees(layout: dict[str, int]) -> str:
    return ", ".join(f"{key} {degree}" for key, degree in layout.items())


def random_states() -> dict[str, torch.Tensor]:
    """States of all generators that training uses, as byte tensors."""
    states = {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states["device"] = torch.cuda.get_rng_state()  # patched by the platform on a CPU
    states["cpu"] = torch.get_rng_state()
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Set what `random_states` returned."""
    tracker = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    get_cuda_rng_tracker().set_states(tracker)
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["cpu"])


def _metadata() -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**CHECKPOINT_FORMAT, "dp_cp_group": group, "singleton_local_shards": False}


def _byte_tensor(key: str, state: torch.Tensor) -> ShardedTensor:
    # Stages and tensor-parallel ranks draw different numbers; those of one data-parallel group draw the same, so one of
    # them writes.
    stages, ranks = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    return ShardedTensor.from_rank_offsets(
        key,
        state,
        (0, parallel_state.get_pipeline_model_parallel_rank(), stages),
        (1, parallel_state.get_tensor_model_parallel_rank(), ranks),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        prepend_axis_num=2,
    )
