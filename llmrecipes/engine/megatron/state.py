"""What a checkpoint holds, as a megatron-core sharded state dict.

Weights and optimizer state are laid out by global name, shape and offset, so that another layout can read them. Random
states are byte tensors and progress is plain numbers: nothing in a checkpoint needs unpickling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from llmrecipes.engine.megatron.checkpoint.optimizer_state import load_optimizer_state, sharded_optimizer_state
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.megatron.model.gpt import CHECKPOINT_FORMAT, RecipeGPTModel
from llmrecipes.engine.megatron.world import seed_random_states


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0


def sharded_state(
    engine: MegatronEngine, progress: Progress, *, loading: bool = False, random: bool = True
) -> dict[str, Any]:
    """The state to save, or the frame that a checkpoint is loaded into.

    Args:
        engine: the engine; its tensors are referenced, not copied.
        progress: how far the run is; without meaning when loading.
        loading: whether the result is for loading.
        random: whether random states belong to it; another layout has no use for them.
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
    """Sharded state dict of the weights alone, by chunk; the names inside are global."""
    if len(modules) == 1:
        return {"model": modules[0].sharded_state()}
    return {f"model{number}": module.sharded_state() for number, module in enumerate(modules)}


def load_model(modules: Sequence[RecipeGPTModel], loaded: dict[str, Any]) -> None:
    """Put loaded weights into the chunks."""
    for number, module in enumerate(modules):
        module.load_state_dict(loaded["model" if len(modules) == 1 else f"model{number}"])


def restore(engine: MegatronEngine, loaded: dict[str, Any]) -> Progress:
    """Put a loaded checkpoint into the engine and the random generators.

    Without random states, which only the layout that saved them can use, dropout goes on from a seed for this step.

    Returns:
        How far the run is.
    """
    load_model(engine.modules, loaded)
    load_optimizer_state(engine.optimizer, loaded["optimizer"])
    engine.scheduler.load_state_dict(loaded["scheduler"])
    progress = Progress(**loaded["progress"])
    if "random" in loaded:
        set_random_states(loaded["random"])
    else:
        seed_random_states(engine.recipe.train.seed + progress.step)
    return progress


def random_states() -> dict[str, torch.Tensor]:
    """Byte tensors of every generator that training draws from."""
    states = {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states["device"] = torch.cuda.get_rng_state()  # the platform's stand-in answers this on a CPU
    states["cpu"] = torch.get_rng_state()
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Set what `random_states` gave."""
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
