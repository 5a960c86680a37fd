"""Going on from the newest valid checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from llmrecipes.checkpoint.loader import load
from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.errors import UserError
from llmrecipes.train.engine import MegatronEngine
from llmrecipes.train.state import Progress, restore, sharded_state
from llmrecipes.train.world import World


def random_layout(engine: MegatronEngine) -> dict[str, int]:
    """Degrees that random states belong to."""
    keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return {key: getattr(engine.recipe.parallelism, key) for key in keys}


def resume(engine: MegatronEngine, store: CheckpointStore, world: World) -> Progress:
    """Restore the newest valid checkpoint into the engine, where there is one.

    Returns:
        How far the run is: the beginning, where no checkpoint is valid.
    """
    found: list[Any] = [store.latest_valid() if world.is_first else None]
    # One rank decides: on a shared file system another might see a different listing.
    dist.broadcast_object_list(found, src=0)
    entry: Entry | None = found[0]
    if entry is None:
        return Progress()
    same_place = all(entry.manifest.layout.get(key, 1) == degree for key, degree in random_layout(engine).items())
    frame = sharded_state(engine, Progress(), loading=True, random=same_place)
    progress = restore(engine, load(entry, frame))
    if progress.step > engine.recipe.train.train_iters:
        raise UserError(
            f"train.train_iters is {engine.recipe.train.train_iters}, but the run has done {progress.step} steps",
            where=str(entry.path),
            fix=f"train.train_iters={progress.step} or more, or a new run id",
        )
    return progress
