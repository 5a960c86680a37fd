"""The store on real files: publishing, finding the newest valid checkpoint, retention, recovery."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmrecipes.checkpoint import manifest
from llmrecipes.checkpoint.manifest import MANIFEST_NAME, CheckpointInfo, FileRecord, digest
from llmrecipes.checkpoint.store import CheckpointStore, surviving
from tests.refusals import refused

VERSIONS = {"torch": "2"}


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, consumed_samples=8 * step, consumed_tokens=64 * step, layout={}, recipe_hash="r")


def publish(store: CheckpointStore, step: int, content: bytes | None = None) -> Path:
    temporary = store.temporary(step)
    (temporary / "weights.bin").write_bytes(content or f"weights of {step}".encode() * 100)
    (temporary / "folder").mkdir()
    (temporary / "folder" / "rng.bin").write_bytes(b"rng")
    return store.publish(temporary, info(step), versions=VERSIONS).path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_published_checkpoint_is_complete_and_described(store: CheckpointStore) -> None:
    path = publish(store, 100)
    assert path == store.directory / "step-00000100"
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    assert manifest["step"] == 100
    assert manifest["consumed_tokens"] == 6400
    assert set(manifest["files"]) == {"weights.bin", "folder/rng.bin"}
    assert manifest["files"]["weights.bin"]["sha256"] == digest(path / "weights.bin").sha256
    assert [child.name for child in store.directory.iterdir()] == ["step-00000100"]
    entry = store.latest_valid()
    assert entry is not None
    assert entry.step == 100
    assert entry.manifest.consumed_samples == 800


def test_nothing_to_find(store: CheckpointStore) -> None:
    assert store.latest_valid() is None
    assert store.entries() == []
    assert not store.valid(1, full=False)


def _flip(path: Path) -> None:
    content = bytearray((path / "weights.bin").read_bytes())
    content[5] ^= 1
    (path / "weights.bin").write_bytes(content)


def _truncate(path: Path) -> None:
    with (path / "weights.bin").open("r+b") as stream:
        stream.truncate(7)


def _lose_file(path: Path) -> None:
    (path / "folder" / "rng.bin").unlink()


def _lose_manifest(path: Path) -> None:
    (path / MANIFEST_NAME).unlink()


def _cut_manifest(path: Path) -> None:
    text = (path / MANIFEST_NAME).read_text()
    (path / MANIFEST_NAME).write_text(text[: len(text) // 2])


def _without_digest(path: Path, old: str, new: str) -> None:
    """Alter a manifest of the format that did not protect itself."""
    found = json.loads((path / MANIFEST_NAME).read_text())
    del found["sha256"]
    (path / MANIFEST_NAME).write_text(json.dumps({**found, "format": 1}).replace(old, new))


def _foreign_manifest(path: Path) -> None:
    _without_digest(path, '"step": 3', '"step": 2')


def _escape(path: Path) -> None:
    _without_digest(path, "folder/rng.bin", "../step-00000001/weights.bin")


def _flip_in_manifest(path: Path) -> None:
    text = (path / MANIFEST_NAME).read_text()
    (path / MANIFEST_NAME).write_text(text.replace('"consumed_samples": 24', '"consumed_samples": 25'))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_flip, "weights.bin: SHA-256 differs"),
        (_truncate, "weights.bin: 7 bytes, expected 1200"),
        (_lose_file, "folder/rng.bin: No such file"),
        (_lose_manifest, "manifest.json: No such file"),
        (_cut_manifest, "manifest.json: Invalid JSON"),
        (_foreign_manifest, "manifest.json: belongs to step 2"),
        (_flip_in_manifest, "manifest.json: its own SHA-256 differs"),
        (_escape, "not the name of a file inside the checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_reported(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, damage: object, says: str
) -> None:
    for step in (1, 2, 3):
        publish(store, step)
    assert callable(damage)
    damage(store.path(3))
    with caplog.at_level(logging.WARNING):
        entry = store.latest_valid()
    assert entry is not None
    assert entry.step == 2
    assert len(caplog.records) == 1
    assert str(store.path(3)) in caplog.text
    assert says in caplog.text
    assert not store.valid(3, full=True)


def test_sizes_alone_do_not_see_a_flipped_bit(store: CheckpointStore) -> None:
    _flip(publish(store, 1))
    assert store.valid(1, full=False)
    assert not store.valid(1, full=True)


def test_records_of_other_ranks_are_trusted_but_must_fit(store: CheckpointStore) -> None:
    temporary = store.temporary(4)
    (temporary / "__1_0.distcp").write_bytes(b"12345")
    real = digest(temporary / "__1_0.distcp")
    with pytest.raises(OSError, match="5 bytes, but 6 were written"):
        store.publish(
            temporary, info(4), versions=VERSIONS, known={"__1_0.distcp": FileRecord(size=6, sha256="0" * 64)}
        )
    with pytest.raises(OSError, match="5 bytes, but 4 were written"):
        store.publish(
            temporary, info(4), versions=VERSIONS, known={"__1_0.distcp": FileRecord(size=4, sha256="0" * 64)}
        )
    with pytest.raises(FileNotFoundError, match=r"__2_0\.distcp"):
        store.publish(temporary, info(4), versions=VERSIONS, known={"__1_0.distcp": real, "__2_0.distcp": real})
    assert store.entries() == []
    store.publish(temporary, info(4), versions=VERSIONS, known={"__1_0.distcp": real})
    assert store.valid(4, full=True)


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    publish(store, 5, b"old")
    publish(store, 5, b"new")
    assert (store.path(5) / "weights.bin").read_bytes() == b"new"
    assert [child.name for child in store.directory.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize(
    ("steps", "k", "interval", "kept"),
    [
        ([], 2, None, set()),
        ([100], 2, None, {100}),
        ([100, 200, 300], 2, None, {200, 300}),
        ([100, 200, 300, 400], 1, 200, {200, 300, 400}),
        ([250, 500, 750, 1000], 2, 500, {500, 750, 1000}),
    ],
)
def test_retention_rule(steps: list[int], k: int, interval: int | None, kept: set[int]) -> None:
    assert surviving(steps, k, interval) == kept


def test_prune_keeps_two_valid_ones_and_never_deletes_a_damaged_one(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        publish(store, step)
    _truncate(store.path(1))
    _truncate(store.path(3))
    _lose_manifest(store.path(4))
    assert store.prune(1) == []
    publish(store, 5)
    assert store.prune(1) == []
    publish(store, 6)
    assert store.prune(1) == [2]
    assert [entry.step for entry in store.entries()] == [5, 6]
    assert all(store.path(step).exists() for step in (1, 3, 4))


@pytest.mark.parametrize("verified", [1, 2])
def test_prune_does_nothing_before_two_are_verified(store: CheckpointStore, verified: int) -> None:
    for step in (1, 2, 3, 4, 5):
        publish(store, step)
    later = CheckpointStore(store.directory)
    for step in range(6, 6 + verified):
        publish(later, step)
    assert later.prune(2) == ([] if verified == 1 else [1, 2, 3, 4, 5])


def test_prune_does_nothing_without_a_valid_one(store: CheckpointStore) -> None:
    _truncate(publish(store, 1))
    assert store.prune(1) == []
    assert store.path(1).exists()


def test_claim_removes_what_a_dead_writer_left(store: CheckpointStore) -> None:
    publish(store, 1)
    partial = store.temporary(2)
    (partial / "weights.bin").write_bytes(b"half")
    trash = store.directory / ".trash-step-00000000-ab"
    trash.mkdir()
    (trash / "weights.bin").write_bytes(b"old")
    store.claim()
    assert not partial.exists()
    assert not trash.exists()
    assert store.valid(1, full=True)
    store.release()


def test_claim_finishes_a_checkpoint_killed_before_its_rename_without_hashing_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1)
    publish(store, 2).rename(store.directory / ".tmp-step-00000002-dead")
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "digest", lambda path: pytest.fail(f"{path} was read by one rank for all"))
        store.claim()
    store.release()
    assert store.valid(2, full=True)


def test_claim_does_not_replace_a_complete_checkpoint(store: CheckpointStore) -> None:
    publish(store, 2, b"older").rename(store.directory / ".tmp-step-00000002-dead")
    publish(store, 2, b"newer")
    store.claim()
    store.release()
    assert (store.path(2) / "weights.bin").read_bytes() == b"newer"
    assert not list(store.directory.glob(".tmp*"))


def test_two_processes_cannot_train_one_run(store: CheckpointStore) -> None:
    program = """
