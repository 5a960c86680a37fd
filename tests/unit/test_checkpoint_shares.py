"""Who compares, reads and opens what, without ranks."""

from __future__ import annotations

import random
import resource
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrecipes.checkpoint import store as store_module
from llmrecipes.checkpoint.manifest import CheckpointInfo, FileRecord, build, digest
from llmrecipes.checkpoint.rank_groups import LEAST_WAIT, longest_wait, own_share
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.core.checkpoint.index import StoredTensor, covered, decode, encode, make_table, merge_tables
from llmrecipes.engine.core.checkpoint.index import build as index_of
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


def stored(shape: tuple[int, ...], boxes: list[list[tuple[int, int]]]) -> StoredTensor:
    """A tensor in parts, each an offset and a size in every dimension."""
    file = [0, 0, 1]
    table = make_table(["a"], [], [("tensor", "float32", shape, [[*file, *chain(*box)] for box in boxes])])
    return index_of(table, records_of("a")).tensors["tensor"]


def records_of(*names: str) -> dict[str, FileRecord]:
    return {name: FileRecord(size=1, sha256="0" * 64) for name in names}


def cut(draw: random.Random, box: list[tuple[int, int]], pieces: int) -> list[list[tuple[int, int]]]:
    """A box in pieces, cut at random."""
    dimension = draw.randrange(len(box))
    start, size = box[dimension]
    if pieces == 1 or size == 1:
        return [box]
    at, left = draw.randint(1, size - 1), draw.randint(1, pieces - 1)
    ends = [(start, at), (start + at, size - at)]
    one, other = ([*box[:dimension], end, *box[dimension + 1 :]] for end in ends)
    return cut(draw, one, left) + cut(draw, other, pieces - left)


def counted(shape: tuple[int, ...], boxes: list[list[tuple[int, int]]]) -> np.ndarray:
    """In how many boxes each element is."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(start, start + size) for start, size in box)] += 1
    return counts


def test_boxes_are_the_whole_if_every_element_is_in_one() -> None:
    draw = random.Random(5)
    seen = {True: 0, False: 0}
    for _ in range(600):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
        boxes = cut(draw, [(0, size) for size in shape], draw.randint(1, 9))
        if draw.random() < 0.6:  # damage: move, grow, shrink, leave out, or one box twice
            number, dimension = draw.randrange(len(boxes)), draw.randrange(len(shape))
            length = shape[dimension]
            start = draw.randrange(length)
            other = [*boxes[number]]
            other[dimension] = (start, draw.randint(1, length - start))
            boxes[number : number + draw.randint(0, 1)] = draw.choice(([], [other], [other, other], [boxes[number]]))
        expected = bool((counted(shape, boxes) == 1).all())
        offsets, sizes = (
            np.asarray([[pair[part] for pair in box] for box in boxes], np.int64).reshape(-1, len(shape))
            for part in (0, 1)
        )
        assert covered(shape, offsets, sizes) == expected, (shape, boxes)
        seen[expected] += 1
    assert min(seen.values()) > 100


def test_a_number_is_one_part_and_nothing_is_none() -> None:
    for parts in range(3):
        assert covered((), np.empty((parts, 0), np.int64), np.empty((parts, 0), np.int64)) == (parts == 1)
    assert covered((3, 0), np.empty((0, 2), np.int64), np.empty((0, 2), np.int64))


def test_the_parts_of_a_box_are_those_that_share_elements_with_it() -> None:
    draw = random.Random(3)
    for _ in range(100):
        shape = tuple(draw.randint(1, 12) for _ in range(draw.randint(1, 3)))
        boxes = cut(draw, [(0, size) for size in shape], draw.randint(1, 20))
        box = [(first, draw.randint(1, size - first)) for size in shape for first in [draw.randrange(size)]]
        found = stored(shape, boxes).slices(tuple(a for a, _ in box), tuple(b for _, b in box))
        mask = counted(shape, [box])
        expected = [box for box in boxes if (mask * counted(shape, [box])).any()]
        pairs = [
            list(zip(*part, strict=True)) for part in zip(found.offsets.tolist(), found.sizes.tolist(), strict=True)
        ]
        assert sorted(pairs) == sorted(expected)


class Untouched(np.ndarray[Any, Any]):
    """A column that knows how many of its elements are read."""

    read = 0

    def astype(self, *arguments: Any, **options: Any) -> Any:
        Untouched.read += self.size
        return super().astype(*arguments, **options)


def test_a_box_of_one_layer_is_not_compared_with_the_parts_of_all() -> None:
    layers, parts = 200, 500
    whole = stored((layers, parts), [[(layer, 1), (part, 1)] for layer in range(layers) for part in range(parts)])
    whole.columns[:] = [column.view(Untouched) for column in whole.columns]
    Untouched.read = 0
    assert whole.slices((7, 3), (1, 2)).offsets.tolist() == [[7, 3], [7, 4]]
    assert Untouched.read < layers * parts + 10 * parts, "offsets in the first dimension, and a layer"


def test_merged_indexes_are_sorted_and_keep_their_files() -> None:
    first = make_table(["a"], [], [("w", "float32", (2, 4), [[0, 9, 1, 1, 1, 0, 4]]), ("n", "int64", (), [[0, 5, 1]])])
    second = make_table(["b", "c"], [], [("w", "float32", (2, 4), [[1, 7, 1, 0, 1, 2, 2], [0, 3, 1, 0, 1, 0, 2]])])
    merged = decode(encode(merge_tables([decode(encode(first)), decode(encode(second))])))
    assert merged.files == ["a", "b", "c"]
    assert [(head.name, head.rows, head.longest) for head in merged.tensors] == [("w", 3, 1), ("n", 1, 0)]
    rows = list(zip(*(column.tolist() for column in merged.columns), strict=True))
    assert rows == [(1, 3, 1, 0, 1, 0, 2), (2, 7, 1, 0, 1, 2, 2), (0, 9, 1, 1, 1, 0, 4), (0, 5, 1, 0, 0, 0, 0)]


@pytest.mark.parametrize("other", [("float64", (2, 4)), ("float32", (2, 5))])
def test_indexes_that_do_not_fit_together_are_refused(other: tuple[str, tuple[int, ...]]) -> None:
    one = make_table(["a"], [], [("w", "float32", (2, 4), [])])
    with pytest.raises(ValueError, match="'w'"):
        merge_tables([one, make_table(["b"], [], [("w", *other, [])])])


@pytest.mark.parametrize("most", [255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1])
def test_numbers_survive_in_the_narrowest_column(most: int) -> None:
    table = make_table(["a"], [], [("w", "float32", (), [[0, most, 0]])])
    data = encode(table)
    assert decode(data).columns[1].tolist() == [most]
    assert len(data) < 300


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
