"""Held-out sets: their tokens, what is kept out of training, the valid split by source, their losses and curves."""

from __future__ import annotations

import json
import random
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmrecipes.data.folder.documents import text_ids
from llmrecipes.data.folder.prepared import Prepared, fingerprint, held_out_text, index_folder
from llmrecipes.data.preparation import corpus as corpus_module
from llmrecipes.data.preparation.valid_sets import bits_per_byte
from llmrecipes.data.prepare import prepare
from llmrecipes.data.read.by_source import HeldOutPart, WithSource, held_out_parts, of_source, with_source
from llmrecipes.data.read.dataset import ConversationDataset, build, build_set, unpacked
from llmrecipes.data.sources.sources import documents
from llmrecipes.engine.base import World
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.source import LABEL, AnySource, make_source, make_valid_source, source_names
from llmrecipes.tracking.events import EvalMetrics, source_metrics
from llmrecipes.tracking.jsonl import parse, record
from llmrecipes.tracking.mlflow.sender import entities
from llmrecipes.tracking.progress import eval_line
from llmrecipes.train.evaluations import SPLIT, HeldOutSet, held_out_metrics
from llmrecipes.train.loaders import DataLoaders, open_loaders
from tests.refusals import refused
from tests.unit.data_recipes import corpus, made_step, recipe

WORDS = [f"word{n}" for n in range(500)]


def rows(file: Path, texts: list[str]) -> str:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def with_sets(source: AnySource, *sets: dict[str, Any], steps: tuple[dict[str, Any], ...] = ()) -> Recipe:
    used = recipe(source)
    update = {
        "valid_sources": tuple(make_valid_source(**each) for each in sets),
        "steps": tuple(made_step(step) for step in steps),
    }
    return used.model_copy(update={"data": used.data.model_copy(update=update)})


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = random.Random(5)
    return [" ".join(rng.choices(WORDS, k=120)) for _ in range(200)]


@pytest.fixture(scope="module")
def made(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Prepared]:
    """Training text has 10 documents of the one set in other letters, and near-copies of 5 of the other."""
    folder = tmp_path_factory.mktemp("sets")
    near = [text.replace(text.split()[60], "another") for text in texts[100:105]]
    training = [*texts[:80], *(text.upper() for text in texts[80:90]), *near]
    sets = (
        {"type": "jsonl", "path": rows(folder / "equal.jsonl", ["", *texts[80:100]]), "label": "equal"},
        {"type": "jsonl", "path": rows(folder / "near.jsonl", texts[100:140]), "label": "near", "max_tokens": 2000},
    )
    source = make_source(type="jsonl", path=rows(folder / "train.jsonl", training))
    used = with_sets(source, *sets, steps=({"type": "near_duplicates", "threshold": 0.7},))
    return used, prepare(used, folder / "data", workers=1)


def test_documents_of_the_sets_are_not_trained_on(made: tuple[Recipe, Prepared]) -> None:
    source = made[1].manifest.sources[0]
    assert source.steps == {"valid_sources": 15, "near_duplicates": 0}
    assert source.rules == {"valid_sources.equal": 10, "valid_sources.near": 5}
    assert sum(counts.documents for counts in source.splits.values()) == 80
    assert made[1].verify() == 80


def test_a_set_is_written_as_it_is(made: tuple[Recipe, Prepared], texts: list[str]) -> None:
    """Up to its `max_tokens`, apart from the valid split, and in the listing of checked files."""
    used, prepared = made
    sets = prepared.manifest.valid_sources
    assert list(sets) == ["equal", "near"] and sets["equal"].documents == 20
    assert sets["equal"].bytes == sum(len(text) for text in texts[80:100])
    assert 2000 <= sets["near"].tokens < 2000 + sets["near"].tokens / sets["near"].documents * 2
    samples = build_set(used, prepared, "equal")
    dataset = samples.dataset
    eod, tokenizer = prepared.manifest.tokenizer.eod, prepared.tokenizer()
    assert [tokenizer.decode(text_ids(dataset[n], eod)) for n in range(20)] == texts[80:100]
    assert len(samples) >= used.train.eval_iters * used.train.global_batch_size
    assert {"valid-equal.bin", "valid-near.idx", "valid-near.sha256"} <= set(prepared.manifest.files)
    assert all(text.encode() not in held_out_text(prepared) for text in texts[80:140])
    assert bits_per_byte(np.log(2), sets["equal"]) == sets["equal"].tokens / sets["equal"].bytes
    valid, again = build(used, prepared, "valid"), build_set(used, prepared, "near")
    assert valid is not None and not np.array_equal(valid[0]["tokens"], again[0]["tokens"])


