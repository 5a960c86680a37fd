"""Fill-in-the-middle: the ids of a plain reference, the share of each order, and that only seed and text decide."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrecipes.cli import app as cli
from llmrecipes.data.folder.documents import documents
from llmrecipes.data.folder.leaks import check_near_copies
from llmrecipes.data.folder.overview import random_documents, stats
from llmrecipes.data.folder.prepared import Prepared, fingerprint
from llmrecipes.data.prepare import prepare
from llmrecipes.data.sources import file_parts
from llmrecipes.data.steps.split import digest
from llmrecipes.data.tokens.infilling import PARTS, cut, restored
from llmrecipes.data.tokens.tokenizer import EOD
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.source import AnySource, Fim, make_source, make_valid_source
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer
from llmrecipes.recipe.variants.proxy import proxy
from tests.refusals import refused
from tests.unit.data_recipes import corpus, made_step, recipe

RATE, SPM = 0.6, 0.25
NEAR = made_step({"type": "near_duplicates"})


def with_fim(source: AnySource, tokenizer: HuggingFaceTokenizer | None = None, **data: Any) -> Recipe:
    used = recipe(source, tokenizer=tokenizer, split=(90.0, 10.0, 0.0))
    fim = {"fim": Fim(spm_rate=SPM), "steps": (NEAR,)}
    return used.model_copy(update={"data": used.data.model_copy(update=fim | data)})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> AnySource:
    made = corpus(tmp_path_factory.mktemp("fim") / "code", documents=400, word="def <fim_middle>")
    return made.model_copy(update={"fim_rate": RATE})


@pytest.fixture(scope="module")
def prepared(source: AnySource, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(with_fim(source), tmp_path_factory.mktemp("data"), workers=1)


def reference(text: str, prepared: Prepared) -> list[int]:
    """Megatron-LM's `permute` of its fork for StarCoder, with our choices in place of its random numbers."""
    tokenizer, ids = prepared.tokenizer(), prepared.manifest.tokenizer.fim
    where = cut(len(text), digest(text.encode()), RATE, SPM, Fim().seed)
    if where is None:
        return tokenizer.encode(text)
    bounds = [0, where.first, where.second, len(text)]
    prefix, middle, suffix = (tokenizer.encode(text[a:b]) for a, b in pairwise(bounds))
    if where.spm:
        return [ids["prefix"], ids["suffix"], *suffix, ids["middle"], *prefix, *middle]
    return [ids["prefix"], *prefix, ids["suffix"], *suffix, ids["middle"], *middle]


def test_ids_are_those_of_a_plain_reference(source: AnySource, prepared: Prepared) -> None:
    texts = {digest(text.encode()): text for text in (p.read_text("utf-8") for p in Path(source.location).iterdir())}
    ids, tokenizer = prepared.manifest.tokenizer.fim, prepared.tokenizer()
    assert list(ids) == list(PARTS)
    rearranged = 0
    for split in ("train", "valid"):
        hashes = (prepared.path / f"00-{split}.sha256").read_bytes()
        for number, tokens in enumerate(documents(prepared, split)):
            text = texts[hashes[32 * number : 32 * number + 32]]
            expected = reference(text, prepared) if split == "train" else tokenizer.encode(text)
            assert tokens == expected
            assert tokenizer.decode(restored(tokens, ids)) == text  # also with the names of special tokens in it
            rearranged += tokens[0] == ids["prefix"]
    counted = prepared.manifest.sources[0].changed
    assert rearranged == counted["fim_psm"] + counted["fim_spm"]
    assert {step.step: step.changed for step in stats(prepared).sources[0].dropped}["fim_spm"] == counted["fim_spm"]


def test_choices_are_uniform_and_follow_seed_and_text() -> None:
    count, length = 20_000, 99
    cuts = [cut(length, digest(str(n).encode()), RATE, SPM, 1) for n in range(count)]
    chosen = [cut for cut in cuts if cut is not None]
    assert len(chosen) / count == pytest.approx(RATE, abs=0.02)
    assert sum(each.spm for each in chosen) / len(chosen) == pytest.approx(SPM, abs=0.02)
    middles = np.array([each.second - each.first for each in chosen])
    assert middles.mean() == pytest.approx(length / 3, rel=0.03)  # of two uniform places
    assert {0, length} <= {each.first for each in chosen} | {each.second for each in chosen}
    assert cuts == [cut(length, digest(str(n).encode()), RATE, SPM, 1) for n in range(count)]
    assert cuts != [cut(length, digest(str(n).encode()), RATE, SPM, 2) for n in range(count)]
    assert cut(0, digest(b""), 1.0, 0.0, 1) is not None
    assert cut(5, digest(b""), 0.0, 1.0, 1) is None


