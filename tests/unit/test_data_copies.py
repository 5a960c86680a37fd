"""Near-duplicates: the bands, their index, what `prepare` drops, and that no near-copy of training text is held out."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from llmrecipes.data import copies
from llmrecipes.data import corpus as corpus_module
from llmrecipes.data.copies import NearDuplicates, SignatureIndex, SpillingIndex, bands_of, shingles
from llmrecipes.data.leaks import check_near_copies
from llmrecipes.data.prepare import prepare
from llmrecipes.data.prepared import Prepared
from llmrecipes.recipe.schema import Source
from tests.refusals import refused
from tests.unit.test_data_steps import with_steps

NEAR = {"type": "near_duplicates", "threshold": 0.7}
WORDS = [f"word{n}" for n in range(5000)]


def edited(words: list[str], share: float, rng: random.Random) -> list[str]:
    return [rng.choice(WORDS) if rng.random() < share else word for word in words]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Source:
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
    return Source(type="jsonl", path=str(file))


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
    index = SignatureIndex(32, 8, 4)
    expected: dict[tuple[int, tuple[int, ...]], set[int]] = defaultdict(set)
    for number in range(9000):  # the table doubles twice, the signatures four times
        values = rng.integers(0, 2**32, 32, np.uint32)
        if number % 50 == 0:
            values[:8] = number % 7  # two bands that many have in common
        keys = index.keys(values)
        bands = [(band, tuple(values[4 * band : 4 * band + 4])) for band in range(8)]
        if number % 100 == 0 or number > 8950:
            candidates = set(index.candidates(keys).tolist())
            assert candidates == set().union(*(expected[band] for band in bands))
        index.add(values, keys)
        for band in bands:
            expected[band].add(number)
    assert len(index) == 9000


def test_recall_and_precision_around_the_threshold() -> None:
    rng = random.Random(1)
    near = NearDuplicates(threshold=0.8, permutations=128, shingle_words=5)
    texts = [rng.choices(WORDS, k=300) for _ in range(300)]
    assert all(near.add(near.mark(" ".join(text))) for text in texts)
    for text in texts:
        copy = edited(text, 0.01, rng)
        mine, other = (set(shingles(" ".join(words), 5)) for words in (text, copy))
        similarity = len(mine & other) / len(mine | other)
        dropped = not near.add(near.mark(" ".join(copy)))
        assert dropped or similarity < 0.9
        far = edited(text, 0.1, rng)
        assert near.add(near.mark(" ".join(far)))


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
    copied: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.rotating
def test_an_index_on_disk_answers_as_the_one_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for bands that a hundred signatures have, whose keys fill several blocks of a run."""
    monkeypatch.setattr(copies, "_BLOCK", 16)
    monkeypatch.setattr(copies, "_MERGED", 3000)
    shape, rng, former = (16, 8, 2), np.random.default_rng(0), list[np.ndarray]()
    inside, spilling = SignatureIndex(*shape), SpillingIndex(*shape, tmp_path, memory=0)
    for number in range(6000):
        values = rng.integers(0, 2**32, 16, np.uint32)
        if number % 9 == 0:
            values[:2] = number % 4  # the first band of one in nine
        if number > 3000 and number % 5 == 0:
            values = former[number % len(former)].copy()
            values[rng.integers(0, 16, number % 9)] += np.uint32(1)
        keys = inside.keys(values)
        if number % 10 == 0:
            assert spilling.equal(values, keys) == inside.equal(values, keys)
        inside.add(values, keys)
        spilling.add(values, keys)
        former.append(values)
    assert len(spilling) == len(inside) == 6000
    assert spilling.runs == 2  # of five spilled ones four are merged
    assert spilling.nbytes < inside.nbytes / 2
    assert not list(tmp_path.iterdir())


def test_prepare_makes_the_same_with_bands_on_disk(
    copied: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = with_steps(copied, NEAR)
    expected = prepare(used, tmp_path / "memory", workers=1)
    monkeypatch.setattr(copies, "MEMORY", 0)
    spilled: list[int] = []
    monkeypatch.setattr(SignatureIndex, "full", property(lambda index: len(index) >= 5))
    monkeypatch.setattr(SpillingIndex, "_spill", lambda index, spill=SpillingIndex._spill: spilled.append(spill(index)))
    made = prepare(used, tmp_path / "disk", workers=1)
    assert len(spilled) >= 5
    assert made.manifest.files == expected.manifest.files
    assert made.manifest.sources == expected.manifest.sources
