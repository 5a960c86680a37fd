"""Who compares, reads and opens what, without ranks."""

from __future__ import annotations

import random
import resource
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from llmrecipes.checkpoint import store as store_module
from llmrecipes.checkpoint.manifest import CheckpointInfo, FileRecord, build, digest
from llmrecipes.checkpoint.shared_check import LEAST_WAIT, longest_wait, own_share
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.megatron.checkpoint.index import Stored
from llmrecipes.launch.open_files import allow_open_files, needed_files
from tests.refusals import refused

INFO = CheckpointInfo(step=1, consumed_samples=1, consumed_tokens=1, layout={}, recipe_hash="r")


def records(sizes: list[int]) -> dict[str, FileRecord]:
    return {f"file{number}": FileRecord(size=size, sha256="0" * 64) for number, size in enumerate(sizes)}


@pytest.mark.parametrize("sizes", [[100] * 16, [0, 0], [5], [1, 1000, 1, 1], [0, 7, 0, 7, 0], list(range(40))])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_each_file_is_compared_by_one_rank(sizes: list[int], ranks: int) -> None:
    files = records(sizes)
    shares = [own_share(files, rank, ranks) for rank in range(ranks)]
    assert [name for share in shares for name in share] == list(files)
    bytes_of = [sum(files[name].size for name in share) for share in shares]
    assert max(bytes_of) <= sum(sizes) / ranks + max(sizes)


def test_ranks_wait_longer_for_more_bytes() -> None:
    small, large = (build(INFO, {}, records([size] * 64)) for size in (10, 100 * 10**9))
    assert longest_wait(small, 64) - LEAST_WAIT < LEAST_WAIT / 100
    assert longest_wait(large, 64).total_seconds() > 100e9 / 10e6
    assert longest_wait(large, 8) > longest_wait(large, 64)


def test_files_of_other_nodes_are_opened_by_name_and_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    temporary = store.temporary(1)
    for name in ("own.bin", "__1_0.distcp"):
        (temporary / name).write_bytes(b"1234")
    listed = store_module._files
    monkeypatch.setattr(store_module, "_files", lambda folder: (path for path in listed(folder) if path.stem == "own"))
    known = {"__1_0.distcp": digest(temporary / "__1_0.distcp")}
    entry = store.publish(temporary, INFO, versions={}, known=known)
    assert set(entry.manifest.files) == {"own.bin", "__1_0.distcp"}
    assert store.valid(1, full=True)


def stored(shape: tuple[int, ...], offsets: list[list[int]], sizes: list[list[int]]) -> Stored:
    order = sorted(range(len(offsets)), key=lambda number: offsets[number][0] if shape else 0)
    starts, lengths = (np.asarray([rows[number] for number in order], np.int64) for rows in (offsets, sizes))
    return Stored(torch.float32, shape, starts, lengths, np.zeros((len(offsets), 3), np.int64))


def test_the_parts_of_a_box_are_those_that_share_elements_with_it() -> None:
    draw = random.Random(3)
    for _ in range(50):
        shape = tuple(draw.randint(1, 12) for _ in range(draw.randint(1, 3)))
        parts = [
            [(first, draw.randint(1, size - first)) for size in shape for first in [draw.randrange(size)]]
            for _ in range(draw.randint(1, 20))
        ]
        index = stored(shape, [[a for a, _ in part] for part in parts], [[b for _, b in part] for part in parts])
        box = [(first, draw.randint(1, size - first)) for size in shape for first in [draw.randrange(size)]]
        found = index.overlapping(tuple(a for a, _ in box), tuple(b for _, b in box))
        mask = np.zeros(shape, bool)
        mask[tuple(slice(a, a + b) for a, b in box)] = True
        for number in range(len(parts)):
            ends = zip(index.offsets[number].tolist(), index.sizes[number].tolist(), strict=True)
            assert (number in found) == bool(mask[tuple(slice(a, a + b) for a, b in ends)].any())


def test_a_box_of_one_layer_is_not_compared_with_the_parts_of_all() -> None:
    layers, parts = 200, 500
    offsets = [[layer, part] for layer in range(layers) for part in range(parts)]
    index = stored((layers, parts), offsets, [[1, 1]] * len(offsets))
    assert prod(index.shape) == len(offsets)
    assert index.overlapping((7, 3), (1, 2)) == [7 * parts + 3, 7 * parts + 4]


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """Give this process limits of open files; returns those that are set."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: found.append(limit))
    return found


def test_open_files_are_raised_to_what_the_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits(monkeypatch, 1024, 1 << 20)
    allow_open_files(0, 16_384)
    assert found == [(needed_files(0, 16_384), 1 << 20)]
    assert needed_files(0, 16_384) > 16_384 > needed_files(1, 16_384)
    assert limits(monkeypatch, 1 << 20, 1 << 20) == []


def test_a_limit_that_is_too_low_is_refused_in_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, 1024, 8192)
    allow_open_files(1, 16_384)
    with refused("ulimit -n", rule=str(needed_files(0, 16_384))):
        allow_open_files(0, 16_384)
