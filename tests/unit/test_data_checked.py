"""Prepared data that is no longer what `prepare` wrote, by accident or on purpose: found before it is used."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrecipes.cli import app as cli
from llmrecipes.data.folder import checked
from llmrecipes.data.folder.data_manifest import LISTING, read_listing, sha256
from llmrecipes.data.folder.prepared import check_index, index_folder
from llmrecipes.data.preparation import corpus as corpus_module
from llmrecipes.data.preparation import shards
from llmrecipes.data.preparation.shard_files import framed
from llmrecipes.data.prepare import Prepared, open_prepared, prepare
from llmrecipes.data.read import dataset
from llmrecipes.errors import ExitCode
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from tests.refusals import refused, require_message
from tests.unit.data_recipes import corpus, recipe

Reads = list[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Prepared]:
    root = tmp_path_factory.mktemp("made")
    used = recipe(corpus(root / "first"), corpus(root / "second", seed=1))
    return used, prepare(used, root / "data", workers=1)


@pytest.fixture
def copied(made: tuple[Recipe, Prepared], tmp_path: Path) -> tuple[Recipe, Path, Path]:
    """The recipe, a data folder to damage, and the prepared folder in it."""
    original = made[1].path
    shutil.copytree(original.parent, tmp_path / "data")
    return made[0], tmp_path / "data", tmp_path / "data" / original.name


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Names of the files that are hashed, as that happens."""
    real, names = checked._examine, []

    def examine(file: Path, *arguments: Any) -> Any:
        names.append(file.name)
        return real(file, *arguments)

    monkeypatch.setattr(checked, "_examine", examine)
    return names


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


# -- hashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 40, -1])
@pytest.mark.parametrize("name", ["tokenizer.json", "00-train.bin", "01-train.idx", "00-valid.idx", "test.txt.gz"])
def test_a_changed_byte_is_found_before_a_run_starts(copied: tuple[Recipe, Path, Path], name: str, place: int) -> None:
    used, data, path = copied
    flip(path / name, place)
    with refused(path / name):
        prepare(used, data, workers=1)  # every run begins with it


