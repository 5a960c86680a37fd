"""Checkpoints and disks that are damaged, full, read-only or cut short, beyond what the tests of the store have."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.punish.campaign import fill, read_only
from llmrecipes.checkpoint.manifest import MANIFEST_NAME
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.megatron.engine import MegatronEngine
from tests.dist.worlds import GlooWorld, say
from tests.helpers import steps_done, train_lines
from tests.train.test_train_faults import Command, notes, run_dir, saved, small_disk, train
from tests.unit.test_checkpoint_saver import kill_at_random
from tests.unit.test_checkpoint_store import publish

__all__ = ["run_dir", "small_disk", "train"]

FLIPS, KILLS = 100, 200


def damages(folder: Path, draw: random.Random) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every file of a checkpoint truncated at several places and deleted, and single bits of any flipped."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        size = path.stat().st_size
        for length in sorted({0, 1, size // 2, size - 1}):
            yield f"{path.name} cut to {length}", partial(os.truncate, path, length)
        yield f"{path.name} deleted", path.unlink
    for _ in range(FLIPS):
        path = draw.choice(files)
        place = draw.randrange(8 * path.stat().st_size)
        yield f"bit {place} of {path.name}", partial(flip, path, place)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_whatever_happens_to_a_file_of_the_newest_the_one_before_is_used(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    store = CheckpointStore(whole)
    publish(store, 4)
    newest = publish(store, 8, content=random.Random(1).randbytes(4096))
    tried = 0
    for number, _ in enumerate(damages(newest, random.Random(2))):
        copy = tmp_path / str(number)
        shutil.copytree(whole, copy)
        name, damage = list(damages(copy / newest.name, random.Random(2)))[number]
        damage()
        entry, damaged = CheckpointStore(copy).survey()
        assert entry is not None and entry.step == 4, name
        # Without its manifest a folder was never published.
        assert [each.path.name for each in damaged] == [newest.name], name
        shutil.rmtree(copy)
        tried += 1
    files = sum(path.is_file() for path in newest.rglob("*"))
    assert files == 3 and (newest / MANIFEST_NAME).exists()
    assert tried >= FLIPS + 4 * files


def publish_and_die(folder: Path) -> None:
    """Publish a third checkpoint, and stop before retention."""
    store = CheckpointStore(folder)
    store.claim()
    for step in (2, 4):
        publish(store, step)
        assert store.valid(step, full=True)
    publish(store, 6)
    say("published")
    signal.pause()


def test_a_process_that_is_killed_between_publishing_and_retention_leaves_one_more(
    worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    job = worlds[1].start(publish_and_die, tmp_path)
    assert job.said()[1] == ("published",)
    job.kill(0)
    job.end()
    store = CheckpointStore(tmp_path)
    store.claim()
    try:
        assert [entry.step for entry in store.entries()] == [2, 4, 6]
        entry = store.latest_valid()
        assert entry is not None and entry.step == 6
        publish(store, 8)
        assert store.valid(8, full=True)
        store.prune(most_recent_k=2, keep_interval=None)
        assert [entry.step for entry in store.entries()] == [6, 8]
    finally:
        store.release()


@pytest.mark.parametrize("trouble", [fill, read_only], ids=["full", "read-only"])
@pytest.mark.rotating
def test_a_disk_that_cannot_be_written_for_three_saves_loses_nothing(
    train: Command,
    run_dir: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Path], Callable[[], object]],
) -> None:
    real, undo = MegatronEngine.train_step, []

    def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        if engine.scheduler.num_steps == 3:
            try:
                undo.append(trouble(small_disk))
            except OSError as error:
                pytest.skip(f"mounting read-only needs root: {error}")
        if engine.scheduler.num_steps == 9:
            undo[0]()
        return real(engine, *arguments, **options)

    monkeypatch.setattr(MegatronEngine, "train_step", step)
    often = {"save_interval": 2, "async_save": False, "most_recent_k": 1, "max_failed_saves": 4}
    code, printed = train(checkpoint=often)
    assert code == 0, printed
    assert [(note["step"], note["alarm"]) for note in notes(run_dir, "save_failed")] == [
        (4, True),
        (6, True),
        (8, True),
    ]
    assert [note["step"] for note in notes(run_dir, "checkpoint_saved")] == [2, 10, 12]
    assert [line["step"] for line in train_lines(run_dir)] == list(range(1, 13))
    assert CheckpointStore(small_disk).valid(12, full=True)
    assert not [path.name for path in small_disk.iterdir() if path.name.startswith((".tmp", ".filler"))]
    assert saved(run_dir)[-1] == 12
    assert steps_done(train(checkpoint=often)[1]) == 12


def test_a_signal_during_a_save_ends_the_run_with_both_steps_saved(
    train: Command, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ShardedFormat.write

    def signalled(*arguments: Any) -> Any:
        monkeypatch.setattr(ShardedFormat, "write", write)
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*arguments)

    monkeypatch.setattr(ShardedFormat, "write", signalled)
    code, printed = train(checkpoint={"save_interval": 4, "most_recent_k": 3})
    assert code == 75, printed
    last = train_lines(run_dir)[-1]["step"]
    assert 4 <= last < 12
    assert saved(run_dir) == sorted({4, last})
    code, printed = train(checkpoint={"save_interval": 4, "most_recent_k": 3})
    assert code == 0, printed
    assert steps_done(printed) == last


@pytest.mark.slow
@pytest.mark.rotating
def test_two_hundred_random_kills_over_save_and_retention(tmp_path: Path, worlds: dict[int, GlooWorld]) -> None:
    announced, leftovers = kill_at_random(CheckpointStore(tmp_path / "checkpoints"), worlds, KILLS)
    assert announced > KILLS / 5
    assert leftovers > KILLS / 5
