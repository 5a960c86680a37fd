"""One rank of a gloo world that runs every case of the distributed tests and writes what came out.

`python -m tests.dist.world_program <folder>` under a launcher; rank 0 writes `<folder>/world-<size>.json`. The world of
two saves checkpoints, which the others continue.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.faults.numerics import NonFinite
from llmrecipes.platform import select
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.engine import Batch, MegatronEngine
from llmrecipes.train.finite import require_finite
from llmrecipes.train.resume import resume
from llmrecipes.train.state import Progress, sharded_state
from llmrecipes.train.world import World, join
from tests.helpers import LLAMA, engine_of, random_batches, tiny

STEPS = 5
SAVED_BY = 2
SAVED_AT = 3
POISONED = "decoder.layers.1.mlp.linear_fc1.weight"

PARITY: dict[str, dict[str, dict[str, Any]]] = {
    "distributed optimizer": {},
    "whole optimizer": {"parallelism": {"use_distributed_optimizer": False}},
    "overlapped reduction": {"parallelism": {"overlap_grad_reduce": True}},
    "overlapped gathering": {"parallelism": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "llama": {"model": LLAMA},
    "micro-batch 1": {"train": {"micro_batch_size": 1}},
    "bf16": {"train": {"precision": "bf16"}},
}
RESUMED: dict[str, dict[str, dict[str, Any]]] = {
    "fp32": {},
    "bf16": {"train": {"precision": "bf16"}},
    "overlapped gathering": {"parallelism": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "whole optimizer": {"parallelism": {"use_distributed_optimizer": False}},
}


def feed(recipe: Recipe, world: World, consumed: int = 0) -> Iterator[Batch]:
    return random_batches(recipe, consumed=consumed, rank=world.data_parallel_rank, ranks=world.data_parallel_size)


def numbers(engine: MegatronEngine, batches: Iterator[Batch], count: int) -> dict[str, list[float]]:
    """Losses and gradient norms of some steps."""
    results = [engine.train_step(batches) for _ in range(count)]
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm or math.nan for r in results]}


def parity(world: World, changes: dict[str, Any]) -> dict[str, Any]:
    """The first steps of a recipe, its validation loss after them, and whether all ranks have the same weights."""
    recipe = tiny(**changes)
    engine = engine_of(recipe)
    found = numbers(engine, feed(recipe, world), STEPS)
    with engine.settled():
        valid = engine.evaluate(feed(recipe, world), 1)
        mine = torch.stack([parameter.double().sum() for parameter in engine.module.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyones, mine)
    return {**found, "valid": valid, "same_weights": all(torch.equal(mine, other) for other in everyones)}


def saved(world: World, changes: dict[str, Any], folder: Path) -> dict[str, list[float]]:
    """Train to a checkpoint, save it and go on; the steps after it."""
    recipe = tiny(**changes)
    engine = engine_of(recipe)
    batches = feed(recipe, world)
    numbers(engine, batches, SAVED_AT)
    consumed = SAVED_AT * recipe.train.global_batch_size
    progress = Progress(step=SAVED_AT, consumed_samples=consumed, consumed_tokens=consumed * recipe.model.seq_length)
    layout = {"world_size": world.size}
    info = CheckpointInfo(
        step=SAVED_AT,
        consumed_samples=consumed,
        consumed_tokens=progress.consumed_tokens,
        layout=layout,
        recipe_hash="t",
    )
    with AsyncSaver(CheckpointStore(folder), saver_group()) as saver:
        with engine.settled():
            saver.save(sharded_state(engine, progress), info)
        found = numbers(engine, batches, STEPS)
        assert saver.wait()[0].error is None
    return found


def resumed(world: World, changes: dict[str, Any], folder: Path) -> dict[str, list[float]]:
    """The steps after a checkpoint of the other world, from a model that started elsewhere."""
    recipe = tiny(**changes)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 99})})
    engine = engine_of(recipe)
    progress = resume(engine, CheckpointStore(folder), world)
    assert progress.step == SAVED_AT
    return numbers(engine, feed(recipe, world, progress.consumed_samples), STEPS)


def poisoned(world: World) -> list[str]:
    """What each rank says when one weight of the last rank is NaN."""
    recipe = tiny()
    engine = engine_of(recipe)
    if world.rank == world.size - 1:
        with torch.no_grad():
            engine.module.get_parameter(POISONED)[2, 3] = math.nan
    said = "nothing"
    try:
        require_finite(7, engine.train_step(feed(recipe, world)), engine, world)
    except NonFinite as error:
        said = f"{error.code} {error}"
    everyones: list[str] = [""] * world.size
    dist.all_gather_object(everyones, said)
    return everyones


def stopping(world: World) -> list[bool]:
    """Whether each rank hears of a stop that the last one was asked for, before and after."""
    recipe = tiny()
    engine = engine_of(recipe)
    batches = feed(recipe, world)
    heard = [engine.train_step(batches, stop=asked and world.rank == world.size - 1).stop for asked in (False, True)]
    everyones: list[list[bool]] = [[]] * world.size
    dist.all_gather_object(everyones, heard)
    return [answer for answers in everyones for answer in answers]


def main(folder: Path) -> None:
    """Run all cases of this rank."""
    platform = select(int(os.environ.get("LOCAL_RANK", "0")))
    platform.install()
    with join(platform, seed=1234) as world:
        found: dict[str, Any] = {"parity": {name: parity(world, changes) for name, changes in PARITY.items()}}
        follow = saved if world.size == SAVED_BY else resumed
        found["resumed"] = {name: follow(world, changes, folder / name) for name, changes in RESUMED.items()}
        found["poisoned"] = poisoned(world)
        found["stopping"] = stopping(world)
    if world.is_first:
        (folder / f"world-{world.size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