import sys
from pathlib import Path
from llmrecipes.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
store.claim()
temporary = store.temporary(7)
print("claimed", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(store.directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        with refused(store.directory):
            store.claim()
        assert list(store.directory.glob(".tmp*")), "a live writer's files are left alone"
        other.kill()
    store.claim()
    assert not list(store.directory.glob(".tmp*"))
    store.release()


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with refused(tmp_path / "checkpoints"):
        CheckpointStore(tmp_path / "checkpoints").claim()


@pytest.mark.rotating
def test_a_reader_beside_retention_always_finds_a_valid_one(store: CheckpointStore) -> None:
    publish(store, 1)
    stop = threading.Event()
    seen: list[int | None] = []

    def read() -> None:
        while not stop.is_set():
            entry = store.latest_valid()
            seen.append(entry.step if entry else None)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 60):
        publish(store, step)
        store.prune(2)
    stop.set()
    reader.join()
    assert seen
    assert None not in seen
    assert seen == sorted(seen, key=lambda step: step or 0)
    assert [entry.step for entry in store.entries()] == [58, 59]


def test_the_manifest_keeps_the_recipe_and_older_ones_are_read_without(store: CheckpointStore) -> None:
    recipe = {"name": "tiny", "data": {"split": [90.0, 5.0, 5.0], "seed": None}}
    temporary = store.temporary(1)
    (temporary / "weights.bin").write_bytes(b"1")
    store.publish(temporary, info(1).model_copy(update={"recipe": recipe}), versions=VERSIONS)
    publish(store, 2)
    assert [entry.manifest.recipe for entry in store.entries()] == [recipe, None]


def test_only_what_this_process_has_hashed_lets_retention_delete(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        publish(store, step)
    later = CheckpointStore(store.directory)
    assert later.prune(2) == []  # all of them only look complete
    _flip(store.path(3))
    entry, damaged = later.survey()
    assert entry is not None
    assert (entry.step, [found.path for found in damaged]) == (2, [store.path(3)])
    aside = later.set_aside(store.path(3))
    publish(later, 4)
    assert later.prune(2) == [1]
    assert [entry.step for entry in later.entries()] == [2, 4]
    assert (aside / "weights.bin").exists()
    assert later.latest_valid() is not None


def test_a_dead_writers_checkpoint_does_not_delete_the_damaged_one_in_its_place(store: CheckpointStore) -> None:
    publish(store, 2).rename(store.directory / ".tmp-step-00000002-dead")
    _flip(publish(store, 2))
    store.claim()
    store.release()
    assert store.valid(2, full=True)
    assert len(list(store.directory.glob("damaged-step-00000002-*"))) == 1
