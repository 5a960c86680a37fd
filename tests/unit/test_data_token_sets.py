"""Sources that are tokens already: used where they are, and refused if they are damaged or another tokenizer's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from llmrecipes.data.folder.data_manifest import IDX_HEADER
from llmrecipes.data.folder.documents import documents, token_stream
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.data.preparation import token_sets
from llmrecipes.data.prepare import open_prepared, prepare
from llmrecipes.data.read.dataset import build_set
from llmrecipes.data.steps.split import SPLITS
from llmrecipes.data.tokens.tokenizer import EOD
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.source import AnySource, make_source, make_valid_source
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer
from tests.refusals import refused
from tests.unit.data_recipes import corpus, recipe


class _Sets(NamedTuple):
    source: AnySource
    tokenizer: HuggingFaceTokenizer
    ids: list[list[int]]
    other: HuggingFaceTokenizer
    text: AnySource


def _as_hugging_face(prepared: Prepared, folder: Path) -> HuggingFaceTokenizer:
    from transformers import PreTrainedTokenizerFast

    file = str(prepared.path / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, eos_token=EOD).save_pretrained(folder)
    return HuggingFaceTokenizer(type="huggingface", path=str(folder))


def _write(prefix: Path, every: list[list[list[int]]], dtype: type = np.uint16) -> AnySource:
    """Documents, each of sequences, by megatron-core."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for each in every:
        builder.add_document(np.array([token for part in each for token in part], dtype), [len(part) for part in each])
    builder.finalize(f"{prefix}.idx")
    return make_source(type="megatron", path=str(prefix))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> _Sets:
    """A set of the tokens of a prepared text, its tokenizer, and another one."""
    root = tmp_path_factory.mktemp("sets")
    text = corpus(root / "text", documents=150)
    prepared = prepare(recipe(text, split=(1.0, 0.0, 0.0)), root / "data", workers=1)
    other = prepare(recipe(corpus(root / "other", word="ähnlich", seed=7)), root / "data", workers=1)
    eod = prepared.manifest.tokenizer.eod
    ids = [[*document, eod] for document in documents(prepared, "train")]
    source = _write(root / "set", [[each] for each in ids])
    return _Sets(
        source, _as_hugging_face(prepared, root / "tokenizer"), ids, _as_hugging_face(other, root / "second"), text
    )


def _recipe(made: _Sets, *sources: AnySource) -> Recipe:
    return recipe(*sources, split=(80.0, 10.0, 10.0), tokenizer=made.tokenizer)


def _ids(prepared: Prepared) -> list[list[int]]:
    eod = prepared.manifest.tokenizer.eod
    return [[*ids, eod] for split in SPLITS for ids in documents(prepared, split)]


def test_tokens_are_used_where_they_are_and_blended_with_text(made: _Sets, tmp_path: Path) -> None:
    text = corpus(tmp_path / "more", documents=60, seed=3).model_copy(update={"weight": 3.0})
    used = _recipe(made, text, made.source)
    prepared = prepare(used, tmp_path / "data", workers=1)
    record = prepared.manifest.sources[1]
    assert record.linked and record.read == len(made.ids)
    for split in SPLITS:
        link = prepared.path / f"01-{split}.bin"
        assert link.is_symlink() and link.resolve() == Path(f"{made.source.location}.bin").resolve()
    alone = prepare(_recipe(made, made.source), tmp_path / "data", workers=1)
    assert sorted(_ids(alone)) == sorted(made.ids)
    assert all(counts.documents for counts in alone.manifest.sources[0].splits.values())
    assert prepared.verify() == sum(counts.documents for s in prepared.manifest.sources for counts in s.splits.values())

    eod = alone.manifest.tokenizer.eod
    train = [token for ids in documents(alone, "train") for token in (*ids, eod)]
    pieces = list(token_stream(alone, "train", overlap=5, size=50))
    joined = [int(token) for number, piece in enumerate(pieces) for token in (piece if not number else piece[5:])]
    assert joined == train and {len(piece) for piece in pieces[1:-1]} == {55}

    from llmrecipes.data.read.dataset import build

    samples = build(used, prepared, "train")
    assert samples is not None
    of_set = {tuple(ids[place : place + 3]) for ids in made.ids for place in range(len(ids) - 2)}
    rows = [samples[number]["tokens"].tolist() for number in range(40)]
    assert (
        3 <= sum(all(tuple(row[p : p + 3]) in of_set or eod in row[p : p + 3] for p in range(62)) for row in rows) <= 15
    )


