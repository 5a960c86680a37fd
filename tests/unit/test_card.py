"""Recipe cards: they are of the recipes and plans of now, and keep what was done with a recipe."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import run
from lab.cards import cards as workflow
from lab.cards.command import table
from llmrecipes.files import recipes_dir
from llmrecipes.recipe.load import names
from tests.refusals import require_message

ROOT = Path(__file__).parents[2]


def test_every_recipe_has_a_card_of_now() -> None:
    """After a change of a recipe, of the plan or of coefficients: python -m lab card --all --write."""
    assert {name: reason for name in names() if (reason := workflow.stale(name)) is not None} == {}


def test_the_guide_has_the_table_of_the_cards() -> None:
    page = (ROOT / "docs/guide/recipes.md").read_text("utf-8")
    assert "\n".join(table([workflow.read(name) for name in names()])) in page


def test_every_row_of_the_table_has_the_columns_of_its_head() -> None:
    head, _, *rows = table([workflow.read(name) for name in names()])
    assert any(r"\|" in row for row in rows)
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {len(head.split("|"))}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recipe and no card."""
    shutil.copy(recipes_dir() / "gpt-7b.yaml", tmp_path)
    monkeypatch.setenv("LLMRECIPES_RECIPES", str(tmp_path))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert run(["card", "gpt-7b", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_card_keeps_what_was_done_and_notices_a_change(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["card", "gpt-7b"]) == 2
    require_message(capsys.readouterr().err, str(own / "cards" / "gpt-7b.json"))
    card = shown(capsys, "--write", "--gpus", "32")
    assert card["gpus"] == 32 and card["planned"]["command"].endswith("--gpus 32")
    assert "arXiv 2205.05198" in card["layout_source"]
    speed = card["planned"]["figures"]["tokens_per_second_per_gpu"]
    assert card["searched"]["figures"]["tokens_per_second_per_gpu"] >= speed
    assert card["dryrun"] is None and card["smoke"] is None

    path = workflow.path_of("gpt-7b")
    smoke = {**card["planned"], "command": "llmrecipes smoke gpt-7b", "figures": {"ok": True}}
    path.write_text(json.dumps(card | {"smoke": smoke}))
    assert run(["card", "gpt-7b", "--check"]) == 0
    again = shown(capsys, "--write")
    assert again["smoke"] == smoke and again["gpus"] == 32 and again["planned"] == card["planned"]

    recipe = own / "gpt-7b.yaml"
    recipe.write_text(recipe.read_text().replace("num_layers: 36", "num_layers: 40"))
    assert run(["card", "--all", "--check"]) == 2
    require_message(capsys.readouterr().err, "recipes/cards", rule="gpt-7b")
    assert shown(capsys, "--write", "--check")["smoke"]["recipe_hash"] == smoke["recipe_hash"]
    assert run(["card", "gpt-7b"]) == 0
    assert "earlier version" in capsys.readouterr().out


def test_changed_figures_of_a_plan_are_noticed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = shown(capsys, "--write", "--gpus", "32")
    card["planned"]["figures"]["step_seconds"] *= 1.01
    workflow.path_of("gpt-7b").write_text(json.dumps(card))
    assert workflow.stale("gpt-7b") == "step_seconds of its plan"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("gpt-7b", "--all"), "RECIPE"),
        ((), "RECIPE"),
        (("recipes/gpt-7b.yaml", "--write"), "RECIPE"),
        (("gpt-8b",), "RECIPE"),
        (("gpt-7b", "--gpus", "8"), "--gpus"),
        (("--all", "--write", "--run", "x"), "--run"),
        (("gpt-7b", "--write", "--do", "everything"), "--do"),
    ],
)
def test_card_refuses(arguments: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["card", *arguments]) == 2
    require_message(capsys.readouterr().err, where)


def test_a_broken_card_is_named(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = workflow.path_of("gpt-7b")
    path.parent.mkdir()
    part = {"command": "c", "commit": "c", "date": "d", "recipe_hash": "h", "figures": {"gpu": "H100", "layout": "TP2"}}
    card = {"recipe": "gpt-7b", "cluster": "h100-ib", "gpus": 8, "layout_source": "", "planned": part}
    other = card | {"recipe": "other", "planned": part | {"figures": {}}}
    for broken in ("{", json.dumps(card), json.dumps(other), json.dumps(other | {"gpus": 0})):
        path.write_text(broken)
        assert run(["card", "--all"]) == 2
        require_message(capsys.readouterr().err, str(path))