def test_shards_and_workers_make_the_same(
    source: AnySource, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", 20_000)
    by_shards = prepare(with_fim(source), tmp_path, workers=2)
    assert by_shards.manifest.files == prepared.manifest.files
    assert by_shards.manifest.sources == prepared.manifest.sources


def test_near_copies_are_compared_as_the_text_is(tmp_path: Path) -> None:
    """Pairs just below what the step drops are as similar as without fill-in-the-middle."""
    rng, texts = random.Random(1), list[str]()
    for _ in range(60):
        words = [f"w{rng.randrange(10**6)}" for _ in range(200)]
        other = [f"x{rng.randrange(10**6)}" if place % 28 == 9 else word for place, word in enumerate(words)]
        texts += [" ".join(words), " ".join(other)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    similar = []
    for rate in (0.0, 1.0):
        source = make_source(type="jsonl", path=str(tmp_path / "a.jsonl"), fim_rate=rate)
        used = with_fim(source, fim=Fim())
        checked = check_near_copies(prepare(used, tmp_path / "data", workers=1))
        assert checked is not None
        similar.append((checked.highest, checked.above, checked.held_out))
    assert similar[0] == similar[1]
    assert similar[0][0] > 0.6


def test_documents_are_shown_with_their_order(
    source: AnySource, prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = list(random_documents(prepared, "train", 400, seed=0))
    assert {document.fim for document in shown} == {"fim_psm", "fim_spm", None}
    for document in shown:
        assert (document.fim is not None) == document.text.startswith("<fim_prefix>")
        assert all(token.loss for token in document.tokens)
    file = tmp_path / "t.yaml"
    file.write_text(json.dumps(with_fim(source).model_dump(mode="json", exclude_defaults=True)))
    assert cli.run(["data", "show", str(file), "--documents", "20", "--data-dir", str(prepared.path.parent)]) == 0
    printed = capsys.readouterr().out
    assert "prefix, suffix, middle" in printed
    assert "|<fim_suffix>|" in printed


def test_held_out_sets_have_a_rate_of_their_own(source: AnySource, tmp_path: Path) -> None:
    held = corpus(tmp_path / "held", 100, seed=9, word="held")
    sets = tuple(
        make_valid_source(type="text", path=held.location, label=label, fim_rate=rate)
        for label, rate in (("plain", 0.0), ("infill", 1.0))
    )
    made = prepare(with_fim(source, valid_sources=sets), tmp_path / "data", workers=1)
    counts = made.manifest.valid_sources
    assert counts["infill"].tokens > counts["plain"].tokens + 3 * counts["plain"].documents
    assert counts["infill"].bytes == counts["plain"].bytes


def test_a_tokenizer_of_others_has_the_tokens(source: AnySource, prepared: Prepared, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    def saved(name: str, *tokens: str) -> HuggingFaceTokenizer:
        backend = PreTrainedTokenizerFast(tokenizer_file=str(plain / "tokenizer.json"), eos_token=EOD)
        backend.add_tokens(list(tokens))  # as Qwen's are: no special tokens, so that text could have them
        backend.save_pretrained(tmp_path / name)
        return HuggingFaceTokenizer(type="huggingface", path=str(tmp_path / name))

    plain = prepare(recipe(source.model_copy(update={"fim_rate": 0.0}), vocab_size=500), tmp_path / "plain").path
    others = {f"{part}_token": f"<|fim_{part}|>" for part in PARTS}
    section = saved("with", *others.values())
    with refused("data.fim.prefix_token", rule=("<|fim_middle|>", "'<fim_prefix>'")):
        prepare(with_fim(source, section), tmp_path / "data", workers=1)
    named = with_fim(source, section, fim=Fim.model_validate({"spm_rate": SPM, **others}))
    made = prepare(named, tmp_path / "data", workers=1)
    counts = prepared.manifest.sources[0].changed
    assert made.manifest.sources[0].changed == counts
    assert made.tokenizer().encode("<|fim_prefix|>")[0] != made.manifest.tokenizer.fim["prefix"]
    with refused("data.fim.prefix_token", rule="'<fim_prefix>'"):
        prepare(with_fim(source, saved("without")), tmp_path / "data", workers=1)
    assert sorted(path.name for path in (tmp_path / "data").iterdir() if path.is_dir()) == [made.path.name]


def test_without_a_rate_prepared_data_keeps_its_name(source: AnySource) -> None:
    plain = recipe(source.model_copy(update={"fim_rate": 0.0}))
    assert fingerprint(plain) != fingerprint(recipe(source))
    seeded = recipe(source).data.model_copy(update={"fim": Fim(seed=5)})
    assert fingerprint(recipe(source).model_copy(update={"data": seeded})) != fingerprint(recipe(source))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (["data.fim.spm_rate=0.1"], "data.fim"),
        (["data.sources=[{type: docstrings, fim_rate: 0.5}]", "data.chat={}"], "data.sources.0.fim_rate"),
        (["data.sources=[{type: stdlib, fim_rate: 0.5}]", "data.fim.middle_token=<fim_prefix>"], "data.fim"),
        (["data.sources=[{type: stdlib, fim_rate: 1.5}]"], "data.sources.0.fim_rate"),
    ],
)
def test_contradictions_are_refused(changes: list[str], where: str) -> None:
    with refused(where):
        load("gpt-tiny", changes)


def test_a_rehearsal_of_a_hub_dataset_has_settings_that_fit() -> None:
    changes = ["data.sources=[{type: hub, path: a/b, fim_rate: 0.5}]", "data.fim.spm_rate=0.1"]
    rehearsed = proxy(load("gpt-tiny", changes).recipe)
    assert rehearsed.data.fim == Fim()
    Recipe.model_validate(rehearsed.model_dump())
