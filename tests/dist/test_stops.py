"""All ranks of any layout hear alike of a stop that one was asked for, a number that is not finite, and a full disk."""

from __future__ import annotations

import errno
import math
import os
import resource
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import Batch, Engine, Progress, World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.numerics import NonFinite
from llmrecipes.faults.signals import StopRequest
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import Note, NoTracker
from llmrecipes.train.guard import require_finite
from llmrecipes.train.loaders import DataLoaders, first_failure
from llmrecipes.train.loop import Loop
from llmrecipes.train.resume import choose, resume
from tests.dist.table import Row, Sections
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

POISONED = "decoder.layers.3.mlp.linear_fc1.weight"
LAYOUTS = [
    *("dp2", "tp2 pp2"),
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("dp4", "tp2 sp", "pp2", "pp2 vpp2", "cp2")),
]


def poisoned(row: Row) -> list[str]:
    """What each rank says when one weight in the last layer of the last rank is NaN."""
    with training(row.recipe) as (engine, world):
        if world.rank == world.size - 1:
            last: Any = engine.modules[-1]
            with torch.no_grad():
                last.decoder.layers[-1].mlp.linear_fc1.weight[2, 3] = math.nan
        said = "nothing"
        try:
            require_finite(Progress(step=6), engine.train_step(loaders(row.recipe, world)), engine, world)
        except NonFinite as error:
            said = f"{error.code} {error}"
        everyones: list[str] = [""] * world.size
        dist.all_gather_object(everyones, said)
        return everyones


def poisoned_step(row: Row, quantity: str) -> list[str]:
    """What each rank says when the loss or one gradient of the last rank is not finite, and the other is.

    Then whether weights have moved.
    """
    with training(row.recipe) as (engine, world):
        if world.rank == world.size - 1:
            last: Any = engine.modules[-1]
            if quantity == "loss":
                last.register_forward_hook(lambda _module, _inputs, losses: losses + math.inf)
            else:
                last.decoder.layers[-1].mlp.linear_fc1.weight.register_hook(lambda gradient: gradient * math.inf)
        before = [shard.tensor.clone() for shard in engine.weights()]
        said = "nothing"
        try:
            require_finite(Progress(step=6), engine.train_step(loaders(row.recipe, world)), engine, world)
        except NonFinite as error:
            said = f"{error.code} {error}"
        with engine.params_synced():
            same = all(map(torch.equal, before, (shard.tensor for shard in engine.weights())))
        everyones: list[str] = [""] * world.size
        dist.all_gather_object(everyones, f"{said}; {same}")
        return everyones


def refusal(row: Row) -> str:
    """What the first rank is told where the engine cannot be built."""
    try:
        with training(row.recipe):
            return "built"
    except UserError as error:
        return f"{error.code} {error.where}"


def stopping(row: Row) -> list[bool]:
    """Whether each rank hears of a stop that the last one was asked for: before and after, training and evaluating."""
    with training(row.recipe) as (engine, world):
        batches, last = loaders(row.recipe, world), world.rank == world.size - 1
        heard = [engine.train_step(batches, stop=partial(bool, asked and last)).stop for asked in (False, True)]
        for asked in (False, True):
            with engine.params_synced():
                loss = engine.evaluate(loaders(row.recipe, world), 2, partial(bool, asked and last))
            heard.append(loss is None)
        everyones: list[list[bool]] = [[]] * world.size
        dist.all_gather_object(everyones, heard)
        return [answer for answers in everyones for answer in answers]


def unreadable(codes: dict[int, ExitCode]) -> list[str]:
    """What each rank is told where some cannot read."""
    rank = dist.get_rank()
    failure = UserError(f"rank {rank}", where="here", code=codes[rank]) if rank in codes else None
    found = first_failure(failure, torch.device("cpu"))
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, "nothing" if found is None else f"{found.code} {found}")
    return everyones


