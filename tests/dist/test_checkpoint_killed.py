"""A rank that dies or hangs while all of them save: every checkpoint that was announced can be loaded."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import Progress
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.resume import choose, resume
from tests.dist.table import Row
from tests.dist.training import training
from tests.dist.worlds import GlooWorld, say

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RECIPE = Row("gpt", "dp4", {"model": {"hidden_size": 128}, "train": {"train_iters": 1000}}).recipe
ROUNDS = 4


def save_forever(recipe: Recipe, folder: Path) -> None:
    """Resume, and save one step after the other; the first rank tells which are published."""
    with training(recipe) as (engine, world):
        store = CheckpointStore(folder)
        with AsyncSaver(store, saver_group(), engine.checkpoint_format()) as saver:
            entry = choose(store, world).entry
            step = 0 if entry is None else resume(engine, entry, world).step
            say("resumed", step, os.getpid())
            while True:
                step += 1
                info = CheckpointInfo(
                    step=step, consumed_samples=step, consumed_tokens=step, layout=engine.plan.layout.as_dict(),
                    recipe_hash="killed",
                )  # fmt: skip
                saver.save(engine.state(Progress(step, step, step)), info)
                (report,) = saver.wait()
                assert report.error is None, report.error
                say("announced", step)


def start(world: GlooWorld, folder: Path) -> tuple[Any, int, list[int]]:
    """The job, the step that all ranks have resumed from, and their processes."""
    job = world.start(save_forever, RECIPE, folder)
    resumed: dict[int, tuple[int, int]] = {}
    while len(resumed) < 4:
        rank, words = job.said()
        if words[0] == "resumed":
            resumed[rank] = (words[1], words[2])
    (step,) = {step for step, _ in resumed.values()}
    return job, step, [resumed[rank][1] for rank in range(4)]


def announced(job: Any, count: int) -> int:
    """Wait for the first rank's announcements; returns the last step."""
    step = 0
    while count:
        rank, (_, step) = job.said()
        count -= rank == 0
    return int(step)


def test_every_announced_checkpoint_survives_the_death_of_a_rank(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    draw, last = random.Random(7), 0
    for _ in range(ROUNDS):
        job, resumed, _ = start(worlds[4], tmp_path)
        # A dead writer's checkpoint may have been complete, and not announced.
        assert last <= resumed <= last + 1
        announced(job, draw.randint(1, 2))
        time.sleep(draw.random() * 0.2)  # the moment of the death is what is tried, not waited for
        job.kill(draw.randrange(4))
        assert -signal.SIGKILL in job.end()
        steps = [step for rank, (_, step) in job.everything_said() if rank == 0]
        last = max([*steps, *(entry.step for entry in CheckpointStore(tmp_path).entries())])
        entries = CheckpointStore(tmp_path).entries()
        assert all(CheckpointStore(tmp_path).valid(entry.step, full=True) for entry in entries)
        assert last == entries[-1].step


def test_a_rank_that_stands_still_for_a_while_is_waited_for(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    job, _, processes = start(worlds[4], tmp_path)
    announced(job, 1)
    os.kill(processes[2], signal.SIGSTOP)
    newest = CheckpointStore(tmp_path).entries()[-1].step
    time.sleep(1)  # nothing is to happen
    assert CheckpointStore(tmp_path).entries()[-1].step <= newest + 1, "one that this rank had written"
    os.kill(processes[2], signal.SIGCONT)
    step = announced(job, 2)
    job.kill(0)
    job.end()
    assert CheckpointStore(tmp_path).valid(step, full=True)
