"""The section `zero`: free keys under `extra`, and the rules between zero, layout and engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrecipes.recipe.keys import keys
from llmrecipes.recipe.load import load, to_yaml
from tests.refusals import refused

NAME = "gpt-tiny"


def test_extra_is_set_by_its_dotted_names_and_survives_a_resolved_recipe(tmp_path: Path) -> None:
    loaded = load(
        NAME,
        [
            "zero.stage=3",
            "zero.extra.zero_optimization.round_robin_gradients=true",
            "zero.extra.comms_logger={enabled: true, prof_ops: [a, b]}",
            "zero.extra.comms_logger.prof_ops.1=c",
        ],
    )
    zero = loaded.recipe.zero
    assert zero is not None
    assert zero.extra == {
        "zero_optimization": {"round_robin_gradients": True},
        "comms_logger": {"enabled": True, "prof_ops": ["a", "c"]},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(loaded.recipe))
    again = load(str(path))
    assert again.recipe == loaded.recipe
    assert again.hash == loaded.hash
    assert load(NAME, ["zero.stage=3"]).hash != loaded.hash


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("zero.extra.comms_logger=.nan", "zero.extra.comms_logger"),
        ("zero.extra.comms_logger=[1, {a: -.inf}]", "zero.extra.comms_logger"),
        ("zero.extra=null", "zero.extra"),
        ("zero.extra..comms_logger=1", "zero.extra..comms_logger"),
        ("zero.extr.comms_logger=1", "zero.extr.comms_logger"),
        ("zero.stage=4", "zero.stage"),
    ],
)
def test_extra_is_plain_json(override: str, key: str) -> None:
    with refused(key):
        load(NAME, ["zero.stage=3", override])


def test_an_item_of_a_list_in_extra_has_a_number() -> None:
    with refused("zero.extra.comms_logger.b", rule="zero.extra.comms_logger.0"):
        load(NAME, ["zero.stage=3", "zero.extra.comms_logger=[1]", "zero.extra.comms_logger.b=2"])


def test_a_section_that_may_be_null_has_its_keys_in_the_reference() -> None:
    known: dict[str, Any] = keys()
    assert known["zero"].section
    assert known["zero.stage"].required
    assert known["zero.extra"].free
    assert load(NAME, ["zero=null"]).hash == load(NAME).hash