def test_ids_of_another_type_are_written_again_and_split_alike(made: _Sets, tmp_path: Path) -> None:
    wide = _write(tmp_path / "wide", [[ids] for ids in made.ids], np.int32)
    lines: list[str] = []
    copied = prepare(_recipe(made, wide), tmp_path / "data", workers=1, progress=lines.append)
    linked = prepare(_recipe(made, made.source), tmp_path / "data", workers=1)
    assert any("int32" in line for line in lines)
    assert not (copied.path / "00-train.bin").is_symlink() and not copied.manifest.sources[0].linked
    for split in SPLITS:
        assert list(documents(copied, split)) == list(documents(linked, split))
    assert copied.manifest.held_out == linked.manifest.held_out and linked.manifest.held_out["valid"].bytes
    assert copied.manifest.sources[0].splits == linked.manifest.sources[0].splits


def test_documents_of_several_sequences_equal_ones_and_empty_ones(
    made: _Sets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_sets, "_DOCUMENTS", 7)
    monkeypatch.setattr(token_sets, "_TOKENS", 50)
    eod = made.ids[0][-1]
    parts = [[ids[:3], ids[3:10], ids[10:]] for ids in made.ids[:40]]
    source = _write(tmp_path / "parts", [*parts, [[eod]], *parts[:5]])
    prepared = prepare(_recipe(made, source), tmp_path / "data", workers=1)
    assert sorted(_ids(prepared)) == sorted(made.ids[:40])
    record = prepared.manifest.sources[0]
    assert (record.read, record.empty, record.duplicates) == (46, 1, 5)
    short = source.model_copy(update={"max_tokens": 300})
    read = prepare(_recipe(made, short), tmp_path / "data", workers=1).manifest.sources[0]
    assert 300 <= sum(counts.tokens for counts in read.splits.values()) < 300 + max(map(len, made.ids))


def _patch(name: str, offset: int, form: str, value: object) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        file = Path(f"{prefix}{name}")
        content = bytearray(file.read_bytes())
        struct.pack_into(form, content, offset % len(content), value)
        file.write_bytes(content)

    return change


def _cut(name: str, count: int) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        file = Path(f"{prefix}{name}")
        file.write_bytes(file.read_bytes()[:-count])

    return change


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (_patch(".idx", 0, "<B", 0), "set.idx"),
        (_patch(".idx", 9, "<Q", 2), "set.idx"),
        (_patch(".idx", 17, "<B", 5), "set.idx"),
        (_patch(".idx", 18, "<Q", 1 << 61), "set.idx"),
        (_patch(".idx", 26, "<Q", 0), "set.idx"),
        (_patch(".idx", IDX_HEADER.size, "<i", -5), "set.idx"),
        (_patch(".idx", IDX_HEADER.size + 4, "<i", 1 << 30), "set.idx"),
        (_patch(".idx", IDX_HEADER.size + 4 * 20 + 8, "<q", 1 << 40), "set.idx"),
        (_patch(".idx", IDX_HEADER.size + 4 * 20, "<q", -8), "set.idx"),
        (_patch(".idx", IDX_HEADER.size + 12 * 20 + 8, "<q", 1 << 40), "set.idx"),
        (_patch(".idx", -8, "<q", 3), "set.idx"),
        (_cut(".idx", 1), "set.idx"),
        (_cut(".idx", 400), "set.idx"),
        (_cut(".bin", 1), "set.bin"),
        (_cut(".bin", 2), "set.idx"),
        (lambda prefix: Path(f"{prefix}.idx").unlink(), ""),
    ],
)
def test_a_damaged_or_hostile_index_is_one_message(
    made: _Sets, tmp_path: Path, damage: Callable[[Path], None], where: str
) -> None:
    source = _write(tmp_path / "set", [[ids] for ids in made.ids[:20]])
    damage(tmp_path / "set")
    with refused(tmp_path / where if where else "data.sources"):
        opened = token_sets.open_set(source)
        list(opened.read(0, opened.documents))


def test_another_tokenizer_and_ids_outside_the_vocabulary_are_refused(made: _Sets, tmp_path: Path) -> None:
    with refused("data.sources[0]", rule="data.tokenizer"):
        prepare(recipe(made.source, tokenizer=made.other), tmp_path / "data", workers=1)
    wrong = [*made.ids[:30], [5, 600, 7]]
    with refused(tmp_path / "high.bin", rule="600"):
        prepare(_recipe(made, _write(tmp_path / "high", [[ids] for ids in wrong])), tmp_path / "data", workers=1)
    assert not [each for each in (tmp_path / "data").iterdir() if each.is_dir()]

    unmarked, lines = _write(tmp_path / "unmarked", [[ids[:-1]] for ids in made.ids]), list[str]()
    prepare(_recipe(made, unmarked), tmp_path / "data", workers=1, progress=lines.append)
    assert any("--append-eod" in line for line in lines)


