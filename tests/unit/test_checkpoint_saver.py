"""Saving and loading megatron-core state for real: snapshots, full disks, kill -9, two ranks."""

from __future__ import annotations

import logging
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.saver import AsyncSaver
from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.engine.core.checkpoint.format import ShardedFormat, slabs
from llmrecipes.engine.core.checkpoint.loader import load
from tests.dist.worlds import GlooWorld
from tests.refusals import refused
from tests.unit.checkpoint_worker import save_until_killed, train_in_two


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, consumed_samples=step, consumed_tokens=step, layout={"dp": 1}, recipe_hash="r")


def sharded(weight: torch.Tensor, layers: torch.Tensor, **plain: Any) -> dict[str, Any]:
    """A state dict as megatron-core makes them: plain, stacked (prepended axis) and factory-made tensors, objects."""

    def halves(key: str, tensor: torch.Tensor, replica_id: Any, _range: Any) -> list[Any]:
        return [ShardedTensor.from_rank_offsets(key, part, (0, index, 2)) for index, part in enumerate(tensor.chunk(2))]

    return {
        "weight": ShardedTensor.from_rank_offsets("weight", weight),
        "layers": {
            str(index): ShardedTensor.from_rank_offsets("layers", layers[index], (0, index, 3), prepend_axis_num=1)
            for index in range(3)
        },
        "gated": ShardedTensorFactory("gated", weight, halves, torch.cat),
        "rng": ShardedObject("rng", {"state": torch.arange(4), "python": (3, [1, 2], None)}, (1,), (0,)),
        "local": LocalNonpersistentObject("stays"),
        **plain,
    }


def newest(store: CheckpointStore) -> Entry:
    entry = store.latest_valid()
    assert entry is not None
    return entry


@pytest.mark.parametrize("pinned", [False, True])
def test_files_hold_the_values_at_the_call_of_save(store: CheckpointStore, group: Ranks, pinned: bool) -> None:
    weight, layers = torch.randn(6, 50), torch.randn(3, 40)
    moments = [torch.ones(3)]
    wanted_weight, wanted_layers = weight.clone(), layers.clone()
    with AsyncSaver(store, group, ShardedFormat(pinned=pinned)) as saver:
        saver.reserve(sharded(weight, layers))
        saver.save(sharded(weight, layers, step=7, optimizer={"moments": moments, "lr": 0.5}), info(7))
        weight.fill_(-1)
        layers.fill_(-1)
        moments[0].fill_(-1)
        (report,) = saver.wait()
        assert saver.poll() == []
    assert (report.step, report.path, report.error) == (7, store.path(7), None)
    entry = newest(store)
    assert set(entry.manifest.versions) == {"megatron-core", "torch"}
    assert any(name.endswith(".distcp") for name in entry.manifest.files)
    loaded = load(entry, sharded(torch.zeros(6, 50), torch.zeros(3, 40)))
    assert torch.equal(loaded["weight"], wanted_weight)
    assert torch.equal(loaded["gated"], wanted_weight)
    assert torch.equal(torch.stack([loaded["layers"][str(index)] for index in range(3)]), wanted_layers)
    assert torch.equal(loaded["optimizer"]["moments"][0], torch.ones(3))
    assert loaded["optimizer"]["lr"] == 0.5
    assert loaded["step"] == 7
    assert torch.equal(loaded["rng"]["state"], torch.arange(4))
    assert loaded["rng"]["python"] == (3, [1, 2], None)
    assert loaded["local"] == "stays"


def test_pinned_memory_is_allocated_before_the_first_snapshot_in_slabs_that_are_not_rounded_up() -> None:
    state = sharded(torch.randn(600, 5000), torch.randn(3, 40000))
    files = ShardedFormat(pinned=True)
    allocate = files.reserve(state)
    assert allocate is not None and files.held_bytes == 0
    allocate()
    held = files.held_bytes
    assert files.reserve(state) is None
    taken = files.snapshot(state)
    assert files.held_bytes == held
    assert torch.equal(taken["weight"].data, state["weight"].data)
    assert taken["weight"].data.untyped_storage().nbytes() == taken["weight"].data.nbytes  # as torch.save writes it

    # Weight, master weight and two moments of 32 layers of 4096, of which each tensor would be rounded up by itself.
    shapes = [
        (name, part, layer)
        for layer in range(32)
        for name in ("qkv", "proj", "fc1", "fc2", "norm")
        for part in range(4)
    ]
    elements = {"qkv": 6144 * 4096, "proj": 4096 * 4096, "fc1": 28672 * 4096, "fc2": 14336 * 4096, "norm": 4096}
    needed: dict[tuple[object, ...], int] = {key: elements[key[0]] * (2 if key[1] == 0 else 4) // 8 for key in shapes}
    plan = slabs(needed)
    assert sum(needed.values()) <= sum(plan.sizes) <= 1.02 * sum(needed.values())
    assert sum(1 << (size - 1).bit_length() for size in needed.values()) > 1.15 * sum(needed.values())
    assert all(size.bit_count() == 1 for size in plan.sizes)
    for number, size in enumerate(plan.sizes):
        parts = sorted((offset, needed[key]) for key, (slab, offset) in plan.places.items() if slab == number)
        ends = [offset + bytes for offset, bytes in parts]
        assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False)) and ends[-1] <= size


