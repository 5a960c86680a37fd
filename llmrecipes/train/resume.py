"""Going on from the newest valid checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from llmrecipes.checkpoint.loader import load
from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.errors import UserError
from llmrecipes.train.engine import MegatronEngine
from llmrecipes.train.state import Progress, restore, sharded_state
from llmrecipes.train.world import World

logger = logging.getLogger(__name__)


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
    now = random_layout(engine)
    then = {key: entry.manifest.layout.get(key, 1) for key in now}
    same_place = then == now
    if not same_place and world.is_first:
        logger.info(
            "%s was saved with %s and is resumed with %s: random states are new ones, seeded for step %d; only dropout "
            "draws from them",
            entry.path,
            _degrees(then),
            _degrees(now),
            entry.step,
        )
    frame = sharded_state(engine, Progress(), loading=True, random=same_place)
    progress = restore(engine, load(entry, frame))
    if progress.step > engine.recipe.train.train_iters:
        raise UserError(
            f"train.train_iters is {engine.recipe.train.train_iters}, but the run has done {progress.step} steps",
            where=str(entry.path),
            fix=f"train.train_iters={progress.step} or more, or a new run id",
        )
    return progress


def _degrees(layout: dict[str, int]) -> str:
    return ", ".join(f"{key} {degree}" for key, degree in layout.items())
