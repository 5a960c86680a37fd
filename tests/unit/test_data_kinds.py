"""Steps that drop most of a source, a script or a language are reported, with rule and example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.data.prepare import prepare
from llmrecipes.data.steps.kinds import Kinds, script
from llmrecipes.recipe.sections.source import make_source
from tests.unit.data_recipes import made_step, recipe

ENGLISH = "The committee of the town has to be at the hall, and that is what we have with us on day {}. " * 6
GERMAN = "Der Ausschuss der Stadt trifft sich am Dienstag im Rathaus und berät über den Haushalt Nummer {}. " * 6
CHINESE = "委员会星期二开会讨论了来年的预算第{}号,大多数成员同意。" * 20


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("plain", "Latin"),
        ("Größe — 9", "Latin"),
        ("中文 and English", "Latin"),
        ("中文和中文 ok", "Han"),
        ("हिन्दी", "Devanagari"),
        ("ภาษาไทย", "Thai"),
        ("ភាសាខ្មែរ", "Khmer"),
        ("Привет", "Cyrillic"),
        ("🎉🎉…", ""),
    ],
)
def test_the_script_of_a_text(text: str, name: str) -> None:
    assert script(text) == name


def warnings(folder: Path, texts: list[str], *steps: dict[str, Any], workers: int | None = None) -> list[str]:
    folder.mkdir()
    for n in range(2):
        rows = (json.dumps({"text": text}) + "\n" for text in texts[n::2])
        (folder / f"{n}.jsonl").write_text("".join(rows), encoding="utf-8")
    used = recipe(make_source(type="jsonl", path=str(folder)))
    made = tuple(made_step(step) for step in steps)
    used = used.model_copy(update={"data": used.data.model_copy(update={"steps": made})})
    lines: list[str] = []
    prepare(used, folder / "data", progress=lines.append, workers=workers)
    return [line for line in lines if line.startswith("warning:") and " drops " in line]


LANGUAGES = {"type": "language", "languages": ["en", "de", "zh"]}
KINDS = (ENGLISH, f"Again: {ENGLISH}", GERMAN, CHINESE)
TEXTS = [text.replace("{}", str(n)) for n in range(20) for text in KINDS]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_language_that_vanishes_is_a_warning(tmp_path: Path, workers: int) -> None:
    """Gopher's rules are for English: all Chinese and German is dropped, half of the source is not."""
    said = warnings(tmp_path / "src", TEXTS, LANGUAGES, {"type": "gopher"}, workers=workers)
    assert len(said) == 2
    for line, kind, rule, example in zip(
        said, ("zh", "de"), ("words", "stop_words"), ("委员会", "Ausschuss"), strict=True
    ):
        assert all(part in line for part in ("gopher", "20 of 20", kind, rule, example)), line


def test_a_step_that_drops_most_of_a_source_is_one_warning(tmp_path: Path) -> None:
    long = [GERMAN.replace("{}", str(n)) * 3 for n in range(30)]
    said = warnings(tmp_path / "src", [*TEXTS[2::4], *long], {"type": "length", "max_characters": 1000})
    assert len(said) == 1
    assert all(part in said[0] for part in ("length", "max_characters", "30 of 50", "Der Ausschuss")), said
    assert not warnings(tmp_path / "half", [*TEXTS[2::4], *long[:20]], {"type": "length", "max_characters": 1000})


def test_dropping_other_languages_is_no_warning(tmp_path: Path) -> None:
    """It is what the step is for; but most of a source is reported."""
    said = warnings(tmp_path / "src", TEXTS, {"type": "language", "languages": ["en", "de"]})
    assert not said
    assert len(warnings(tmp_path / "less", TEXTS, {"type": "language", "languages": ["de"]})) == 1


def test_counts_of_parts_add_up() -> None:
    whole, halves = Kinds(), [Kinds(), Kinds()]
    for n in range(30):
        for each in (whole, halves[n // 15]):
            each.add(("Thai",) if n % 2 else ("Latin",), "c4" if n % 2 else "", "sentences", f"text {n}")
    halves[0].update(halves[1])
    assert halves[0] == whole
    assert len(list(whole.warnings("a"))) == 1
    assert "15 of 15" in next(whole.warnings("a"))
