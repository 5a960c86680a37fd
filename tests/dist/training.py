"""Training of one row on the ranks of a joined world, and what has to be the same in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from torch.utils.data import Dataset

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cluster import Cluster
from llmrecipes.data.loader import batches
from llmrecipes.model.gpt import build
from llmrecipes.model.init import global_name
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.platform import Platform, select
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.engine import Batch, MegatronEngine
from llmrecipes.train.resume import resume
from llmrecipes.train.state import Progress, sharded_state
from llmrecipes.train.world import World, model_parallel
from tests.dist.table import SAVED_AT, STEPS

# Whether a tiny model fits is not what is asked here, and asking nvidia-smi or /proc once a row takes time.
ROOMY = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 40, memory_available_bytes=1 << 40, disk_free_bytes=1 << 40)


@dataclass(frozen=True)
class Outcome:
    """What a training came to: loss and gradient norm of each step, and the model after the last."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, np.ndarray]
    """Every global parameter and buffer by name, put together from the ranks that hold it."""


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of two outcomes."""

    loss: float
    norm: float
    tensor: float
    worst: str
    """Name of the tensor that differs most."""

    @property
    def largest(self) -> float:
        return max(self.loss, self.norm, self.tensor)

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, gradient norm {self.norm:.1e}, parameters {self.tensor:.1e} ({self.worst})"


def compare(outcome: Outcome, reference: Outcome) -> Difference:
    """Differences from the reference; of as many steps from the end as the outcome has.

    A tensor's is ‖a - b‖ / ‖b‖ in the Frobenius norm.
    """
    assert outcome.tensors.keys() == reference.tensors.keys()
    tensors = {name: _distance(value, reference.tensors[name]) for name, value in outcome.tensors.items()}
    worst = max(tensors, key=lambda name: tensors[name])
    count = len(outcome.losses)
    return Difference(
        _largest(outcome.losses, reference.losses[-count:]),
        _largest(outcome.norms, reference.norms[-count:]),
        tensors[worst],
        worst,
    )


def train(recipe: Recipe) -> Outcome | None:
    """Train from the beginning. Like `save_midway` and `go_on`, to be called on every rank; the first answers."""
    with model_parallel(recipe.train.seed, recipe.parallelism) as world:
        engine, _ = _engine(recipe, world)
        return _run(engine, world, _feed(recipe, world), STEPS)


def save_midway(recipe: Recipe, folder: Path) -> None:
    """Train the first steps and write a checkpoint."""
    with model_parallel(recipe.train.seed, recipe.parallelism) as world:
        engine, plan = _engine(recipe, world)
        feed = _feed(recipe, world)
        for _ in range(SAVED_AT):
            engine.train_step(feed)
        samples = SAVED_AT * recipe.train.global_batch_size
        progress = Progress(SAVED_AT, samples, samples * recipe.model.seq_length)
        info = CheckpointInfo(
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            layout=plan.layout,
            recipe_hash="parity",
        )
        with AsyncSaver(CheckpointStore(folder), saver_group()) as saver:
            with engine.settled():
                saver.save(sharded_state(engine, progress), info)
            (report,) = saver.wait()
            assert report.error is None, report.error


def go_on(recipe: Recipe, folder: Path) -> Outcome | None:
    """Train the steps after a checkpoint, from a model that started elsewhere."""
    elsewhere = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 99})})
    with model_parallel(elsewhere.train.seed, elsewhere.parallelism) as world:
        engine, _ = _engine(elsewhere, world)
        progress = resume(engine, CheckpointStore(folder), world)
        assert progress.step == SAVED_AT
        return _run(engine, world, _feed(recipe, world, progress.consumed_samples), STEPS - SAVED_AT)


def _engine(recipe: Recipe, world: World) -> tuple[MegatronEngine, Plan]:
    platform: Platform = select()
    plan = derive(recipe, world.size, ROOMY)
    return MegatronEngine(recipe, plan, build(recipe, plan, platform), platform), plan


class _RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Samples that depend on their number alone. A part of each, never the same, does not count for the loss, so that
    micro-batches and ranks differ in the tokens they have."""

    def __init__(self, recipe: Recipe) -> None:
        self._length, self._vocabulary = recipe.model.seq_length, recipe.model.vocab_size
        self._size = recipe.train.global_batch_size * recipe.train.train_iters

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(self._vocabulary, (self._length + 1,), generator=random)
        mask = torch.ones(self._length)
        mask[: index % 7 * self._length // 8] = 0
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "position_ids": torch.arange(self._length)}


def _feed(recipe: Recipe, world: World, consumed: int = 0) -> Iterator[Batch]:
    return batches(
        _RandomTokens(recipe),
        consumed_samples=consumed,
        micro_batch_size=recipe.train.micro_batch_size,
        global_batch_size=recipe.train.global_batch_size,
        data_parallel_rank=world.data_parallel_rank,
        data_parallel_size=world.data_parallel_size,
        num_workers=0,
        prefetch_factor=1,
        pin_memory=False,
    )


def _run(engine: MegatronEngine, world: World, feed: Iterator[Batch], steps: int) -> Outcome | None:
    results = [engine.train_step(feed) for _ in range(steps)]
    with engine.settled():
        tensors = _whole_tensors(engine, world)
    if not world.is_first:
        return None
    return Outcome([r.loss for r in results], [r.grad_norm or math.nan for r in results], tensors)


def _whole_tensors(engine: MegatronEngine, world: World) -> dict[str, np.ndarray]:
    """Global parameters and buffers on the first rank; empty on the others."""
    mine = []
    for module in engine.modules:
        state = module.sharded_state()
        apply_factories(state)
        for shard in nested_values(state):
            if not isinstance(shard, ShardedTensor) or not is_main_replica(shard.replica_id):
                continue
            depth = shard.prepend_axis_num
            part = tuple(
                slice(start, start + size)
                for start, size in zip(shard.global_offset[depth:], shard.local_shape, strict=True)
            )
            mine.append((global_name(shard), shard.global_shape[depth:], part, shard.data.detach().float().cpu()))
    everyones: list[list] | None = [[] for _ in range(world.size)] if world.is_first else None
    dist.gather_object(mine, everyones)
    whole: dict[str, np.ndarray] = {}
    for name, shape, part, data in (each for one in everyones or () for each in one):
        # A part that no rank holds stays NaN, and so differs from everything.
        whole.setdefault(name, np.full(shape, np.nan, dtype=np.float32))[part] = data.numpy()
    return whole


def _largest(one: list[float], other: list[float]) -> float:
    return max(
        abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf
        for a, b in zip(one, other, strict=True)
    )


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    distance, size = float(np.linalg.norm(one - other)), float(np.linalg.norm(other))
    if not math.isfinite(distance):
        return math.inf
    return distance / size if size else distance