class Notes(NoTracker):
    """Keeps the notes of a loop."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def note(self, note: Note) -> None:
        self.notes.append(note)


def trained(
    engine: Engine, world: World, store: CheckpointStore, start: Progress, last: int, full: int | None = None
) -> tuple[str, list[Note]]:
    """How a loop ends that saves every step, and its notes.

    Args:
        last: step after which it is asked to stop.
        full: rank that cannot write more than a few bytes of a file.
    """
    recipe, tracker = engine.recipe, Notes()

    def train(consumed: int) -> Generator[Batch, None, None]:
        yield from loaders(recipe, world, consumed)

    files, is_async = engine.checkpoint_format(), recipe.checkpoint.async_save
    with AsyncSaver(store, saver_group(), files, async_save=is_async) as saver:
        loop = Loop(
            engine.plan, engine, world, DataLoaders(train, None, None), tracker, saver, StopRequest(), "full",
            peak_flops=None, stop_after=last,
        )  # fmt: skip
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if world.rank == full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
            return loop.run(start).name, tracker.notes
        except UserError as error:
            return f"{error.code} {error.where}", tracker.notes
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_full_disk(recipe: Recipe, folder: Path, full: int) -> list[tuple[str, list[tuple[str, int, bool, str]], int]]:
    """How each rank ends, what it notes and what it can load, where the disk of one is full after the first save."""
    with training(recipe) as (engine, world):
        store = CheckpointStore(folder)
        assert trained(engine, world, store, Progress(), 1)[0] == "STOPPED"
        batch = recipe.train.global_batch_size
        ended, notes = trained(engine, world, store, Progress(1, batch, batch * recipe.model.seq_length), 9, full)
        entry = choose(store, world).entry
        assert entry is not None and not store.incomplete()
        told = [(note.event, note.step, note.alarm, str(note.details["error"])) for note in notes]
        everyones: list[Any] = [None] * world.size
        dist.all_gather_object(everyones, (ended, told, resume(engine, entry, world).step))
        return everyones


@pytest.mark.parametrize(("full", "asynchronous"), [(0, True), (3, False)])
@pytest.mark.rotating
def test_all_ranks_end_after_as_many_failed_saves_of_one(
    full: int, asynchronous: bool, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    kept = {"save_interval": 1, "max_failed_saves": 2, "most_recent_k": 9, "async_save": asynchronous}
    row = Row("gpt", "tp2 pp2", {"train": {"train_iters": 9}, "checkpoint": kept})
    ends = worlds[4].run(on_full_disk, row.recipe, tmp_path / "checkpoints", full)
    ended, notes, resumed = ends[0]
    assert ends == [ends[0]] * 4
    assert (ended, resumed) == ("93 checkpoint.max_failed_saves", 1)
    # The first is an alarm already, and the last one is tried once more.
    assert [(event, step, alarm) for event, step, alarm, _ in notes] == [
        ("save_failed", step, True) for step in (2, 3, 3)
    ]
    assert all(f"rank {full}: {os.strerror(errno.EFBIG)}" in error and "rank 1" not in error for *_, error in notes)


def test_all_ranks_learn_of_a_read_failure(worlds: dict[int, GlooWorld]) -> None:
    world = worlds[4]
    assert world.run(unreadable, {}) == ["nothing"] * 4
    assert world.run(unreadable, {2: ExitCode.REQUEUE}) == ["75 here: rank 2"] * 4
    assert world.run(unreadable, {1: ExitCode.STOP, 2: ExitCode.REQUEUE}) == ["93 here: rank 1"] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_stop_at_a_nan_and_name_where_it_began(layout: str, worlds: dict[int, GlooWorld]) -> None:
    row = Row("gpt", layout)
    said = worlds[row.ranks].run(poisoned, row)
    assert len(said) == row.ranks
    assert len(set(said)) == 1
    for part in ("93 ", "loss is nan", "step 7", f"{POISONED} (nan among 1 of"):
        assert part in said[0]


def _zero(stage: int) -> Sections:
    return {"layout": {"zero": {"stage": stage}, "use_distributed_optimizer": stage > 0}}


POISONED_STEPS = [
    *(pytest.param(Row("gpt", "dp2"), quantity) for quantity in ("loss", "gradient norm")),
    pytest.param(Row("gpt in bf16", "tp2 pp2"), "gradient norm"),
    *(
        pytest.param(
            Row(variant, "dp2", _zero(stage), engine="deepspeed"),
            quantity,
            marks=[pytest.mark.deepspeed, pytest.mark.slow],
        )
        for variant in ("gpt", "gpt in bf16")
        for stage in ((0, 1, 2, 3) if variant == "gpt" else (1, 2, 3))
        for quantity in ("loss", "gradient norm")
    ),
]


@pytest.mark.parametrize(("row", "quantity"), POISONED_STEPS)
def test_no_weight_moves_in_a_step_that_is_not_finite(row: Row, quantity: str, worlds: dict[int, GlooWorld]) -> None:
    said = worlds[row.ranks].run(poisoned_step, row, quantity)
    assert len(set(said)) == 1
    for part in ("93 ", f"{quantity} is ", "step 7", "; True"):
        assert part in said[0]


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "extra"), [(3, {"comms_logger": True}), (2, {"gradient_predivide_factor": 2.0})], ids=("read", "asserted")
)
def test_what_deepspeed_refuses_is_one_message(stage: int, extra: dict[str, Any], worlds: dict[int, GlooWorld]) -> None:
    row = Row("gpt", "dp2", {"layout": {"zero": {"stage": stage, "extra": extra}}}, engine="deepspeed")
    assert worlds[2].run(refusal, row) == "2 layout.zero.extra"
    assert (
        worlds[2].run(refusal, Row("gpt", "dp2", {"layout": {"zero": {"stage": stage}}}, engine="deepspeed")) == "built"
    )


@pytest.mark.parametrize("layout", ["dp1", *LAYOUTS])
def test_a_stop_request_of_one_rank_reaches_all(layout: str, worlds: dict[int, GlooWorld]) -> None:
    row = Row("gpt", layout)
    assert worlds[row.ranks].run(stopping, row) == [False, True, False, True] * row.ranks
