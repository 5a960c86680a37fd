"""Near-duplicates: the bands, their index, what `prepare` drops, and that no near-copy of training text is held out."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from llmrecipes.data.folder.leaks import check_near_copies
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.data.preparation import corpus as corpus_module
from llmrecipes.data.preparation import repeated_documents
from llmrecipes.data.prepare import prepare
from llmrecipes.data.steps.copies import (
    BandIndex,
    NearDuplicates,
    band_keys,
    bands_of,
    different,
    margin,
    most_different,
    sketch,
)
from llmrecipes.data.steps.words import shingles
from llmrecipes.recipe.sections.source import AnySource, make_source
from tests.refusals import refused
from tests.unit.test_data_steps import with_steps

NEAR = {"type": "near_duplicates", "threshold": 0.7}
WORDS = [f"word{n}" for n in range(5000)]


def edited(words: list[str], share: float, rng: random.Random) -> list[str]:
    return [rng.choice(WORDS) if rng.random() < share else word for word in words]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> AnySource:
    """40 texts and 4 copies of each with another word, shuffled."""
    rng = random.Random(3)
    texts = [rng.choices(WORDS, k=150) for _ in range(40)]
    rows = [
        text
        for text in texts
        for text in (text, *([*text[:k], f"edit{k}", *text[k + 1 :]] for k in rng.sample(range(150), 4)))
    ]
    rng.shuffle(rows)
    file = tmp_path_factory.mktemp("copies") / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in rows))
    return make_source(type="jsonl", path=str(file))


@pytest.mark.parametrize("permutations", [16, 128, 256])
@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.8, 0.95])
def test_bands_find_a_pair_of_the_threshold(threshold: float, permutations: int) -> None:
    """With the most rows that do, so that few other documents are compared."""
    bands, rows = bands_of(threshold, permutations)

    def probability(bands: int, rows: int) -> float:
        return 1 - (1 - threshold**rows) ** bands

    assert bands * rows <= permutations
    assert rows == 1 or probability(bands, rows) >= 0.99
    assert probability(permutations // (rows + 1), rows + 1) < 0.99


def test_the_index_finds_what_a_dictionary_finds() -> None:
    rng = np.random.default_rng(1)
    index = BandIndex()
    expected: dict[tuple[int, tuple[int, ...]], set[int]] = defaultdict(set)
    for number in range(9000):  # the table doubles twice
        values = rng.integers(0, 2**32, 32, np.uint32)
        if number % 50 == 0:
            values[:8] = number % 7  # two bands that many have in common
        keys = band_keys(values, 8, 4)
        bands = [(band, tuple(values[4 * band : 4 * band + 4])) for band in range(8)]
        if number % 100 == 0 or number > 8950:
            places, numbers = index.find(keys)
            expected_pairs = {(place, other) for place, band in enumerate(bands) for other in expected[band]}
            assert set(zip(places.tolist(), numbers.tolist(), strict=True)) == expected_pairs
        index.add(keys, number)
        for band in bands:
            expected[band].add(number)


@pytest.mark.parametrize("permutations", [16, 50, 128])
def test_sketches_differ_where_values_do(permutations: int) -> None:
    """But for one in sixteen, which the limit takes into account."""
    rng = np.random.default_rng(2)
    counts = []
    for _ in range(300):
        values = rng.integers(0, 2**32, permutations, np.uint32)
        others = np.where(np.arange(permutations) % 2 == 0, values, rng.integers(0, 2**32, permutations, np.uint32))
        assert different(sketch(values), sketch(values)) == 0
        counts.append(int(different(sketch(values), sketch(others))))
    assert np.mean(counts) == pytest.approx(permutations // 2 * 15 / 16, rel=0.02)
    similarity = 1 - most_different(0.8, 128) / (128 * 15 / 16)
    assert 0.8 - margin(0.8, 128) <= similarity < 0.8 - margin(0.8, 128) + 1 / 120


def test_recall_and_precision_around_the_threshold() -> None:
    rng = random.Random(1)
    step = NearDuplicates(threshold=0.8, permutations=128, shingle_words=5)
    texts = [rng.choices(WORDS, k=300) for _ in range(300)]
    assert all(step.add(step.mark(" ".join(text))) for text in texts)
    for text in texts:
        copy = edited(text, 0.01, rng)
        mine, other = (set(shingles(" ".join(words), 5)) for words in (text, copy))
        similarity = len(mine & other) / len(mine | other)
        dropped = not step.add(step.mark(" ".join(copy)))
        assert dropped or similarity < 0.9
        far = edited(text, 0.1, rng)
        assert step.add(step.mark(" ".join(far)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A b, C d!", ["a b c", "b c d"]),
        ("two words", ["two words"]),
        ("東京 と大阪", ["東 京 と", "京 と 大", "と 大 阪"]),
        ("…", [""]),
    ],
)
def test_shingles(text: str, expected: list[str]) -> None:
    assert shingles(text, 3) == expected


@pytest.mark.rotating
def test_no_near_copy_of_training_text_is_held_out(
    copied: AnySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_ALONE", 1)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 8192)
    used = with_steps(copied, NEAR)
    one, two = (prepare(used, tmp_path / f"{n}", workers=n) for n in (1, 2))
    record = one.manifest.sources[0]
    kept = sum(counts.documents for counts in record.splits.values())
    assert (record.steps["near_duplicates"], record.duplicates) == (160, 0)
    assert kept == 40
    assert {n: f.sha256 for n, f in one.manifest.files.items()} == {n: f.sha256 for n, f in two.manifest.files.items()}
    found = check_near_copies(one)
    assert found is not None
    assert (found.held_out, found.training, found.compared) == (kept - found.training, found.training, found.training)
    assert found.held_out > 0
    assert (found.above, found.highest < 0.2) == (0, True)
    fewer = check_near_copies(one, most=10)
    assert fewer is not None
    assert 8 <= fewer.compared <= 10
    # Without the step the copies of a text are in several splits, and nothing is promised.
    plain = prepare(with_steps(copied), tmp_path / "plain", workers=1)
    assert check_near_copies(plain) is None
    claims = plain.manifest.model_copy(update={"data": {**plain.manifest.data, "steps": one.manifest.data["steps"]}})
    with refused(plain.path, rule="0.7"):
        check_near_copies(Prepared(plain.path, claims, plain.weights))


def chained(rng: random.Random) -> list[str]:
    """Documents of which two in three are copies with some other words of earlier ones, which may be copies too."""
    texts: list[list[str]] = []
    for number in range(900):
        words = rng.choices(WORDS, k=60)
        if number % 3:
            words = edited(rng.choice(texts), rng.choice((0.1, 0.3, 0.5)), rng)
        texts.append(words)
    return [" ".join(words) for words in texts]


def test_ranges_of_bands_drop_what_the_definition_drops(tmp_path: Path) -> None:
    """However documents are cut into shards and pieces and keys into ranges; and no two that are kept are similar, if
    they have a band in common."""
    step = NearDuplicates(threshold=0.6, permutations=64, shingle_words=1)
    marks = [step.mark(text) for text in chained(random.Random(5))]
    words = [np.frombuffer(mark, "<u8") for mark in marks]
    expected, representatives = set[int](), defaultdict[int, list[int]](list)
    for number, of_mark in enumerate(words):
        for key in of_mark[: step.bands].tolist():
            others = [words[other][step.bands :] for other in representatives[key]]
            if any(different(of_mark[step.bands :], other) <= step.most_different for other in others):
                expected.add(number)
            else:
                representatives[key].append(number)
    buckets = defaultdict[int, list[int]](list)
    for number in set(range(len(marks))) - expected:
        for key in words[number][: step.bands].tolist():
            buckets[key].append(number)
    pairs = [pair for numbers in buckets.values() for pair in combinations(numbers, 2)]
    assert pairs
    for one, other in pairs:
        assert different(words[one][step.bands :], words[other][step.bands :]) > step.most_different
    # In one process.
    assert {number for number, mark in enumerate(marks) if not step.add(mark)} == expected
    assert 200 < len(expected) < 600
    # A document is also dropped if it is similar only to one that another bucket drops: not so the greedy way.
    assert len(expected) >= len(greedy(words, step))
    for borders, size, ranges in (((0, 900), 900, 1), ((0, 3, 3, 400, 900), 150, 16), ((0, 450, 900), 7, 40)):
        files = []
        for number, (first, last) in enumerate(pairwise(borders)):
            file = tmp_path / f"{ranges}-{number}.bands"
            pieces = [range(start, min(start + size, last)) for start in range(first, last, size)]
            content = (
                repeated_documents.piece(
                    [place - first for place in each], [marks[place] for place in each], step.bands, ranges
                )
                for each in pieces
            )
            file.write_bytes(b"".join(content))
            files.append(file)
        dropped = set[int]()
        for of_range in range(ranges):
            found = repeated_documents.dropped_in(files, of_range, ranges, step)
            assert found[0].tolist() == sorted(found[0])
            dropped |= {borders[number] + place for number, place in found.T.tolist()}
        assert dropped == expected


def greedy(words: list[np.ndarray], step: NearDuplicates) -> set[int]:
    """What is dropped if documents are compared with those that are kept."""
    dropped, kept = set[int](), defaultdict[int, list[int]](list)
    for number, of_mark in enumerate(words):
        others = {other for key in of_mark[: step.bands].tolist() for other in kept[key]}
        its_sketch = of_mark[step.bands :]
        if any(different(its_sketch, words[other][step.bands :]) <= step.most_different for other in others):
            dropped.add(number)
            continue
        for key in of_mark[: step.bands].tolist():
            kept[key].append(number)
    return dropped


def test_a_large_bucket_of_copies_has_one_representative() -> None:
    rng = np.random.default_rng(3)
    sketches = rng.integers(0, 2**63, (2, 8), np.uint64)
    buckets = repeated_documents.Buckets(2, 32, 8)
    for _ in range(3):
        similar = buckets.add(np.zeros(2000, np.int64), np.tile(sketches[0], (2000, 1)))
        assert similar.sum() in (1999, 2000)
    assert len(buckets) == 1
    # Another document is a second one there, and the first in the other bucket.
    assert buckets.add(np.array([0, 1, 1]), sketches[[1, 1, 1]]).tolist() == [False, False, True]
    assert len(buckets) == 3


def test_a_bucket_of_many_representatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first of them, which are compared in all buckets at once."""
    monkeypatch.setattr(repeated_documents, "_BLOCK", 7)
    sketches = np.random.default_rng(4).integers(0, 2**63, (60, 8), np.uint64)
    order = [*range(50), *range(20, 60), 59, 3]
    buckets, seen = repeated_documents.Buckets(2, 32, 8), set[int]()
    for first in range(0, len(order), 23):
        chosen = order[first : first + 23]
        both = np.array([[0, 1] for _ in chosen]).ravel()
        similar = buckets.add(both, np.repeat(sketches[chosen], 2, axis=0)).reshape(-1, 2).tolist()
        for number, of_buckets in zip(chosen, similar, strict=True):
            assert of_buckets == [number in seen] * 2
            seen.add(number)
    assert len(buckets) == 120


def test_damaged_bands_are_refused(tmp_path: Path) -> None:
    step = NearDuplicates(threshold=0.6, permutations=64, shingle_words=1)
    marks = [step.mark(text) for text in ("a b c d e f g", "a b c d e f g", "h i j k l m n")]
    file = tmp_path / "000000.bands"
    right = repeated_documents.piece([0, 1, 2], marks, step.bands, 2)
    start = int(np.frombuffer(right[:8], "<i8")[0])
    for place in (0, 8, 32, start + 20, len(right) - 1):
        file.write_bytes(right[:place] + bytes([right[place] ^ 129]) + right[place + 1 :])
        with refused(file):
            for of_range in range(2):
                repeated_documents.dropped_in([file], of_range, 2, step)
    file.write_bytes(right[:-1])
    with refused(file):
        repeated_documents.dropped_in([file], 0, 2, step)
