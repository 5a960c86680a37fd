"""The random states of a run in its checkpoints, as byte tensors: of what `model.dropout` does not draw."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.core.checkpoint.index import Index
from llmrecipes.engine.core.checkpoint.loader import tensor_differences
from llmrecipes.engine.core.model.dropout import MICRO_BATCH
from llmrecipes.engine.core.world import seed_random_states
from llmrecipes.recipe.schema import Recipe

logger = logging.getLogger(__name__)


def same_random_states(recipe: Recipe, entry: Entry, index: Index) -> bool:
    """Whether a checkpoint's random states belong to the layout and the kind of device; if not, rank 0 says so."""
    keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    now = {key: getattr(recipe.layout, key) for key in keys}
    then = {key: entry.manifest.layout.get(key, 1) for key in now}
    if then != now:
        saved, resumed = _degrees(then), _degrees(now)
    elif tensor_differences(index, {"random": sharded_random_states()}):
        # A GPU's generator has another state than a CPU's.
        saved = f"device {entry.manifest.versions.get('device', 'of another kind')}"
        resumed = f"device {'cuda' if torch.cuda.is_available() else 'cpu'}"
    else:
        return True
    if dist.get_rank() == 0:
        logger.info(
            "%s was saved with %s and is resumed with %s: random states are re-seeded for step %d; dropout of "
            "adapters and of TransformerEngine's layers and jitter of routers draw from them",
            entry.path,
            saved,
            resumed,
            entry.step,
        )
    return False


def sharded_random_states() -> dict[str, ShardedTensor]:
    """States of all generators that training uses, to be saved, or to be loaded into."""
    return {name: _byte_tensor(f"random.{name}", value) for name, value in random_states().items()}


def load_random_states(loaded: dict[str, torch.Tensor] | None, seed: int) -> None:
    """Set loaded states; without them, dropout is seeded."""
    if loaded is None:
        seed_random_states(seed)
    else:
        set_random_states(loaded)


def random_states() -> dict[str, torch.Tensor]:
    """States of all generators that training uses, as byte tensors."""
    states = {
        f"tracker.{name}": state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in get_cuda_rng_tracker().get_states().items()
        if name != MICRO_BATCH
    }
    states["device"] = torch.cuda.get_rng_state()  # patched by the platform on a CPU
    states["cpu"] = torch.get_rng_state()
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Set what `random_states` returned."""
    tracker = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
    generators = {
        name: generator
        for name, generator in get_cuda_rng_tracker().get_states().items()
        if isinstance(generator, torch.Generator)  # of CUDA graphs, which refer to it
    }
    for name, generator in generators.items():
        generator.set_state(tracker[name])
    get_cuda_rng_tracker().set_states(tracker | generators)
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["cpu"])


def _degrees(layout: dict[str, int]) -> str:
    return ", ".join(f"{key} {degree}" for key, degree in layout.items())


def _byte_tensor(key: str, state: torch.Tensor) -> ShardedTensor:
    # Stages and tensor-parallel ranks draw different numbers; those of one data-parallel group draw the same, so one of
    # them writes.
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return ShardedTensor.from_rank_offsets(
        key,
        state,
        (0, parallel_state.get_pipeline_model_parallel_rank(), stages),
        (1, parallel_state.get_tensor_model_parallel_rank(), ranks),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        prepend_axis_num=2,
    )