@pytest.mark.rotating
def test_the_number_of_processes_changes_nothing(
    made: tuple[Recipe, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_ALONE", 1)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 8192)
    files = prepare(made[0], tmp_path, workers=2).manifest.files
    assert {n: f.sha256 for n, f in files.items()} == {n: f.sha256 for n, f in made[1].manifest.files.items()}


def test_the_fingerprint_has_the_sets(made: tuple[Recipe, Prepared]) -> None:
    used = made[0]
    data = used.data.model_dump(mode="json")
    without = Recipe.model_validate(used.model_dump() | {"data": data | {"valid_sources": []}})
    assert len({fingerprint(used), fingerprint(without)}) == 2
    assert "valid_sources" not in prepared_content(without) and "valid_sources" in prepared_content(used)


def prepared_content(of: Recipe) -> dict[str, object]:
    from llmrecipes.data.folder.prepared import content

    return content(of)


@pytest.mark.parametrize(
    ("recipe_name", "sets", "where"),
    [
        (
            "gpt-tiny",
            "[{type: text, path: a, label: x}, {type: text, path: b, label: x}]",
            "data.valid_sources.1.label",
        ),
        ("gpt-tiny", "[{type: text, path: a, label: x, weight: 2}]", "data.valid_sources.0.weight"),
        ("gpt-tiny", "[{type: text, path: a, label: A/b}]", "data.valid_sources.0.label"),
        ("gpt-tiny", "[{type: text, label: x}]", "data.valid_sources.0.path"),
        ("gpt-tiny", "[{type: text, path: a}]", "data.valid_sources.0.label"),
        ("sft-tiny", "[{type: stdlib, label: code}]", "data.valid_sources"),
    ],
)
def test_sets_that_cannot_be_meant_are_refused(recipe_name: str, sets: str, where: str) -> None:
    with refused(where):
        load(recipe_name, [f"data.valid_sources={sets}"])


@pytest.mark.parametrize(("content", "where"), [(None, "data.valid_sources"), (["too short"], "data.valid_sources[0]")])
def test_a_set_without_a_sequence_is_refused(content: list[str] | None, where: str, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    if content:
        rows(file, content)
    train = make_source(
        type="jsonl", path=rows(tmp_path / "train.jsonl", [f"{' '.join(WORDS)} {n}" for n in range(40)])
    )
    with refused(where, rule=() if content else "data.valid_sources[].path"):
        prepare(with_sets(train, {"type": "jsonl", "path": str(file), "label": "x"}), tmp_path / "data", workers=1)
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]


class Blend(NamedTuple):
    """Of two sources, whose documents have a word each, with three of four samples from the first."""

    recipe: Recipe
    prepared: Prepared

    def words(self, sample: dict[str, Any]) -> set[str]:
        text = self.prepared.tokenizer().decode(sample["tokens"].tolist())
        return {word for word in ("alpha", "beta") if word in text}


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Blend:
    folder = tmp_path_factory.mktemp("blend")
    large = corpus(folder / "Large set", 120, 1, "alpha").model_copy(update={"weight": 3.0})
    small = corpus(folder / "small", 40, 2, "beta").model_copy(update={"label": "rare"})
    plain = recipe(large, small, split=(60.0, 30.0, 10.0))
    update = {
        "data": plain.data.model_copy(update={"multiple_validation_sets": True, "num_workers": 0}),
        "tracking": plain.tracking.model_copy(update={"loss_by_source": True}),
    }
    used = plain.model_copy(update=update)
    prepared = prepare(used, folder / "data", workers=1)
    unnamed = small.model_copy(update={"label": None})
    without = plain.model_copy(update={"data": plain.data.model_copy(update={"sources": (large, unnamed)})})
    # Neither names nor curves change what is prepared.
    assert fingerprint(without) == fingerprint(used) and index_folder(without, prepared) == index_folder(used, prepared)
    return Blend(used, prepared)


def test_the_valid_split_of_each_source_is_a_set(blend: Blend) -> None:
    used, prepared = blend
    valid = build(used, prepared, "valid")
    assert valid is not None
    parts = held_out_parts(used, prepared, valid)
    assert list(parts) == ["large-set", "rare"]
    batch, most = used.train.global_batch_size, used.train.eval_iters
    for (name, part), word, place in zip(parts.items(), ("alpha", "beta"), (0, 1), strict=True):
        distinct = len(valid.datasets[place])  # type: ignore[union-attr]
        assert len(part) == part.batches * batch and part.batches == max(1, min(most, distinct // batch)), name
        assert [blend.words(part[number]) for number in range(len(part))] == [{word}] * len(part)
        if distinct >= batch:
            assert len({tuple(part[number]["tokens"].tolist()) for number in range(len(part))}) == len(part)
    few = HeldOutPart([{"n": 0}, {"n": 1}, {"n": 2}], batch=4, batches=2)  # type: ignore[arg-type]
    assert [each["n"] for each in few] == [0, 1, 2, 0]  # type: ignore[attr-defined]


def test_conversations_of_a_source_are_spread_over_its_lengths() -> None:
    both = ConversationDataset([], [unpacked(4), unpacked(10)], np.zeros((3, 2), np.int64), 8, 0)
    part = of_source(both, 1, 4)
    assert isinstance(part, ConversationDataset) and part.order.tolist() == [[1, 0], [1, 2], [1, 5], [1, 7]]
    assert len(of_source(both, 0, 9)) == 4 and len(both) == 3  # type: ignore[arg-type]


def test_a_training_sample_has_its_source(blend: Blend) -> None:
    used, prepared = blend
    train = build(used, prepared, "train")
    assert train is not None
    samples = with_source(train, used, prepared)
    numbers = [int(samples[number]["source"]) for number in range(40)]
    assert [blend.words(samples[number]) for number in range(40)] == [{("alpha", "beta")[each]} for each in numbers]
    assert 9 <= sum(numbers) <= 11 and len(samples) == len(train)
    # A source without training text is not in the blend; one source is no blend.
    other = WithSource([{"dataset_id": 1}, {}], [4, 7])  # type: ignore[arg-type]
    assert [int(other[number]["source"]) for number in (0, 1)] == [7, 4]


def test_loaders_have_the_sets_of_sources(blend: Blend) -> None:
    used, prepared = blend
    loaders = open_loaders(used, prepared, World(0, 1, 0, 1, True), pin_memory=False)
    assert list(loaders.valid_sources) == list(loaders.eval_iters) == ["large-set", "rare"]
    counts = prepared.manifest.sources[1].splits["valid"]
    assert loaders.bits_per_byte_of("rare", np.log(2)) == pytest.approx(counts.tokens / counts.bytes)
    with closing(loaders.train(0)) as batches:
        assert next(batches)["source"].shape == (used.layout.micro_batch_size,)
    unknown = used.model_copy(update={"train": used.train.model_copy(update={"monitor": "short"})})
    with refused("train.monitor"):
        open_loaders(unknown, prepared, World(0, 1, 0, 1, True), pin_memory=False)
    batch = next(iter(loaders.valid_sources["rare"]()))
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        ("corpora/Web/*.jsonl", {}, "web"),
        ("s3://corpora/c4.en/", {}, "c4-en"),
        ("held/code.v2.jsonl.gz", {}, "code-v2"),
        ("a.jsonl", {"label_key": "l", "label_value": "de"}, "a-de"),
        ("allenai/c4", {"type": "hub", "name": "en"}, "c4-en"),
        ("*.jsonl", {}, "jsonl"),
        (None, {"type": "stdlib"}, "stdlib"),
        ("a.jsonl", {"label": "my_name"}, "my_name"),
        ("x" * 50, {}, "x" * 40),
    ],
)
def test_a_source_is_named_by_its_path(path: str | None, more: dict[str, Any], name: str) -> None:
    source = make_source(**{"type": "jsonl", "path": path, **more})
    assert source_names((source,)) == (name,)
    assert re.fullmatch(LABEL, name)


SAME = "data.sources=[{type: text, path: a/web}, {type: text, path: b/web}]"


@pytest.mark.parametrize(
    ("name", "overrides", "where"),
    [
        ("gpt-tiny", [SAME, "data.multiple_validation_sets=true"], "data.sources.0.label"),
        ("gpt-tiny", [SAME, "tracking.loss_by_source=true"], "data.sources.1.label"),
        ("gpt-tiny", ["data.sources=[{type: stdlib, label: x}, {type: machine, label: x}]"], "data.sources.1.label"),
        (
            "gpt-tiny",
            ["data.sources=[{type: stdlib, label: x}]", "data.valid_sources=[{type: text, path: a, label: x}]"],
            "data.sources.0.label",
        ),
        (
            "gpt-tiny",
            ["data.split=[1, 0, 1]", "data.multiple_validation_sets=true"],
            "data.multiple_validation_sets",
        ),
        ("dpo-tiny", ["tracking.loss_by_source=true"], "tracking.loss_by_source"),
    ],
)
def test_curves_by_source_that_cannot_be_are_refused(name: str, overrides: list[str], where: str) -> None:
    with refused(where):
        load(name, overrides)
    assert load("gpt-tiny", [SAME])  # no curve needs the names


def test_each_set_has_a_curve() -> None:
    loaders = DataLoaders(
        train=lambda *_, **__: iter(()),  # type: ignore[arg-type]
        valid=None,
        bits_per_byte=lambda loss: loss / 2,
        valid_sources={"code": lambda: iter(()), "prose": lambda: iter(())},
        bits_per_byte_of=lambda label, loss: loss * {"code": 2, "prose": 3}[label],
    )
    assert loaders.evaluates
    losses = {SPLIT: HeldOutSet(4.0, 0.5), "code": HeldOutSet(1.0, 0.75), "prose": HeldOutSet(2.0, 0.25)}
    metrics = held_out_metrics(losses, loaders)
    assert metrics == {
        "valid_loss": 4.0,
        "valid_bits_per_byte": 2.0,
        "valid_rewards": None,
        "valid_source_loss": {"code": 1.0, "prose": 2.0},
        "valid_source_bits_per_byte": {"code": 2.0, "prose": 6.0},
        "valid_token_accuracy": 0.5,
        "valid_source_token_accuracy": {"code": 0.75, "prose": 0.25},
    }
    # Without a valid split the first set is the validation loss, which searches and reports look at.
    first = {"valid_loss": 1.0, "valid_token_accuracy": 0.75}
    assert held_out_metrics({name: losses[name] for name in ("code", "prose")}, loaders) == metrics | first
    without = held_out_metrics({SPLIT: HeldOutSet(4.0, None), "code": HeldOutSet(1.0, None)}, loaders)
    assert without["valid_token_accuracy"] is None and without["valid_source_token_accuracy"] is None
    event = EvalMetrics(step=3, consumed_samples=1, consumed_tokens=1, eval_seconds=1.0, **metrics)
    values = parse(json.dumps(record(event)).encode())
    assert values is not None and values["valid_source_loss"] == {"code": 1.0, "prose": 2.0}
    assert source_metrics(values)["valid_source_bits_per_byte/prose"] == 6.0
    points = {metric.key: metric.value for metric in entities(values)[0]}
    assert (points["valid/valid_loss"], points["valid_source_loss/code"]) == (4.0, 1.0)
    assert (points["valid/valid_token_accuracy"], points["valid_source_token_accuracy/code"]) == (0.5, 0.75)
    assert "code 1.0000  prose 2.0000" in eval_line(event, 9)
    many = replace(event, valid_source_loss={f"s{number}": 1.0 for number in range(200)})
    assert "s7 1.0000  and 192 more" in eval_line(many, 9)
    conversations = held_out_metrics(losses, replace(loaders, bits_per_byte=None))
    assert conversations["valid_source_bits_per_byte"] is None and conversations["valid_source_loss"]


@pytest.mark.parametrize(("row", "key"), [({"body": "a"}, "text"), ({"text": 1}, "text"), ({"text": "a"}, "body")])
def test_a_column_of_a_set_is_named_by_its_own_key(row: dict[str, Any], key: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    where = {"type": "jsonl", "path": str(tmp_path / "a.jsonl"), "text_key": key}
    for source, name in (
        (make_valid_source(**where, label="a"), "data.valid_sources[].text_key"),
        (make_source(**where), "data.sources[].text_key"),
    ):
        with refused(f"{tmp_path / 'a.jsonl'}:1", rule=name):
            list(documents(source))
