"""What a checkpoint holds, as a megatron-core sharded state dict.

Weights and optimizer state are laid out by global name, shape and offset, so that another layout can read them. Random
states are byte tensors and progress is plain numbers: nothing in a checkpoint needs unpickling.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from llmrecipes.checkpoint.optimizer_state import sharded_optimizer_state
from llmrecipes.train.engine import MegatronEngine

OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
"""Optimizer state by parameter, not by buffer: the format that every layout can read."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0


def sharded_state(engine: MegatronEngine, progress: Progress, *, loading: bool = False) -> dict[str, Any]:
    """The state to save, or the frame that a checkpoint is loaded into.

    Args:
        engine: the engine; its tensors are referenced, not copied.
        progress: how far the run is; without meaning when loading.
        loading: whether the result is for loading.
    """
    model = model_state(engine.module)
    if loading:
        optimizer = engine.optimizer.sharded_state_dict(model, is_loading=True, metadata=_metadata())
    else:
        optimizer = sharded_optimizer_state(engine.optimizer, model, _metadata())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": engine.scheduler.state_dict(),
        "random": {name: _byte_tensor(f"random.{name}", state) for name, state in random_states().items()},
        "progress": asdict(progress),
    }


def model_state(module: torch.nn.Module) -> dict[str, Any]:
    """Sharded state dict of the weights alone."""
    state: dict[str, Any] = module.sharded_state_dict(metadata=_metadata())  # type: ignore[operator]
    return state


def _metadata() -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**OPTIMIZER_FORMAT, "dp_cp_group": group, "singleton_local_shards": False}


def restore(engine: MegatronEngine, loaded: dict[str, Any]) -> Progress:
    """Put a loaded checkpoint into the engine and the random generators.

    Returns:
        How far the run is.
    """
    engine.module.load_state_dict(loaded["model"])
    engine.optimizer.load_state_dict(loaded["optimizer"])
    engine.scheduler.load_state_dict(loaded["scheduler"])
    set_random_states(loaded["random"])
    return Progress(**loaded["progress"])


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


def _byte_tensor(key: str, state: torch.Tensor) -> ShardedTensor:
    # Data-parallel ranks draw the same numbers, so one of them writes.
    return ShardedTensor.from_rank_offsets(key, state, replica_id=parallel_state.get_data_parallel_rank())
