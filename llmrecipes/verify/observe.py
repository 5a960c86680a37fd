"""A few steps of training that record losses, gradient norms, weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Batch, Engine, Shard
from llmrecipes.plan.derive import Plan
from llmrecipes.verify import replicas, shards
from llmrecipes.verify.spec import Record, ReplicaDifference, Step

FINAL, BEFORE, GRADIENTS = "final", "before", "gradients"
"""Weights after the last step, weights before the kept step, and its gradients."""

Keep = Callable[[int, Step], bool]
"""(step from 1, its loss and gradient norm) -> whether to keep its weights and gradients."""


@dataclass
class _Snapshot:
    """Weights and reduced gradients of the last step, taken between backward pass and update."""

    before: list[Shard] = field(default_factory=list)
    gradients: list[Shard] = field(default_factory=list)

    def take(self, weights: list[Shard], gradients: list[Shard]) -> None:
        self.before, self.gradients = weights, gradients


def observe(
    engine: Engine,
    plan: Plan,
    batches: Iterator[Batch],
    iters: int,
    folder: Path,
    keep: Keep,
) -> Record:
    """Train, and write this rank's part of the weights; a collective of all ranks.

    Args:
        engine: of the model, not yet trained.
        plan: its plan on this world.
        batches: micro-batches of this data-parallel rank.
        iters: steps.
        folder: output directory for `<FINAL, BEFORE or GRADIENTS>/<rank>.pt`.
        keep: called after every step until one is kept; rank 0 decides.
    """
    snapshot = _Snapshot()
    engine.watch_gradients(snapshot.take)
    file = f"{dist.get_rank()}.pt"
    steps: list[Step] = []
    kept = None
    differing: ReplicaDifference | None = None
    for number in range(1, iters + 1):
        result = engine.train_step(batches)
        steps.append(Step(loss=result.loss, grad_norm=math.nan if result.grad_norm is None else result.grad_norm))
        differing = differing or _replicas(snapshot.before, number - 1)
        if kept is None and _from_first(keep(number, steps[-1]), engine.platform.device):
            kept = number
            shards.write(folder / BEFORE / file, snapshot.before)
            shards.write(folder / GRADIENTS / file, snapshot.gradients)
    with engine.params_synced():
        final = engine.weights()
    differing = differing or _replicas(final, iters)
    shards.write(folder / FINAL / file, final)
    return Record(layout=plan.layout.as_dict(), steps=tuple(steps), kept_step=kept, replicas=differing)


def _replicas(weights: list[Shard], step: int) -> ReplicaDifference | None:
    return replicas.first_difference(replicas.gathered(replicas.digests(weights)), step)


def _from_first(value: bool, device: torch.device) -> bool:
    flag = torch.tensor([float(value)], device=device)
    dist.broadcast(flag, 0)
    return bool(flag.item())
