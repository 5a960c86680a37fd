"""What reaches the disk and in which order, and file systems that refuse."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from llmrecipes.checkpoint.manifest import CheckpointInfo, digest
from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.saver import AsyncSaver, SaveReport
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.core.checkpoint.format import ShardedFormat


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, consumed_samples=step, consumed_tokens=step, layout={}, recipe_hash="r")


def state(fill: float) -> dict[str, Any]:
    return {"weight": ShardedTensor.from_rank_offsets("weight", torch.full((8,), fill)), "step": int(fill)}


def save(saver: AsyncSaver, step: int) -> SaveReport:
    saver.save(state(float(step)), info(step))
    (report,) = saver.wait()
    return report


def alarms(caplog: pytest.LogCaptureFixture) -> int:
    """Errors that were logged; all of them have to be alarms."""
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert all(error.startswith("ALARM") for error in errors), errors
    return len(errors)


class Disk:
    """Records what is synced and renamed, by name, in order; a rename can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Path]] = []
        self.refuse: OSError | None = None
        fsync, rename = os.fsync, os.rename

        def recorded_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self.events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))

        def recorded_rename(source: Any, target: Any, **options: Any) -> None:
            if self.refuse is not None:
                raise self.refuse
            rename(source, target, **options)
            self.events.append(("rename", Path(target)))

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(os, "rename", recorded_rename)

    def at(self, kind: str, path: Path) -> int:
        """When something happened last."""
        return max(number for number, event in enumerate(self.events) if event == (kind, path))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_everything_is_on_disk_before_the_name_is_and_the_name_before_it_is_announced(
    store: CheckpointStore, disk: Disk
) -> None:
    temporary = store.temporary(3)
    (temporary / "folder").mkdir()
    files = [temporary / "weights.bin", temporary / "folder" / "rng.bin"]
    for file in files:
        file.write_bytes(b"1")
    target = store.publish(temporary, info(3), versions={}).path
    manifest = disk.at("sync", temporary / "manifest.json")
    assert all(disk.at("sync", file) < manifest for file in files), "a manifest vouches for what is on disk"
    folders = [disk.at("sync", folder) for folder in (temporary, temporary / "folder")]
    assert manifest < min(folders), "the folders have the manifest's name too"
    assert max(folders) < disk.at("rename", target) < disk.at("sync", store.directory)
    assert disk.events[-1] == ("sync", store.directory)


def test_what_a_rank_has_written_is_on_disk_before_it_reports(store: CheckpointStore, group: Ranks, disk: Disk) -> None:
    with AsyncSaver(store, group, ShardedFormat()) as saver:
        assert save(saver, 1).path == store.path(1)
    synced = {path.name for kind, path in disk.events if kind == "sync"}
    assert {file.name for file in store.path(1).iterdir()} <= synced
    assert disk.events[-1] == ("sync", store.directory)


def test_a_replaced_checkpoint_goes_only_by_a_name_that_is_on_disk(store: CheckpointStore, disk: Disk) -> None:
    for _ in range(2):
        temporary = store.temporary(3)
        (temporary / "weights.bin").write_bytes(b"1")
        store.publish(temporary, info(3), versions={})
    trash, target = [path for kind, path in disk.events if kind == "rename"][-2:]
    assert trash.name.startswith(".trash-")
    assert disk.at("rename", trash) < disk.at("rename", target) < disk.at("sync", store.directory)


def test_retention_deletes_only_what_no_longer_has_its_name_on_disk(
    store: CheckpointStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        temporary = store.temporary(step)
        (temporary / "weights.bin").write_bytes(b"1")
        store.publish(temporary, info(step), versions={})
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: disk.events.append(("delete", Path(path))))
    assert store.prune(1) == [1]
    (_, trash), sync, deletion = disk.events[-3:]
    assert trash.name.startswith(".trash-step-00000001-")
    assert sync == ("sync", store.directory)
    assert deletion == ("delete", trash)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_rename_that_fails_touches_no_checkpoint(store: CheckpointStore, disk: Disk, code: int) -> None:
    first = store.temporary(1)
    (first / "weights.bin").write_bytes(b"1")
    store.publish(first, info(1), versions={})
    before = digest(store.path(1) / "weights.bin")
    temporary = store.temporary(2)
    (temporary / "weights.bin").write_bytes(b"2")
    disk.refuse = OSError(code, os.strerror(code))
    with pytest.raises(OSError, match=os.strerror(code)):
        store.publish(temporary, info(2), versions={})
    assert (temporary / "weights.bin").read_bytes() == b"2"
    assert (temporary / "manifest.json").exists()
    assert digest(store.path(1) / "weights.bin") == before
    assert [entry.step for entry in store.entries()] == [1]


def test_a_rename_that_fails_is_a_failed_save_and_the_next_one_works(
    store: CheckpointStore, group: Ranks, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncSaver(store, group, ShardedFormat()) as saver:
        save(saver, 1)
        disk.refuse = OSError(errno.EIO, os.strerror(errno.EIO))
        with caplog.at_level(logging.ERROR):
            failed = save(saver, 2)
        assert failed.path is None
        assert os.strerror(errno.EIO) in str(failed.error)
        assert alarms(caplog) == 1
        assert [child.name for child in store.directory.iterdir() if child.is_dir()] == ["step-00000001"]
        assert store.valid(1, full=True)
        disk.refuse = None
        assert save(saver, 3).path == store.path(3)


@contextmanager
def few_inodes(directory: Path) -> Iterator[None]:
    """A real file system with room and without names: this many inodes suffice for three checkpoints and not four."""
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=25", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs with few inodes cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_file_system_without_inodes_costs_one_checkpoint_and_nothing_else(
    tmp_path: Path, group: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    with few_inodes(tmp_path / "disk"):
        store = CheckpointStore(tmp_path / "disk")
        with AsyncSaver(store, group, ShardedFormat(), most_recent_k=5) as saver:
            for step in (1, 2, 3):
                assert save(saver, step).path == store.path(step)
            with caplog.at_level(logging.ERROR):
                failed = save(saver, 4)
            assert failed.path is None
            assert "No space left on device" in str(failed.error)
            assert alarms(caplog) == 1
            assert store.valid(1, full=True)
            assert store.valid(2, full=True)
            assert not list(store.directory.glob(".tmp*")), "the partial checkpoint gives its inodes back"
            assert store.prune(2) == [1]
            assert save(saver, 5).path == store.path(5)
