"""A curriculum sorts documents within its windows, and is a function of the recipe."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from llmrecipes.data.folder.data_manifest import stem
from llmrecipes.data.folder.prepared import drawn_samples, index_folder
from llmrecipes.data.prepare import Prepared, prepare
from llmrecipes.data.read.curriculum import ScoreWriter, ordering
from llmrecipes.data.read.curriculum import ordered as ordered_documents
from llmrecipes.data.read.dataset import build
from llmrecipes.data.sources import file_parts
from llmrecipes.data.steps.split import Split
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe, Scheduler
from llmrecipes.recipe.sections.source import Curriculum
from llmrecipes.train.changed_steps import require_accepted
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


def written(folder: Path, prepared: Prepared, seed: int = 0, split: Split = "train") -> list[list[float]]:
    """Losses of documents, drawn, as `eval --per-document` writes them; of each source."""
    writer, draw = ScoreWriter(folder, prepared, split, "runs/small", 64, 32), np.random.default_rng(seed)
    losses = [draw.random(source.splits[split].documents) for source in prepared.manifest.sources]
    for loss in np.concatenate(losses):
        writer.add(float(loss) * 7, 7)
    writer.publish()
    return [each.tolist() for each in losses]


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


def by_hand(
    prepared: Prepared, source: int, drawn: int, section: Curriculum, seed: int, losses: list[float] | None = None
) -> list[list[int]]:
    """The ordered samples of a source: its documents, pass by pass and window by window, cut into 64 tokens."""
    tokenizer, tokens = prepared.tokenizer(), IndexedDataset(str(prepared.path / stem(source, "train")))
    documents = [tokens[n].tolist() for n in range(len(tokens))]
    texts = [tokenizer.decode(ids[:-1]).encode() for ids in documents]
    ratios = [len(zlib.compress(text, 1, wbits=-15)) / len(text) for text in texts]
    scores: list[float] = [len(ids) for ids in documents] if section.score == "length" else losses or ratios
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
    [
        {"score": "length"},
        {"score": "compression_ratio", "order": "descending", "windows": 4, "share": 0.25},
        {"score": "loss", "windows": 2},
    ],
    ids=["length", "compression ratio", "loss"],
)
def test_documents_come_by_their_difficulty(
    plain: tuple[Recipe, Prepared], section: dict[str, Any], tmp_path: Path
) -> None:
    losses: list[list[float]] | None = None
    if section["score"] == "loss":
        losses = written(tmp_path / "losses", plain[1])
        section = section | {"scores": str(tmp_path / "losses")}
    chosen = ordered(plain, **section)
    before, after = samples(*plain), samples(*chosen)
    assert [source for source, _ in before] == [source for source, _ in after]
    for source in (0, 1):
        shuffled, found = ([tokens for each, tokens in every if each == source] for every in (before, after))
        curriculum = chosen[0].data.curriculum
        assert curriculum is not None
        expected = by_hand(
            chosen[1], source, len(found), curriculum, chosen[0].train.seed, losses[source] if losses else None
        )
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
    monkeypatch.setattr(file_parts, "PART_BYTES", 20_000)  # several shards of each source
    together = prepare(chosen, tmp_path, workers=2)
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
    made = ordered_documents(lengths, lengths, 3, 2 * int(lengths.sum()) + 50, 7, section)
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
        ("data.curriculum.scores", "data.curriculum={score: loss}"),
        ("data.curriculum.scores", "data.curriculum={score: length, scores: a}"),
    ],
)
def test_what_does_not_go_is_refused(key: str, override: str) -> None:
    with refused(key):
        load("gpt-tiny", [override])


def test_conversations_have_no_curriculum() -> None:
    with refused("data.curriculum"):
        load("sft-tiny", ["data.curriculum={score: length}"])


def test_another_number_of_steps_is_another_order_which_a_resumed_run_accepts(
    plain: tuple[Recipe, Prepared],
) -> None:
    constant = plain[0].model_copy(update={"scheduler": Scheduler(lr_decay_style="constant")})
    then, prepared = ordered((constant, plain[1]), score="length")
    now = then.model_copy(update={"train": then.train.model_copy(update={"train_iters": 33})})
    first, second = samples(then, prepared), samples(now, prepare(now, prepared.path.parent, workers=1))
    assert second[: len(first)] != first
    with refused("runs/a", rule=("30", "train.train_iters=30")):
        require_accepted(now, then, 5, where="runs/a", accept=False)
    require_accepted(now, then, 5, where="runs/a", accept=True)
    shuffled = (each.model_copy(update={"data": constant.data}) for each in (now, then))
    require_accepted(next(shuffled), next(shuffled), 5, where="runs/a", accept=False)


def test_losses_belong_to_texts_and_a_run_needs_their_folder_no_more(
    plain: tuple[Recipe, Prepared], tmp_path: Path
) -> None:
    recipe, prepared = plain
    section = {"score": "loss", "scores": str(tmp_path / "losses")}
    written(tmp_path / "losses", prepared)
    chosen = ordered(plain, **section)
    assert chosen[1].path == prepared.path, "losses are no part of the tokens"
    first = samples(*chosen)
    other = recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": 600})})
    again = ordered((other, prepare(other, tmp_path / "data", workers=1)), **section)
    assert again[1].path.name != prepared.path.name
    (tmp_path / "losses").rename(tmp_path / "moved")
    assert samples(*ordered(plain, **section)) == first
    written(tmp_path / "losses", prepared, seed=1)
    with refused(f"data.curriculum.scores: {tmp_path / 'losses'}"):
        ordered(plain, **section)
    moved = ordered(plain, score="loss", scores=str(tmp_path / "moved"))
    assert samples(*moved) == first
    assert ordering(moved[0].data.curriculum, index_folder(*moved)) == ordering(  # type: ignore[arg-type]
        chosen[0].data.curriculum, index_folder(*chosen)  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda folder: folder.rename(folder.with_name("else")), "data.curriculum.scores"),
        (lambda folder: (folder / "scores.json").write_text("{"), "scores.json"),
        (lambda folder: edited(folder, "train", "valid"), "data.curriculum.scores"),
        (lambda folder: edited(folder, '"format": 1', '"format": 2'), "scores.json"),
        (lambda folder: edited(folder, '"texts": "', '"texts": "0'), "data.curriculum.scores"),
        (lambda folder: edited(folder, "01.scores", "../01.scores"), "scores.json"),
        (lambda folder: (folder / "01.scores").unlink(), "01.scores"),
        (lambda folder: (folder / "01.scores").write_bytes((folder / "01.scores").read_bytes()[:-4]), "01.scores"),
        (lambda folder: (folder / "01.scores").write_bytes((folder / "00.scores").read_bytes()), "01.scores"),
        (lambda folder: not_finite(folder), "00.scores"),
    ],
)
def test_losses_of_other_data_or_damaged_ones_are_refused(
    plain: tuple[Recipe, Prepared], tmp_path: Path, change: Any, where: str
) -> None:
    folder = tmp_path / "losses"
    written(folder, plain[1])
    change(folder)
    path = f"data.curriculum.scores: {folder}" if "." in where and where.startswith("data") else str(folder / where)
    with refused(path):
        ordered(plain, score="loss", scores=str(folder))


def edited(folder: Path, before: str, after: str) -> None:
    text = (folder / "scores.json").read_text()
    assert before in text
    (folder / "scores.json").write_text(text.replace(before, after))


def not_finite(folder: Path) -> None:
    """A loss that is not a number, as another program may write it: with its hash."""
    losses = np.fromfile(folder / "00.scores", "<f4")
    before = hashlib.sha256(losses.tobytes()).hexdigest()
    losses[3] = np.nan
    losses.tofile(folder / "00.scores")
    edited(folder, before, hashlib.sha256(losses.tobytes()).hexdigest())


def test_a_writer_leaves_all_or_nothing(plain: tuple[Recipe, Prepared], tmp_path: Path) -> None:
    writer = ScoreWriter(tmp_path / "losses", plain[1], "train", "", 64, 32)
    writer.add(0.0, 0)
    with refused("--per-document"):
        writer.add(float("nan"), 3)
    with pytest.raises(ValueError, match="missing"):
        writer.publish()
    writer.discard()
    assert not list(tmp_path.iterdir())
