"""Restarts and shared folders: what several processes and several starts of a run leave to each other."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from llmrecipes.checkpoint.compatibility import require_compatible
from llmrecipes.data.folder.prepared import fingerprint, open_prepared
from llmrecipes.data.read.batches import sample_ids
from llmrecipes.hardware.process import Watch
from llmrecipes.launch import lease
from llmrecipes.launch.base import JobRef, JobState
from llmrecipes.launch.local import launcher
from llmrecipes.recipe.schema import Recipe
from tests.helpers import tiny_on
from tests.refusals import refused

FORK = multiprocessing.get_context("fork")
HOUR = 3600.0


def drawn(steps: range, *, ranks: int, micro_batch: int, batch: int, samples: int) -> list[list[int]]:
    """Sample ids of each step, over all ranks in the order of the data."""
    found: list[list[int]] = [[] for _ in steps]
    for rank in range(ranks):
        reading = sample_ids(
            samples, consumed_samples=steps.start * batch, micro_batch_size=micro_batch, global_batch_size=batch,
            data_parallel_rank=rank, data_parallel_size=ranks,
        )  # fmt: skip
        for ids in found:
            for _ in range(batch // (ranks * micro_batch)):
                ids += next(reading)
    return [sorted(ids) for ids in found]


def test_ten_restarts_on_4_2_and_1_ranks_leave_no_sample_out_and_none_is_seen_twice() -> None:
    draw = random.Random(3)
    batch, steps = 8, 60
    cuts = sorted(draw.sample(range(1, steps), 10))
    seen: list[list[int]] = []
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, steps], strict=True)):
        ranks = (4, 2, 1)[number % 3]
        seen += drawn(range(begin, end), ranks=ranks, micro_batch=draw.choice((1, 2)), batch=batch, samples=1000)
    assert [sample for ids in seen for sample in ids] == list(range(batch * steps))


def build(recipe: Recipe, folder: Path) -> None:
    from llmrecipes.data.prepare import prepare

    os.setpgid(0, 0)
    prepare(recipe, folder, workers=1)


def test_of_four_processes_that_prepare_the_same_data_one_is_killed(corpus: Path, tmp_path: Path) -> None:
    recipe = tiny_on(corpus)
    part = tmp_path / f".{fingerprint(recipe)}.part"
    builders = [FORK.Process(target=build, args=(recipe, tmp_path)) for _ in range(4)]
    for builder in builders:
        builder.start()
    end = time.monotonic() + 240
    while not part.exists() and time.monotonic() < end and not (tmp_path / fingerprint(recipe)).exists():
        time.sleep(0.001)
    os.kill(builders[1].pid or 0, signal.SIGKILL)
    for builder in builders:
        builder.join(240)
    codes = [builder.exitcode for builder in builders]
    assert codes in ([0, -signal.SIGKILL, 0, 0], [0] * 4), "it may have been done before"
    open_prepared(recipe, tmp_path).verify()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_the_lease_of_a_machine_whose_clock_is_off_by_an_hour(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder is alive while it renews, and lost a stated time after the last one, by the clock of who looks."""
    (tmp_path / "logs").mkdir()
    lease.take(tmp_path, "abcd")
    path = tmp_path / "logs" / "lease.json"
    path.write_text(path.read_text().replace(lease.this_machine().boot_id, "another boot"))
    ref, watch = JobRef("local", "elsewhere:1:abcd", tmp_path), Watch()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def state(renewed: bool, later: float) -> JobState:
        now[0] += later
        if renewed:
            stamp = 1.8e9 + ahead + now[0]
            os.utime(path, (stamp, stamp))
        status = launcher._status(ref, watch)
        assert status is not None
        return status.state

    assert state(True, 0.0) == JobState.RUNNING
    assert state(True, 10 * lease.LEASE_SECONDS) == JobState.RUNNING, "renewed while nobody looked"
    assert state(False, lease.LEASE_SECONDS - 1) == JobState.RUNNING
    assert state(False, 2.0) == JobState.UNKNOWN
    assert state(True, 1.0) == JobState.RUNNING, "it was only slow"


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"sources": []}},
        {"model": {"num_layers": 3}},
        {"optimizer": {"adam_beta1": 0.5}},
        {"optimizer": {"adam_beta2": 0.5}},
    ],
    ids=lambda change: str(next(iter(change.values()))),
)
def test_a_run_is_not_resumed_with_other_data_architecture_or_betas(
    change: dict[str, dict[str, object]], corpus: Path
) -> None:
    then = tiny_on(corpus).model_dump(mode="json")
    section, values = next(iter(change.items()))
    now = {**then, section: {**then[section], **values}}
    with refused("runs/tiny/r", rule=f"{section}.{next(iter(values))}:"):
        require_compatible(now, then, where="runs/tiny/r")
    require_compatible(then, then, where="runs/tiny/r")