def test_save_returns_before_the_files_are_written_and_the_next_one_waits(
    tmp_path: Path, group: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    class SlowStore(CheckpointStore):
        def publish(self, *args: Any, **kwargs: Any) -> Entry:
            assert gate.wait(30)
            return super().publish(*args, **kwargs)

    store = SlowStore(tmp_path / "checkpoints")
    weight, layers = torch.zeros(6, 50), torch.zeros(3, 40)
    with AsyncSaver(store, group, ShardedFormat()) as saver:
        saver.save(sharded(weight, layers), info(1))
        assert saver.poll() == []
        assert store.entries() == []
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        with caplog.at_level(logging.WARNING):
            saver.save(sharded(weight, layers), info(2))
        assert "step 2 waits for the checkpoint of step 1" in caplog.text
        assert [report.step for report in saver.poll()] == [1]
        assert [report.step for report in saver.wait()] == [2]
        opener.join()


def test_synchronous_saves_are_on_disk_when_save_returns(store: CheckpointStore, group: Ranks) -> None:
    with AsyncSaver(store, group, ShardedFormat(), async_save=False, most_recent_k=2, keep_interval=3) as saver:
        for step in range(1, 8):
            saver.save(sharded(torch.zeros(6, 50), torch.zeros(3, 40)), info(step))
            assert store.valid(step, full=True)
        assert [report.step for report in saver.poll()] == list(range(1, 8))
    assert [entry.step for entry in store.entries()] == [3, 6, 7]


@contextmanager
def full_tmpfs(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@contextmanager
def small_file_limit(directory: Path) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("full_disk", "says"), [(full_tmpfs, "No space left on device"), (small_file_limit, "File too large")]
)
def test_a_full_disk_costs_one_checkpoint_and_nothing_else(
    tmp_path: Path, group: Ranks, caplog: pytest.LogCaptureFixture, full_disk: Any, says: str
) -> None:
    directory = tmp_path / "disk"
    small, large = torch.randn(6, 50), torch.randn(6, 200_000)
    with full_disk(directory):
        store = CheckpointStore(directory)
        with AsyncSaver(store, group, ShardedFormat()) as saver:
            saver.save(sharded(small, torch.zeros(3, 40)), info(1))
            assert saver.wait()[0].error is None
            with caplog.at_level(logging.ERROR):
                saver.save(sharded(large, torch.zeros(3, 40)), info(2))
                (failed,) = saver.wait()
            assert failed.path is None
            assert says in str(failed.error)
            errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
            assert len(errors) == 1, "one alarm, no traceback of a library"
            assert "ALARM" in caplog.text
            assert "step 2 was not saved" in caplog.text
            assert [child.name for child in directory.iterdir() if child.is_dir()] == ["step-00000001"]
            assert store.valid(1, full=True)
            saver.save(sharded(small, torch.zeros(3, 40)), info(3))
            assert saver.wait()[0].path == store.path(3)
        loaded = load(newest(store), sharded(torch.zeros(6, 50), torch.zeros(3, 40)))
        assert torch.equal(loaded["weight"], small)


def test_state_that_could_not_be_loaded_is_refused_at_the_first_save(store: CheckpointStore, group: Ranks) -> None:
    with (
        AsyncSaver(store, group, ShardedFormat()) as saver,
        pytest.raises(TypeError, match=r"scheduler\.hook .*not plain data"),
    ):
        saver.save(sharded(torch.zeros(6, 50), torch.zeros(3, 40), scheduler={"hook": print}), info(1))


def test_a_defect_is_raised_not_hidden(tmp_path: Path, group: Ranks) -> None:
    class BrokenStore(CheckpointStore):
        def publish(self, *args: Any, **kwargs: Any) -> Entry:
            raise AssertionError("a bug")

    with AsyncSaver(BrokenStore(tmp_path), group, ShardedFormat()) as saver:
        saver.save(sharded(torch.zeros(6, 50), torch.zeros(3, 40)), info(1))
        with pytest.raises(RuntimeError, match="AssertionError: a bug"):
            saver.wait()
    assert not list(tmp_path.glob(".tmp*"))


def test_foreign_architecture_is_one_message_with_the_tensors(store: CheckpointStore, group: Ranks) -> None:
    with AsyncSaver(store, group, ShardedFormat(), async_save=False) as saver:
        saver.save(sharded(torch.zeros(6, 50), torch.zeros(3, 40)), info(1))
    other = sharded(torch.zeros(6, 51), torch.zeros(3, 40))
    other["bias"] = ShardedTensor.from_rank_offsets("bias", torch.zeros(3))
    with refused("step-00000001", rule=("weight:", "[6, 50]", "[6, 51]", "bias:")) as caught:
        load(newest(store), other)
    assert "layers" not in caught.value.what


@pytest.mark.slow
def test_kill_nine_at_any_moment_leaves_a_complete_newest_checkpoint(
    store: CheckpointStore, worlds: dict[int, GlooWorld]
) -> None:
    announced, leftovers = kill_at_random(store, worlds, 25)
    assert announced > 5
    assert leftovers > 5, "no process was killed in the middle of a save"


def kill_at_random(store: CheckpointStore, worlds: dict[int, GlooWorld], times: int) -> tuple[int, int]:
    """Kill processes that save, one after the other; returns the last announced step and how many saves were cut.

    Each first loads what the one before it has left, and checks every value. Further ones are killed while chance has
    not let some saves end and cut others, which depends on how busy the machine is.
    """
    chance = random.Random(20)
    announced = 0
    leftovers = 0
    window = 0.0
    for number in range(4 * times):
        if number >= times:
            if min(announced, leftovers) > 5:
                break
            window *= 1.3 if announced < leftovers else 0.8  # too few saves ended, or too few were cut
        job = worlds[1].start(save_until_killed, store.directory)
        _, (event, step) = job.said()
        assert event == "resumed"
        assert step >= announced
        if number == 0:  # how long a save takes here
            job.said()
            started = time.monotonic()
            job.said()
            window = 3 * (time.monotonic() - started)
        # The moment of death is the point here; nothing is waited for.
        time.sleep(chance.uniform(0, window))
        job.kill(0)
        assert job.end() == [-signal.SIGKILL]
        announced = max([announced, *(step for _, (event, step) in job.everything_said() if event == "announced")])
        leftovers += len(list(store.directory.glob(".t*")))
        assert announced == 0 or newest(store).step >= announced
    return announced, leftovers


def test_two_ranks_save_beside_their_own_reductions_and_share_a_failure(
    store: CheckpointStore, worlds: dict[int, GlooWorld]
) -> None:
    job = worlds[2].start(train_in_two, store.directory)
    job.result()
    said = job.everything_said()
    for rank in (0, 1):
        assert (rank, ("report", 1, True, "None")) in said
        assert (rank, ("report", 3, True, "None")) in said
        (failure,) = (words[3] for number, words in said if (number, *words[:3]) == (rank, "report", 2, False))
        assert failure.startswith("rank 1: File too large")
        assert (rank, ("loaded", 3)) in said
    assert [words for _, words in said if words == ("log", "ERROR")] == [("log", "ERROR")], "one alarm for all ranks"
    assert [entry.step for entry in store.entries()] == [1, 3]
    files = newest(store).manifest.files
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(files)
    assert newest(store).manifest.layout == {"world_size": 2}
    assert not list(store.directory.glob(".tmp*"))


def test_the_thread_works_on_the_gpu_of_its_rank(
    store: CheckpointStore, group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the first one of the node, on which every rank would have a CUDA context then."""
    used: list[tuple[int, bool]] = []

    def set_device(device: int) -> None:
        used.append((device, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(torch.cuda, "current_device", lambda: 3)
        saver = AsyncSaver(store, group, ShardedFormat())
    with saver:
        saver.save(sharded(torch.ones(4), torch.ones(3, 2)), info(1))
        assert [report.error for report in saver.wait()] == [None]
    assert used == [(3, False)]
