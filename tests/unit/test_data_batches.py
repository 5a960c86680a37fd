"""Samples and batches: the same for any number of ranks and loader processes, and after a resume."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Generator
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset

from llmrecipes.data.folder.prepared import drawn_samples, index_folder
from llmrecipes.data.prepare import Prepared, open_prepared, prepare
from llmrecipes.data.read import dataset
from llmrecipes.data.read.batches import KEYS, ReaderLost, batches, read_error, sample_ids
from llmrecipes.errors import ExitCode
from llmrecipes.recipe.schema import Recipe
from tests.refusals import refused
from tests.unit.data_recipes import corpus, recipe

Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Prepared]:
    """Two sources whose words tell them apart, blended three to one."""
    root = tmp_path_factory.mktemp("batches")
    first = corpus(root / "first", word="alpha").model_copy(update={"weight": 3.0})
    second = corpus(root / "second", seed=1, word="omega")
    used = recipe(first, second, train_iters=25)
    return used, prepare(used, root / "data", workers=1)


@pytest.fixture(scope="module")
def train(made: tuple[Recipe, Prepared]) -> Any:
    return dataset.build(*made, "train")


def _batches(data: Any, rank: int = 0, size: int = 1, **changes: int) -> Generator[Batch, None, None]:
    settings: dict[str, Any] = {
        "consumed_samples": 0,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "data_parallel_rank": rank,
        "data_parallel_size": size,
        "num_workers": 0,
        "prefetch_factor": 2,
        "pin_memory": False,
    }
    return batches(data, **(settings | changes))


def _same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(first[key], second[key]) for key in KEYS)


def test_a_batch_has_the_next_token_as_label_and_no_loss_left_out(train: Any) -> None:
    batch = next(_batches(train))
    assert {key: (tuple(t.shape), t.dtype) for key, t in batch.items()} == {
        "tokens": ((2, 64), torch.int64),
        "labels": ((2, 64), torch.int64),
        "loss_mask": ((2, 64), torch.float32),
        "position_ids": ((2, 64), torch.int64),
    }
    for batch in _batches(train):
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert batch["loss_mask"].all()
        assert torch.equal(batch["position_ids"], torch.arange(64).expand(2, 64))


def test_end_of_document_is_learnt(made: tuple[Recipe, Prepared], train: Any) -> None:
    labels = torch.cat([batch["labels"] for batch in _batches(train)])
    assert (labels == made[1].tokenizer().eod).any()


def test_sources_are_blended_by_their_weights(made: tuple[Recipe, Prepared], train: Any) -> None:
    assert isinstance(train, BlendedDataset)
    assert len(train) == 200
    assert np.bincount(train.dataset_index).tolist() == [150, 50]
    tokenizer = made[1].tokenizer()
    texts = [tokenizer.decode(row.tolist()) for batch in _batches(train) for row in batch["tokens"]]
    assert sum("alpha" in text for text in texts) == 150
    assert sum("omega" in text for text in texts) == 50


@pytest.mark.parametrize(("weight", "is_named"), [(1 / 202, True), (1 / 150, False)])
def test_a_source_that_training_may_never_draw_is_named(
    weight: float, is_named: bool, made: tuple[Recipe, Prepared], tmp_path: Path
) -> None:
    first, second = (
        source.model_copy(update={"weight": weight})
        for source, weight in zip(made[0].data.sources, (1.0, weight), strict=True)
    )
    lines: list[str] = []
    prepare(recipe(first, second, train_iters=25), tmp_path / "data", workers=1, progress=lines.append)  # 200 samples
    assert any(line.startswith("warning: ") and f"{second.location} (" in line for line in lines) == is_named


@pytest.mark.parametrize("size", [2, 4])
def test_a_global_batch_is_the_same_on_any_number_of_ranks(train: Any, size: int) -> None:
    alone = list(_batches(train))
    ranks = [list(_batches(train, rank, size)) for rank in range(size)]
    together = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert len(alone) == 100
    assert all(_same(a, b) for a, b in zip(alone, together, strict=True))


def test_resuming_at_consumed_samples_continues_the_same_stream(train: Any) -> None:
    whole = list(_batches(train))
    resumed = list(_batches(train, consumed_samples=8 * 7))
    assert len(resumed) == len(whole) - 4 * 7
    assert all(_same(a, b) for a, b in zip(whole[4 * 7 :], resumed, strict=True))


def test_loader_processes_change_nothing(train: Any) -> None:
    here = list(_batches(train))
    there = list(_batches(train, num_workers=2))
    assert all(_same(a, b) for a, b in zip(here, there, strict=True))
    assert not active_children()


def test_closing_the_iterator_ends_its_processes(train: Any) -> None:
    stream = _batches(train, num_workers=2)
    next(stream)
    assert len(active_children()) == 2
    stream.close()
    assert not active_children()


def test_a_process_that_dies_ends_the_others_too(train: Any) -> None:
    stream = _batches(train, num_workers=2)
    next(stream)
    killed = active_children()[0]
    killed.kill()
    with pytest.raises(ReaderLost) as error:
        list(stream)
    assert (error.value.pid, error.value.exitcode) == (killed.pid, -signal.SIGKILL)
    assert not active_children()
    assert error.traceback


def test_a_process_that_dies_is_found_by_the_next_read_and_nowhere_else(train: Any) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with closing(_batches(train, num_workers=1)) as stream:
        next(stream)
        assert signal.getsignal(signal.SIGCHLD) is before, "torch's handler raises in the middle of an update"


@pytest.mark.parametrize("workers", [0, 1])
def test_tokens_that_are_cut_off_meanwhile_are_an_error_with_the_file(
    made: tuple[Recipe, Prepared], tmp_path: Path, workers: int
) -> None:
    shutil.copytree(made[1].path.parent, tmp_path / "data")
    prepared = open_prepared(made[0], tmp_path / "data")
    file = prepared.path / "00-train.bin"
    with closing(_batches(dataset.build(made[0], prepared, "train"), num_workers=workers)) as stream:
        next(stream)
        os.truncate(file, 1000)
        with pytest.raises(OSError, match="ends at byte") as error:
            list(stream)
    assert error.value.filename == str(file)
    explained = read_error(error.value, made[0], prepared)
    assert explained.code == ExitCode.STOP
    assert explained.where == str(file)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_of_samples_that_names_what_is_not_there_stops_the_run(
    made: tuple[Recipe, Prepared], workers: int
) -> None:
    """As one that was altered together with its hashes."""
    train: Any = dataset.build(made[0], made[1], "train")
    for each in getattr(train, "datasets", [train]):
        each.document_index = np.full_like(each.document_index, 1 << 14)
    with (
        closing(_batches(train, num_workers=workers)) as stream,
        refused("sample", code=ExitCode.STOP),
    ):
        list(stream)


def test_what_ended_a_process_decides_whether_to_start_again(made: tuple[Recipe, Prepared]) -> None:
    killed = read_error(ReaderLost(7, -signal.SIGKILL), *made)
    assert killed.code == ExitCode.REQUEUE
    assert "SIGKILL" in killed.what
    assert "shm" in read_error(ReaderLost(7, -signal.SIGBUS), *made).fix
    assert read_error(ReaderLost(7, 1), *made).code == ExitCode.REQUEUE
    stale = read_error(OSError(errno.ESTALE, os.strerror(errno.ESTALE), "x.bin"), *made)
    assert (stale.code, stale.where) == (ExitCode.REQUEUE, "x.bin")


def test_loader_processes_outlive_the_signals_of_a_scheduler(train: Any) -> None:
    stream = _batches(train, num_workers=2)
    next(stream)
    for child in active_children():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(child.pid or 0, number)
    assert len(list(stream)) == 99
    assert not active_children()


def test_only_full_global_batches_and_no_ragged_division() -> None:
    def ids(size: int, consumed: int = 0, micro: int = 2) -> list[list[int]]:
        shared: dict[str, Any] = {"global_batch_size": 8, "data_parallel_rank": 1, "data_parallel_size": 2}
        return list(sample_ids(size, consumed_samples=consumed, micro_batch_size=micro, **shared))

    assert ids(23) == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert ids(24, consumed=8) == [[10, 11], [14, 15], [18, 19], [22, 23]]
    assert ids(24, consumed=24) == []
    with pytest.raises(ValueError, match="is not a multiple of 3 × 2"):
        ids(24, micro=3)


def test_batches_are_left_out_and_as_many_follow_from_the_beginning() -> None:
    def first(consumed: int, *skipped: tuple[int, int]) -> list[int]:
        shared: dict[str, Any] = {"micro_batch_size": 4, "data_parallel_rank": 0, "data_parallel_size": 1}
        found = sample_ids(19, consumed_samples=consumed, global_batch_size=4, skipped=skipped, **shared)
        return [ids[0] for ids in found]

    assert first(0) == [0, 4, 8, 12]
    assert first(0, (4, 12)) == [0, 12, 0, 12]
    assert first(4, (4, 12)) == first(12, (4, 12)) == [12, 0, 12]
    assert first(16, (4, 12)) == [0, 12]
    assert first(20, (4, 12)) == [12]
    assert first(0, (0, 8)) == [8, 12, 8, 12], "not those that were left out"
    assert first(0, (6, 7)) == [0, 8, 12, 0], "a batch with one of them"
    assert first(0, (3, 9)) == [12] * 4, "all that have some"


def test_held_out_splits_and_their_sizes(made: tuple[Recipe, Prepared]) -> None:
    for split in ("valid", "test"):
        held_out = dataset.build(*made, split)
        assert held_out is not None
        assert len(held_out) >= drawn_samples(made[0], split) == 16
        assert all(_same(a, b) for a, b in zip(_batches(held_out), _batches(held_out), strict=True))


def test_the_seed_decides_the_order(made: tuple[Recipe, Prepared], tmp_path: Path) -> None:
    used = recipe(*made[0].data.sources, train_iters=25, seed=7)
    shutil.copytree(made[1].path.parent, tmp_path / "data")
    other = dataset.build(used, prepare(used, tmp_path / "data", workers=1), "train")
    mine = dataset.build(*made, "train")
    assert not all(_same(a, b) for a, b in zip(_batches(mine), _batches(other), strict=True))


def test_training_builds_nothing_even_where_the_folder_has_moved(
    made: tuple[Recipe, Prepared], train: Any, tmp_path: Path
) -> None:
    shutil.copytree(made[1].path.parent, tmp_path / "elsewhere")
    moved = open_prepared(made[0], tmp_path / "elsewhere")
    before = sorted(moved.path.rglob("*"))
    for split in ("train", "valid", "test"):
        dataset.build(made[0], moved, split)
    assert sorted(moved.path.rglob("*")) == before
    there = _batches(dataset.build(made[0], moved, "train"))
    assert all(_same(a, b) for a, b in zip(_batches(train), there, strict=True))


def test_a_missing_or_damaged_index_is_reported(made: tuple[Recipe, Prepared], tmp_path: Path) -> None:
    with refused(made[1].path):
        dataset.build(recipe(*made[0].data.sources, train_iters=26), made[1], "train")
    shutil.copytree(made[1].path.parent, tmp_path / "data")
    prepared = open_prepared(made[0], tmp_path / "data")
    file = next(index_folder(made[0], prepared).glob("*-train-shuffle_index.npy"))
    os.truncate(file, file.stat().st_size - 4)
    size = file.stat().st_size
    with refused(file, rule=(f"{size}", f"{size + 4}")):
        dataset.build(made[0], prepared, "train")


def test_an_empty_held_out_split_is_none(tmp_path: Path) -> None:
    used = recipe(corpus(tmp_path / "text"), split=(1.0, 0.0, 0.0))
    prepared = prepare(used, tmp_path / "data", workers=1)
    assert dataset.build(used, prepared, "valid") is None
    assert dataset.build(used, prepared, "test") is None
    assert len(list(itertools.islice(_batches(dataset.build(used, prepared, "train")), 40))) == 40
