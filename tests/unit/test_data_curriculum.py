"""A curriculum sorts documents within its windows, and is a function of the recipe."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes.data import parts
from llmrecipes.data.curriculum import ordered as ordered_documents
from llmrecipes.data.dataset import build
from llmrecipes.data.manifest import stem
from llmrecipes.data.prepare import Prepared, prepare
from llmrecipes.data.prepared import drawn_samples
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.source import Curriculum
from tests.refusals import refused
from tests.unit.data_recipes import corpus, recipe


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Prepared]:
    """Two sources of different documents, some of which repeat themselves."""
    root = tmp_path_factory.mktemp("curriculum")
    every = [corpus(root / name, 150, seed=seed, word=name) for seed, name in enumerate(("one", "two"))]
    for number in range(0, 150, 3):
        (root / "one" / f"r{number}.txt").write_text(f"{number} again " * number + "\n")
    made = recipe(*every, train_iters=30)
    return made, prepare(made, root / "data", workers=1)


def ordered(plain: tuple[Recipe, Prepared], **section: Any) -> tuple[Recipe, Prepared]:
    recipe, prepared = plain
    made = recipe.model_copy(update={"data": recipe.data.model_copy(update={"curriculum": Curriculum(**section)})})
    return made, prepare(made, prepared.path.parent, workers=1)


def samples(recipe: Recipe, prepared: Prepared) -> list[tuple[int, list[int]]]:
    """Source and tokens of each sample that a run draws."""
    dataset: Any = build(recipe, prepared, "train")
    number = drawn_samples(recipe, "train")
    sources = dataset.dataset_index[:number].tolist()
    return [(sources[n], dataset[n]["tokens"].tolist()) for n in range(number)]


def by_hand(prepared: Prepared, source: int, drawn: int, section: Curriculum, seed: int) -> list[list[int]]:
    """The ordered samples of a source: its documents, pass by pass and window by window, cut into 64 tokens."""
    tokenizer, tokens = prepared.tokenizer(), IndexedDataset(str(prepared.path / stem(source, "train")))
    documents = [tokens[n].tolist() for n in range(len(tokens))]
    texts = [tokenizer.decode(ids[:-1]).encode() for ids in documents]
    ratios = [len(zlib.compress(text, 1, wbits=-15)) / len(text) for text in texts]
    scores = [len(ids) for ids in documents] if section.score == "length" else ratios
    sign = 1 if section.order == "ascending" else -1
    stream: list[int] = []
    for turn in range(9):
        left = round(drawn * section.share) * 64 + 1 - len(stream)
        if left <= 0:
            break
        size = min(left, sum(map(len, documents)))
        windows: list[list[int]] = [[]]
        done = 0
        for number in np.random.default_rng((seed, turn)).permutation(len(documents)).tolist():
            if done >= size:
                break
            windows[-1].append(number)
            done += len(documents[number])
            while len(windows) < section.windows and done >= size * len(windows) // section.windows:
                windows.append([])
        for window in windows:
            for number in sorted(window, key=lambda each: sign * scores[each]):
                stream += documents[number]
    return [stream[start : start + 64] for start in range(0, round(drawn * section.share) * 64, 64)]


@pytest.mark.parametrize(
    "section",
    [{"score": "length"}, {"score": "compression_ratio", "order": "descending", "windows": 4, "share": 0.25}],
    ids=["length", "compression ratio"],
)
def test_documents_come_by_their_difficulty(plain: tuple[Recipe, Prepared], section: dict[str, Any]) -> None:
    chosen = ordered(plain, **section)
    before, after = samples(*plain), samples(*chosen)
    assert [source for source, _ in before] == [source for source, _ in after]
    for source in (0, 1):
        shuffled, found = ([tokens for each, tokens in every if each == source] for every in (before, after))
        curriculum = chosen[0].data.curriculum
        assert curriculum is not None
        expected = by_hand(chosen[1], source, len(found), curriculum, chosen[0].train.seed)
        assert found[: len(expected)] == expected
        assert shuffled[: len(expected)] != expected
        dataset: Any = build(*chosen, "train")
        order = dataset.datasets[source].shuffle_index.tolist()
        assert order[: len(expected)] == list(range(len(expected)))
        assert sorted(order) == list(range(len(order)))


def test_scores_do_not_depend_on_who_prepares(
    plain: tuple[Recipe, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, alone = ordered(plain, score="compression_ratio")
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)  # several shards of each source
    together = prepare(chosen, tmp_path, tasks=2)
    for source in (0, 1):
        name = f"{stem(source, 'train')}.scores"
        assert (together.path / name).read_bytes() == (alone.path / name).read_bytes()
        assert len(np.fromfile(alone.path / name, "<f4")) == alone.manifest.sources[source].splits["train"].documents
    assert not list(alone.path.glob("*-valid.scores"))
    assert samples(chosen, together) == samples(chosen, alone)


def test_a_score_of_the_tokens_needs_no_other_tokens(plain: tuple[Recipe, Prepared]) -> None:
    assert ordered(plain, score="length")[1].path == plain[1].path
    assert ordered(plain, score="compression_ratio")[1].path != plain[1].path


def test_no_pass_has_a_document_twice() -> None:
    lengths, section = np.arange(1, 101), Curriculum(score="length", windows=3)
    made = ordered_documents(lengths, lengths, 3, 2 * lengths.sum() + 50, 7, section)
    assert made.dtype == np.int32
    for turn in made.reshape(3, 100):
        assert sorted(turn.tolist()) == list(range(100))
    assert sum(np.diff(made[:100]) < 0) == sum(np.diff(made[100:200]) < 0) == 2
    assert (made[:100] != made[100:200]).any()
    assert sum(np.diff(made[200:]) < 0) > 20, "what is behind the ordered tokens is shuffled"


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("data.curriculum.windows", "data.curriculum={score: length, windows: 1000000}"),
        ("data.curriculum.share", "data.curriculum={score: length, share: 0}"),
        ("data.curriculum.score", "data.curriculum={score: perplexity}"),
    ],
)
def test_what_does_not_go_is_refused(key: str, override: str) -> None:
    with refused(key):
        load("gpt-tiny", [override])


def test_conversations_have_no_curriculum() -> None:
    with refused("data.curriculum"):
        load("sft-tiny", ["data.curriculum={score: length}"])
