"""Ranks of a training in which one computes a wrong number. Jobs of every rank of a joined world."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Engine, Progress
from llmrecipes.errors import UserError
from llmrecipes.faults.watchdog import unwatched
from llmrecipes.tracking.events import Note, NoTracker
from llmrecipes.train.guard import (
    acceptance,
    compare_replicas,
    hardware_suspect,
    require_equal_replicas,
    require_finite,
)
from llmrecipes.verify import observe
from tests.dist.table import Row
from tests.dist.training import loaders, training

STEPS, FAULTY = 3, 2
"""Steps of a training, and the one with the fault."""


@dataclass(frozen=True)
class Trained:
    """Numbers of each step, digests of the weights after the last, and the notes of the steps."""

    numbers: list[tuple[float, float | None, float | None]]
    digests: list[list[tuple[str, tuple[int, ...], bytes]]]
    notes: list[Note]
    again: float
    """Steps of which all micro-batches were announced because they are computed again."""


def trained(row: Row, fault: Literal["gradient", "loss"] | None) -> Trained:
    """Train, with a number of the last rank that is not finite the first time that a step is computed."""
    recipe = row.recipe
    with training(recipe) as (engine, world):
        step = 0
        if fault is not None and world.rank == world.size - 1:
            _break(engine, fault, lambda: step == FAULTY)
        batches, progress = loaders(recipe, world), Progress()
        numbers, notes, again = [], [], list[None]()
        for step in range(1, STEPS + 1):
            result = engine.train_step(batches, redo=lambda: again.append(None))
            require_finite(progress, result, engine, world)
            if note := hardware_suspect(progress, result, engine, world):
                notes.append(note)
            numbers.append((result.loss, result.grad_norm, result.loss_scale))
            samples = progress.consumed_samples + recipe.train.global_batch_size
            progress = Progress(step, samples, samples * recipe.model.seq_length)
        with engine.params_synced():
            digests = observe.gathered(observe.digests(engine.weights()))
    return Trained(numbers, digests, notes, len(again) / engine.plan.num_microbatches)


def drifted(row: Row, rank: int | None) -> list[str]:
    """What each rank says when one bit of a weight of a rank has changed after a step."""
    with training(row.recipe) as (engine, world):
        engine.train_step(loaders(row.recipe, world))
        with engine.params_synced():
            if world.rank == rank:
                last: Any = engine.modules[-1]
                weight = next(p for name, p in last.named_parameters() if name.endswith(CHANGED)).detach().view(-1)
                weight.view(torch.int16)[-1] ^= 1
        said = ""
        tracker = Notes()
        try:
            require_equal_replicas(1, engine, tracker)
        except UserError as error:
            said = f"{error.code} {error.where}: {error.what}"
            assert [note.event for note in tracker.notes] == ["replicas_differ"]
        everyones = [""] * world.size
        dist.all_gather_object(everyones, said)
        return everyones


def drifted_in_a_pass(row: Row, rank: int | None) -> list[str]:
    """What each rank says when one bit of a weight has changed in the forward pass of the second step."""
    faults = row.recipe.faults.model_copy(update={"check_weight_hash_across_dp_replicas_interval": 2})
    with training(row.recipe.model_copy(update={"faults": faults})) as (engine, world):
        batches, tracker, said = loaders(row.recipe, world), Notes(), ""
        engine.train_step(batches)
        if world.rank == rank:
            last: Any = engine.modules[-1]

            def flip(*_: Any) -> None:
                hook.remove()
                weight = next(p for name, p in last.named_parameters() if name.endswith(CHANGED))
                weight.data.view(-1).view(torch.int16)[-1] ^= 1  # unseen by autograd, as in memory

            hook = last.register_forward_hook(flip)
        try:
            engine.train_step(batches, accept=acceptance(2, engine, tracker, None))
        except UserError as error:
            said = f"{error.code} {error.where}: {error.what}"
            assert [note.event for note in tracker.notes] == ["replicas_differ"]
        everyones = [""] * world.size
        dist.all_gather_object(everyones, said)
        return everyones


def miscomputed(row: Row, rank: int | None, interval: int | None = 2) -> tuple[list[float], list[Note]]:
    """Losses of three steps, and what the first rank notes when one rank has one bit of a layer's results wrong."""
    faults = row.recipe.faults.model_copy(update={"check_results_across_dp_replicas_interval": interval})
    with training(row.recipe.model_copy(update={"faults": faults})) as (engine, world):
        batches, tracker, losses = loaders(row.recipe, world), Notes(), []
        if world.rank == rank:
            first: Any = engine.modules[0]

            def wrong(module: Any, _inputs: Any, result: Any) -> Any:
                if module.training:
                    return result
                changed = result[0].clone(memory_format=torch.contiguous_format)
                changed.view(-1).view(torch.int16)[-1] ^= (
                    0x40  # of the highest in a mantissa: not lost in the residual stream
                )
                return (changed, *result[1:])

            first.decoder.layers[0].mlp.register_forward_hook(wrong)
        for step in range(1, STEPS + 1):
            losses.append(engine.train_step(batches).loss)
            compare_replicas(step, engine, tracker, unwatched, saving=False)
    return losses, tracker.notes


CHANGED = "linear_fc2.weight"


class Notes(NoTracker):
    """Keeps notes."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def note(self, note: Note) -> None:
        self.notes.append(note)


def _break(engine: Engine, fault: str, due: Callable[[], bool]) -> None:
    """Make the first number infinite that is computed when the fault is due."""
    last: Any = engine.modules[-1]
    broken = False

    def poisoned(value: torch.Tensor) -> torch.Tensor:
        nonlocal broken
        if broken or not due():
            return value
        broken = True
        return value + math.inf

    if fault == "loss":
        last.register_forward_hook(lambda _module, _inputs, losses: poisoned(losses))
    else:
        weight = next(p for name, p in last.named_parameters() if name.endswith("linear_proj.weight"))
        weight.register_hook(poisoned)
