"""Generated recipes: whatever is in one, it is read or refused with a message."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmrecipes.errors import UserError
from llmrecipes.recipe.load import load
from llmrecipes.recipe.reading.keys import keys

VALUES: tuple[Any, ...] = (
    0, 1, 2, 3, 7, 8, 64, -1, 2**31, 2**63, 10**30, 0.0, 0.5, 1e-3, 1e30, -0.1, float("nan"), float("inf"), True,
    False, None, "", "auto", "none", "bf16", "rope", "full", "$(id)", "`id`", "; rm -rf /", "../../etc/passwd",
    "a" * 300, "\0", "é\u202e", "${HOME}", "!!python/object/apply:os.system [id]", [], [1, 2], ["x"], {}, {"a": 1},
    [[[]]], {"type": "x"},
)  # fmt: skip


def recipes(number: int, seed: int) -> Any:
    """Recipes of some keys of the schema, unknown ones among them, with values of every kind."""
    draw = random.Random(seed)
    known = [*keys(), "model.no_such_key", "train", "data.sources", "x"]
    base = load("gpt-tiny").recipe.model_dump(mode="json", exclude_defaults=True)
    for _ in range(number):
        values: dict[str, Any] = {**copy.deepcopy(base), "name": "r"}
        for key in draw.sample(known, draw.choice((1, 1, 1, 2, 4))):
            *sections, last = key.split(".")
            place: Any = values
            for section in sections:
                if not isinstance(place.setdefault(section, {}), dict):
                    place[section] = {}
                place = place[section]
            place[last] = draw.choice(VALUES)
        yield values


def require_answers(number: int, seed: int, folder: Path) -> tuple[int, int]:
    read = refused = 0
    path = folder / "r.yaml"
    for values in recipes(number, seed):
        path.write_text(yaml.dump(values, Dumper=yaml.CSafeDumper, allow_unicode=True), "utf-8")
        try:
            load(str(path))
        except UserError as error:
            refused += 1
            assert str(error) and error.where, values
        else:
            read += 1
    return read, refused


def test_generated_recipes_get_no_traceback(tmp_path: Path) -> None:
    read, refused = require_answers(300, 1, tmp_path)
    assert read > 3 and refused > 50


@pytest.mark.slow
@pytest.mark.rotating
def test_ten_thousand_generated_recipes_get_no_traceback(tmp_path: Path) -> None:
    read, refused = require_answers(10_000, 2, tmp_path)
    assert read > 100 and refused > 1000
