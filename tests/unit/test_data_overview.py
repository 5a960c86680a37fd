"""`llmrecipes data`: documents as the loss sees them, and figures that add up to those of the manifest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from llmrecipes.cli import app as cli
from llmrecipes.data.folder import card, overview
from llmrecipes.data.folder.overview import ShownDocument, random_documents, stats
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.data.prepare import prepare
from llmrecipes.data.steps.split import SPLITS, Split
from llmrecipes.recipe.schema import Chat, Recipe
from llmrecipes.recipe.sections.source import make_source
from tests.refusals import refused, require_message
from tests.unit.data_recipes import corpus, recipe
from tests.unit.test_data_steps import with_steps

STEPS = ({"type": "length", "min_characters": 100, "max_characters": 350}, {"type": "personal_data"})


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    source = corpus(tmp_path_factory.mktemp("overview") / "text", word="a@example.org")
    return with_steps(source, *STEPS)


@pytest.fixture(scope="module")
def prepared(used: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(used, tmp_path_factory.mktemp("data"), workers=1)


def test_a_document_is_shown_as_it_was_written(prepared: Prepared) -> None:
    shown = list(random_documents(prepared, "train", 5, seed=1))
    assert len({document.number for document in shown}) == 5
    for document in shown:
        assert "|||EMAIL_ADDRESS|||" in document.text
        assert "a@example.org" not in document.text
        assert all(token.loss for token in document.tokens)
        assert [token.end for token in document.tokens] == [False] * (len(document.tokens) - 1) + [True]
    assert shown == list(random_documents(prepared, "train", 5, seed=1))
    assert shown != list(random_documents(prepared, "train", 5, seed=2))
    every = prepared.manifest.counts("valid").documents
    assert [document.number for document in random_documents(prepared, "valid", 999, seed=0)] == list(range(every))


def test_of_a_conversation_the_answers_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": [{"role": r, "content": f"{r} says {n}"} for r in ("user", "assistant")]} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = recipe(make_source(type="jsonl", path=str(tmp_path / "chat.jsonl")))
    chat = plain.model_copy(update={"data": plain.data.model_copy(update={"chat": Chat()})})
    folder = prepare(chat, tmp_path / "data", workers=1)
    counts = folder.manifest.chat
    assert counts is not None
    shown = [each for split in SPLITS for each in _all(folder, split)]
    assert sum(token.loss for document in shown for token in document.tokens) == counts.sources[0].answer_tokens
    for document in shown:
        counted = "".join(token.text for token in document.tokens if token.loss)
        assert "assistant says" in counted
        assert "user says" not in counted
        assert "user says" in document.text
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(chat.model_dump(mode="json", exclude_defaults=True)))
    command = ["data", "show", str(tmp_path / "t.yaml"), "--documents", "2", "--data-dir", str(tmp_path / "data")]
    assert cli.run(command) == 0
    listed = capsys.readouterr().out
    assert listed.count("\n  loss    ") == listed.count("\n  no loss ") - 2 == 2, "the line's end behind an answer"
    terminal = Console(force_terminal=True, color_system="standard", width=200)
    monkeypatch.setattr("llmrecipes.console.console", lambda: terminal)
    assert cli.run(command) == 0
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", capsys.readouterr().out, re.DOTALL)
    assert len(green) == 2
    assert all(re.fullmatch(r"assistant says \d+<\|im_end\|>", text) for text in green)


def _all(folder: Prepared, split: Split) -> list[ShownDocument]:
    documents = folder.manifest.counts(split).documents
    return list(random_documents(folder, split, documents, 0)) if documents else []


def test_figures_add_up(prepared: Prepared) -> None:
    made = stats(prepared)
    (source,), manifest = made.sources, prepared.manifest
    every = [manifest.counts(split) for split in SPLITS]
    assert (source.documents, source.tokens, source.bytes) == tuple(
        sum(getattr(counts, key) for counts in every) for key in ("documents", "tokens", "bytes")
    )
    assert sum(length.documents for length in made.lengths) == source.documents
    assert sum(length.tokens for length in made.lengths) == source.tokens
    assert all(
        length.least * length.documents <= length.tokens < 2 * length.least * length.documents
        for length in made.lengths
    )
    steps = {step.step: step for step in source.dropped}
    assert source.read == source.documents + sum(step.dropped for step in source.dropped)
    assert steps["length"].dropped == sum(steps["length"].rules.values()) > 0
    assert len(steps["length"].example or "") > 350
    assert (steps["personal_data"].dropped, steps["personal_data"].changed) == (0, source.documents)


def test_commands(used: Recipe, prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, data = tmp_path / "t.yaml", ["--data-dir", str(prepared.path.parent)]
    file.write_text(yaml.safe_dump(used.model_dump(mode="json", exclude_defaults=True)))
    assert cli.run(["data", "show", str(file), "--documents", "2", "--json", *data]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [document["split"] for document in shown] == ["train", "train"]
    assert cli.run(["data", "show", str(file), "--documents", "1", "--tokens", "5", *data]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3  # of the document, its tokens, and what is left of them
    assert cli.run(["data", "stats", str(file), "--json", *data]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["sources"][0]["bytes_per_token"] == pytest.approx(
        made["sources"][0]["bytes"] / made["sources"][0]["tokens"]
    )
    assert cli.run(["data", "stats", str(file), *data]) == 0
    assert "personal_data" in capsys.readouterr().out
    assert cli.run(["data", "show", str(file), "--split", "dev", *data]) == 2
    require_message(capsys.readouterr().err, "--split")
    assert cli.run(["data", "stats", str(file), "--data-dir", str(tmp_path)]) == 2
    assert "llmrecipes prepare" in capsys.readouterr().err


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    whole = prepare(recipe(corpus(tmp_path / "text", 30), split=(1.0, 0.0, 0.0)), tmp_path / "data", workers=1)
    with refused("--split"):
        list(random_documents(whole, "valid", 1, 0))


def test_the_page_has_every_figure_and_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    english = "the weather of this day is such that people of the town <b>go</b> out into the fields, number"
    hosts = ["seldom.example", "often.example", "often.example"]
    rows: list[dict[str, str | None]] = [
        {"text": f"{english} {n}", "url": f"https://www.{hosts[n % 3]}/{n}"} for n in range(90)
    ]
    rows += [{"text": f"short {n}", "url": None} for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    used = with_steps(
        make_source(type="jsonl", path=str(tmp_path / "a.jsonl")), {"type": "length", "min_characters": 50}
    )
    folder = prepare(used, tmp_path / "data", workers=1)
    (domains,) = overview.domains(used.data.sources)
    assert domains.by_host == {"often.example": 60, "seldom.example": 30}
    assert (domains.rows, domains.hosts) == (99, 2)
    languages = overview.languages(folder)
    assert languages is not None
    assert languages.documents == 90
    assert languages.by_code == {"en": 90}

    recipe_file, page = tmp_path / "t.yaml", tmp_path / "data.html"
    recipe_file.write_text(yaml.safe_dump(used.model_dump(mode="json", exclude_defaults=True)))
    command = ["data", "stats", str(recipe_file), "--data-dir", str(tmp_path / "data"), "--html"]
    assert cli.run([*command, str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    html = page.read_text("utf-8")
    for text in ("often.example", "60.6%", "short ", "min_characters 9", "90.9%", "en"):
        assert text in html
    assert "<script" not in html
    assert not re.search(r'(src|href)="(?!#)', html)
    assert cli.run([*command, str(tmp_path)]) == 2
    require_message(capsys.readouterr().err, tmp_path)


def test_a_folder_has_a_card(prepared: Prepared) -> None:
    text, manifest = (prepared.path / card.NAME).read_text("utf-8"), prepared.manifest
    assert manifest.files[card.NAME].bytes == len(text.encode())
    for split in SPLITS:
        counts = manifest.counts(split)
        assert f"| {split} | {counts.documents:,} | {counts.tokens:,} | {counts.bytes:,} |" in text
    dropped = manifest.sources[0].steps["length"]
    assert f'| length | `{{"min_characters": 100, "max_characters": 350}}` | {dropped:,} | 0 |' in text
    assert "not masked" not in text
    assert "was not compared" in text
    assert card.card(manifest) == text
    strange = manifest.sources[0].model_copy(update={"label": "text a|b`c\n# d"})
    lines = card.card(manifest.model_copy(update={"sources": [strange]})).splitlines()
    row = next(line for line in lines if "# d" in line)
    assert row.count("|") == row.count("\\|") + 6