def test_every_rank_finds_what_it_would_read(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, path = copied
    prepared = open_prepared(used, data)
    flip(path / "01-valid.bin", 10)
    assert dataset.build(used, prepared, "train") is not None
    with refused(path / "01-valid.bin", rule="SHA-256"):
        dataset.build(used, prepared, "valid")
    flip(path / "tokenizer.json", 100)
    with refused(path / "tokenizer.json", rule="SHA-256"):
        prepared.tokenizer()


def test_a_changed_sample_order_is_found(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, _ = copied
    prepared = prepare(used, data)
    for file in sorted(index_folder(used, prepared).glob("*-train-*_index.npy")):
        whole = file.read_bytes()
        flip(file, -1)
        with refused(file, rule="SHA-256"):
            check_index(used, prepared, print)
        file.write_bytes(whole)
    check_index(used, prepared, print)


def test_the_command_ends_with_2_and_one_message(
    copied: tuple[Recipe, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used, data, path = copied
    file = tmp_path / "t.yaml"
    file.write_text(to_yaml(used))
    flip(path / "00-train.bin", 7)
    assert cli.run(["train", str(file), "--data-dir", str(data), "--runs-dir", str(tmp_path / "runs")]) == 2
    require_message(capsys.readouterr().err, path / "00-train.bin")


def test_an_id_outside_the_vocabulary_is_named_with_its_document(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, path = copied
    file = path / "00-train.bin"
    tokens = np.fromfile(file, np.uint16)
    first = int(np.frombuffer((path / "00-train.idx").read_bytes(), np.int32, 1, 34)[0])
    tokens[first + 2] = 512  # the third of the second document
    tokens.tofile(file)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][file.name]["sha256"] = sha256(file)
    (path / "manifest.json").write_text(json.dumps(manifest))
    for _ in range(2):  # the second time it is remembered, with what it held
        with refused(file, rule=("2", "1", "512", "511")):
            prepare(used, data, workers=1)


def test_a_file_that_the_manifest_does_not_list_is_not_read(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, path = copied
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["00-train.bin"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with refused("manifest.json", rule="00-train.bin"):
        dataset.build(used, open_prepared(used, data), "train")


# -- remembering -----------------------------------------------------------------------------------------------------


def test_files_are_read_once_and_a_copy_once_more(copied: tuple[Recipe, Path, Path], reads: Reads) -> None:
    used, data, _ = copied
    prepared = prepare(used, data)
    assert set(reads) == {*prepared.manifest.files, *read_listing(index_folder(used, prepared))}
    assert len(reads) == len(set(reads))
    reads.clear()
    prepare(used, data)
    for split in ("train", "valid"):
        dataset.build(used, prepared, split)
    data.rename(data.with_name("moved"))
    prepare(used, data.with_name("moved"))
    assert reads == []


def test_what_was_just_prepared_is_not_read_again(tmp_path: Path, reads: Reads) -> None:
    used = recipe(corpus(tmp_path / "text", documents=50))
    prepare(used, tmp_path / "data", workers=1)
    assert len(reads) == len(set(reads))
    reads.clear()
    prepare(used, tmp_path / "data", workers=1)
    assert reads == []


def test_a_changed_file_is_read_alone(copied: tuple[Recipe, Path, Path], reads: Reads) -> None:
    used, data, path = copied
    prepare(used, data)
    reads.clear()
    (path / "00-train.bin").touch()
    prepare(used, data)
    assert reads == ["00-train.bin"]


@pytest.mark.parametrize("content", ["{", '{"00-train.bin": 3}', ""])
def test_damaged_notes_are_no_notes(copied: tuple[Recipe, Path, Path], reads: Reads, content: str) -> None:
    used, data, path = copied
    prepare(used, data)
    reads.clear()
    (path / checked.REMEMBERED).write_text(content)
    prepare(used, data)
    assert "00-train.bin" in reads


def test_with_read_only_data_the_cache_records_checks_and_its_absence_is_logged(
    copied: tuple[Recipe, Path, Path], reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, data, path = copied
    (path / checked.REMEMBERED).unlink()
    (path / checked.REMEMBERED).mkdir()  # nothing can be written there, by root neither
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checked, "_private", lambda: None)
    prepare(used, data)
    assert list((tmp_path / "cache" / "llmrecipes").iterdir())
    reads.clear()
    prepare(used, data)
    assert reads == []

    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    said: list[str] = []
    for _ in range(2):
        reads.clear()
        prepare(used, data, progress=said.append)
        assert "00-train.bin" in reads
    assert sum("the next start checks again" in line for line in said) >= 2


def test_reading_of_many_files_is_shown_with_rate_and_time_left(
    copied: tuple[Recipe, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, data, path = copied
    monkeypatch.setattr(checked, "SECONDS_BETWEEN_LINES", 0)
    said: list[str] = []
    prepared = open_prepared(used, data)
    prepared.check(prepared.manifest.files, said.append, again=True)
    shown = [line for line in said if "/s; about" in line]
    assert len(shown) == len([name for name in prepared.manifest.files if (path / name).stat().st_size])
    whole = checked._size(sum(file.bytes for file in prepared.manifest.files.values()))
    assert shown[-1].startswith(f"{whole} of {whole}")


def test_one_process_of_a_machine_reads_and_the_others_wait(
    copied: tuple[Recipe, Path, Path], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, data, _ = copied
    prepared = open_prepared(used, data)
    both = threading.Barrier(2)
    known = checked._known

    def meet(*arguments: Any) -> Any:
        found = known(*arguments)
        if not getattr(threading.current_thread(), "met", False):
            threading.current_thread().met = True  # type: ignore[attr-defined]
            both.wait(60)  # neither has read anything when both have looked
        return found

    monkeypatch.setattr(checked, "_known", meet)
    threads = [threading.Thread(target=prepared.check, args=(prepared.tokens("train"), print)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(reads) == sorted(prepared.tokens("train"))


def test_verify_reads_everything_whatever_is_remembered(copied: tuple[Recipe, Path, Path], reads: Reads) -> None:
    used, data, path = copied
    prepared = prepare(used, data)
    reads.clear()
    prepared.verify()
    assert set(reads) == {*prepared.manifest.files, *read_listing(index_folder(used, prepared))}
    # As an attacker would do it: the note says that the changed file is the one that was checked.
    file = path / "00-train.bin"
    flip(file, 3)
    notes = json.loads((path / checked.REMEMBERED).read_text())
    stat = file.stat()
    notes[file.name] |= {"mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}
    (path / checked.REMEMBERED).write_text(json.dumps(notes))
    prepare(used, data)
    with refused(file, rule="SHA-256"):
        prepared.verify()


# -- sample orders that would run code -------------------------------------------------------------------------------


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("listed", ["nothing", "sizes", "hashes", "another"])
@pytest.mark.parametrize("kind", ["pickle", "objects"])
def test_a_sample_order_runs_no_code(
    copied: tuple[Recipe, Path, Path], tmp_path: Path, kind: str, listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, data, _ = copied
    prepared, marker = open_prepared(used, data), tmp_path / "marker"
    folder = index_folder(used, prepared)
    file = next(folder.glob("*-PassDataset-train-shuffle_index.npy"))
    if listed == "another":
        file = file.with_name(f"x-{file.name}")
    if kind == "pickle":
        file.write_bytes(pickle.dumps(Code(marker)))
    else:
        np.save(file, np.array([Code(marker)], dtype=object), allow_pickle=True)
    mark = folder / LISTING
    files = json.loads(mark.read_text())
    if listed == "nothing":
        mark.write_text("{}")
    elif listed == "sizes":
        files[file.name] = {"bytes": file.stat().st_size}
        mark.write_text(json.dumps({name: entry["bytes"] for name, entry in files.items()}))
        monkeypatch.setattr(os, "access", lambda *_: False)  # otherwise it would be built again
    elif listed == "hashes":
        files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        mark.write_text(json.dumps(files))
    with refused(folder):
        prepare(used, data, workers=1)
    with refused(folder):
        dataset.build(used, prepared, "train")
    assert not marker.exists()
    np.load(file, allow_pickle=True)
    assert marker.is_dir(), "this is what reading it does"


def test_an_empty_list_of_no_files_is_refused(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, _ = copied
    prepared = open_prepared(used, data)
    folder = index_folder(used, prepared)
    for file in folder.iterdir():
        file.unlink()
    (folder / LISTING).write_text("{}")
    with refused(folder):
        dataset.build(used, prepared, "train")
    assert [file.name for file in folder.iterdir()] == [LISTING]


def test_an_archive_in_place_of_an_array_is_refused(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, _ = copied
    folder = index_folder(used, open_prepared(used, data))
    file = next(folder.glob("*-train-shuffle_index.npy"))
    with file.open("wb") as stream:
        np.savez(stream, a=np.arange(3))
    files = json.loads((folder / LISTING).read_text())
    files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (folder / LISTING).write_text(json.dumps(files))
    with refused(file, rule=".npy"):
        prepare(used, data, workers=1)


# -- a prepare that is stopped ---------------------------------------------------------------------------------------


@pytest.fixture
def stop_with_75() -> Iterator[None]:
    def stop(number: int, _frame: Any) -> None:
        raise SystemExit(int(ExitCode.REQUEUE))

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_prepare_leaves_its_shards_and_no_process(
    made: tuple[Recipe, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_with_75: None, workers: int
) -> None:
    def stopped(*arguments: Any) -> bytes:
        os.kill(os.getpid(), signal.SIGTERM)
        return framed(*arguments)

    monkeypatch.setattr(shards, "framed", stopped)
    monkeypatch.setattr(corpus_module, "_ALONE", 0)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 4096)
    with pytest.raises(SystemExit) as caught:
        prepare(made[0], tmp_path, workers=workers)
    assert caught.value.code == 75
    assert {file.suffix for file in tmp_path.iterdir()} == {".lock", ".shards"}
    assert not active_children()


@pytest.mark.slow
def test_a_process_of_prepare_that_is_killed_is_one_message(
    made: tuple[Recipe, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*arguments: Any) -> bytes:
        for child in active_children():
            child.kill()
        return framed(*arguments)

    monkeypatch.setattr(shards, "framed", kill)
    monkeypatch.setattr(corpus_module, "_ALONE", 0)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 4096)
    with refused("--workers", rule="--workers 2"):
        prepare(made[0], tmp_path, workers=2)
    assert not list(tmp_path.glob(".*.part"))
