"""Sections of several types, on a document of the test: what is read, recorded, refused, and documented."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.reading.explain import explain
from llmrecipes.recipe.reading.keys import is_key, keys, options_of
from llmrecipes.recipe.sections.section import PosInt, Section, Variant, type_or
from tests.refusals import has_token


class Shape(Variant):
    """A shape."""

    scale: PosInt = 1
    """Factor."""


class Circle(Shape):
    """A circle."""

    type: Literal["circle"] = "circle"
    width: PosInt = 10
    """Diameter."""


class Box(Shape):
    """A box."""

    type: Literal["box"]
    width: Annotated[int, Field(gt=5)]
    """Width."""
    depth: PosInt | None = None
    """Depth."""


AnyShape = Annotated[Circle | Box, Field(discriminator="type")]


class Drawing(Section):
    """A drawing."""

    frame: Annotated[AnyShape, type_or("circle")] = Circle()
    """Around all."""
    mask: AnyShape | None = None
    """What is shown."""
    shapes: tuple[AnyShape, ...] = Field((), strict=False)
    """In it."""


ALL = dict.fromkeys(("type", "scale", "width", "depth"))


def problems(**values: Any) -> list[Problem]:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(values)
    return explain(caught.value, {}, Drawing)


def test_a_key_that_is_not_set_is_null_where_a_section_is_recorded() -> None:
    """Of any type, as long before; so the hash of a recipe tells whether a key is set to its default."""
    drawing = Drawing.model_validate({"frame": {"scale": 1}, "shapes": [{"type": "box", "width": 6}]})
    recorded = drawing.model_dump(mode="json")
    assert recorded == {
        "frame": {**ALL, "type": "circle", "scale": 1}, "mask": None, "shapes": [{**ALL, "type": "box", "width": 6}],
    }  # fmt: skip
    again = Drawing.model_validate(recorded)
    assert again == drawing and again.model_dump(mode="json") == recorded
    assert drawing.frame.width == 10
    short = {"shapes": [{"type": "box", "width": 6}]}
    assert drawing.model_dump(mode="json", exclude_defaults=True) == short
    assert drawing.model_dump(mode="json", exclude_none=True)["shapes"] == [{"scale": 1, "type": "box", "width": 6}]


@pytest.mark.parametrize(
    ("values", "key", "token"),
    [
        ({"frame": {"depth": 3}}, "frame.depth", "box"),
        ({"frame": {"type": "box", "width": 6, "hight": 3}}, "frame.hight", ""),
        ({"frame": {"type": "box"}}, "frame.width", "5"),
        ({"frame": {"type": "box", "width": 3}}, "frame.width", "5"),
        ({"frame": {"type": "square"}}, "frame.type", "circle"),
        ({"frame": {"type": None}}, "frame.type", "circle"),
        ({"frame": None}, "frame", ""),
        ({"frame": 3}, "frame", ""),
        ({"mask": {"width": 3}}, "mask.type", "box"),
        ({"mask": {"type": "circle", "depth": 3}}, "mask.depth", "scale"),
        ({"shapes": [{"type": "circle"}, {"type": "circle", "depth": 3}]}, "shapes.1.depth", "box"),
        ({"shapes": [{"type": "box", "width": 3, "depth": "x"}]}, "shapes.0.depth", "0"),
        ({"shapes": [{"type": "circle", "width": -1}]}, "shapes.0.width", "0"),
        ({"shapes": [{"type": ["box"]}]}, "shapes.0.type", "box"),
        ({"shapes": [{"width": 3}]}, "shapes.0.type", "box"),
        ({"shapes": ["box"]}, "shapes.0", ""),
    ],
)
def test_a_problem_is_of_the_key_and_says_what_types_there_are(values: dict[str, Any], key: str, token: str) -> None:
    found = {problem.key: problem for problem in problems(**values)}
    assert key in found
    problem = found[key]
    assert not token or has_token(f"{problem.what} {problem.rule} {problem.fix}", token)


def test_the_keys_of_a_section_are_those_of_its_types() -> None:
    for section in ("frame", "mask", "shapes.N"):
        found = {name: key for name, key in keys(Drawing).items() if name.startswith(f"{section}.")}
        assert set(found) == {f"{section}.{name}" for name in ALL}
        width, depth = found[f"{section}.width"], found[f"{section}.depth"]
        assert [*width.by_type] == ["circle", "box"] and [*depth.by_type] == ["box"]
        assert [key.required for key in width.by_type.values()] == [False, True] and not width.required
        assert has_token(width.by_type["box"].takes, "5") and not has_token(width.by_type["circle"].takes, "5")
        assert keys(Drawing)[section].section
        assert options_of(f"{section}.type", Drawing)[0]["enum"] == ["circle", "box"]
        assert is_key(f"{section}.depth", Drawing) and not is_key(f"{section}.hight", Drawing)