def _holding_out(used: Recipe, held: AnySource) -> Recipe:
    label = make_valid_source(type="megatron", path=held.location, label="own")
    return used.model_copy(update={"data": used.data.model_copy(update={"valid_sources": (label,)})})


def test_documents_of_a_held_out_set_of_tokens_are_not_trained_on(made: _Sets, tmp_path: Path) -> None:
    held = made.ids[10:30]
    wide = _write(tmp_path / "held", [*([ids] for ids in held), [[]]], np.int32)  # the folder has uint16
    used = _holding_out(_recipe(made, made.source), wide)
    prepared = prepare(used, tmp_path / "data", workers=1)
    record, counts = prepared.manifest.sources[0], prepared.manifest.valid_sources["own"]
    assert record.steps == {"valid_sources": 20} and record.rules == {"valid_sources.own": 20}
    assert sorted(_ids(prepared)) == sorted(ids for ids in made.ids if ids not in held)
    tokenizer = prepared.tokenizer()
    assert (counts.documents, counts.tokens) == (20, sum(map(len, held)))
    assert counts.bytes == sum(len(tokenizer.decode(ids[:-1]).encode()) for ids in held)
    stored = build_set(used, prepared, "own").dataset
    assert [stored[number].tolist() for number in range(20)] == held
    assert prepared.verify() == len(made.ids) - 20

    strange = _write(tmp_path / "strange", [[list(range(300, 420))]] * 3)
    with refused("data.valid_sources[0]"):
        prepare(_holding_out(used, strange), tmp_path / "data", workers=1)


def test_a_set_that_changes_later_is_refused(made: _Sets, tmp_path: Path) -> None:
    source = _write(tmp_path / "set", [[ids] for ids in made.ids])
    used = _recipe(made, source)
    prepared = prepare(used, tmp_path / "data", workers=1)
    stored = tmp_path / "set.bin"
    content = bytearray(stored.read_bytes())
    content[0] ^= 1
    stored.write_bytes(content)
    with refused(prepared.path / "00-train.bin"):
        prepared.check(prepared.tokens("train"), lambda line: None)
    stored.unlink()
    with refused(prepared.path / "00-test.bin"):
        open_prepared(used, tmp_path / "data")


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"tokenizer": {"type": "bpe"}}, "data.tokenizer.type"),
        ({"steps": [{"type": "gopher"}]}, "data.steps.0.type"),
        ({"min_characters": 10}, "data.min_characters"),
        ({"curriculum": {"score": "compression_ratio"}}, "data.curriculum.score"),
        ({"valid_sources": [{"type": "stdlib", "label": "code"}]}, "data.valid_sources.0.type"),
        (
            {
                "valid_sources": [{"type": "megatron", "path": "a", "label": "code"}],
                "sources": [{"type": "megatron", "path": "b"}, {"type": "stdlib"}],
            },
            "data.valid_sources.0.type",
        ),
        ({"valid_sources": [{"type": "megatron", "path": "a.idx", "label": "code"}]}, "data.valid_sources.0.path"),
        ({"sources": [{"type": "megatron", "path": "a.bin"}]}, "data.sources.0.path"),
        ({"chat": {}}, "data.sources.0.type"),
    ],
)
def test_what_needs_text_is_refused(section: dict[str, object], where: str) -> None:
    from llmrecipes.recipe.load import load
    from llmrecipes.recipe.rules.recipe_rules import check

    loaded = load("gpt-tiny", ["data.tokenizer={type: huggingface, path: t}"]).recipe
    of_set = {"sources": [{"type": "megatron", "path": "a"}]}
    values = loaded.model_dump(mode="json")
    values["data"] = {**values["data"], **of_set, **section}
    problems = [problem.key for problem in check(Recipe.model_validate(values))]
    assert where in problems
    held_out = [{"type": "megatron", "path": "b", "label": "code"}]
    steps = [{"type": "balance"}]
    values["data"] = {**loaded.model_dump(mode="json")["data"], **of_set, "steps": steps, "valid_sources": held_out}
    assert not check(Recipe.model_validate(values))
