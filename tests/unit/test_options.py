"""Options declared once: a field added to a model is an option of its command and of the Python API."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, make_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import pytest
from pydantic import create_model

from llmrecipes.api import Run
from llmrecipes.api_commands import merge_models
from llmrecipes.cli import app
from llmrecipes.cli.shared_options import expanded
from llmrecipes.engine.sampling import Sampling
from llmrecipes.evaluation.request import EvaluationRequest
from llmrecipes.launch.run_options import RunOption
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.models.merge_options import MergeOptions
from llmrecipes.options import declared, takes
from tests.refusals import refused, require_message

ADDED = Annotated[int, RunOption("mark with N.", metavar="N", least=1, in_jobs=True)]
API = [
    (Run.generate, "sampling", Sampling),
    (Run.export, "options", ExportOptions),
    (Run.evaluate, "request", EvaluationRequest),
    (merge_models, "options", MergeOptions),
]
"""Functions that take the fields of a model, and the parameter that it is."""


def extended(model: type) -> type:
    """The model with one more option, `my_mark`."""
    if is_dataclass(model):
        return make_dataclass(model.__name__, [("my_mark", ADDED, 3)], bases=(model,), frozen=True)
    return create_model(model.__name__, __base__=model, my_mark=(ADDED, 3))


def with_models() -> Iterator[tuple[str, str, str]]:
    """Commands that have models, with the parameter and the place of each model."""
    for commands in app.SECTIONS.values():
        for name, place in commands.items():
            for parameter, source in getattr(app._imported(place), "sources", {}).items():
                if isinstance(source, str):
                    yield name, parameter, source


def recorder(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A function of the same signature and marks that returns its keywords."""

    @wraps(function)
    def recorded(**keywords: Any) -> dict[str, Any]:
        return keywords

    return recorded


@pytest.mark.parametrize(("command", "parameter", "place"), [*with_models()])
def test_a_field_is_an_option_of_its_command(
    command: str, parameter: str, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = place.rpartition(".")
    owner = importlib.import_module(f"llmrecipes.{module}")
    monkeypatch.setattr(owner, name, extended(getattr(owner, name)))
    monkeypatch.setattr(app, "_parser", app._parser.__wrapped__)  # built before
    assert app.run([command, "--help"]) == 0
    assert re.search(r"--my-mark N\s+mark with", capsys.readouterr().out)
    assert app.run([command, "--my-mark", "0"]) == 2
    require_message(capsys.readouterr().err, "--my-mark", rule="1")
    place_of_command = next(commands[command] for commands in app.SECTIONS.values() if command in commands)
    shown = expanded(recorder(app._imported(place_of_command)))
    parameters = signature(shown).parameters
    given = {each.name: None if each.default is Parameter.empty else each.default for each in parameters.values()}
    assert shown(**given | {"my_mark": 7})[parameter].my_mark == 7


@pytest.mark.parametrize(("function", "parameter", "model"), API)
def test_a_field_is_a_keyword_of_its_function(function: Callable[..., Any], parameter: str, model: type) -> None:
    assert signature(function).parameters.keys() > declared(model).keys()
    remade = takes(parameter, extended(model))(recorder(function.__wrapped__))  # type: ignore[attr-defined]
    assert signature(remade).parameters["my_mark"].default == 3
    required = {name: "x" for name, field in declared(model).items() if field.default is Parameter.empty}
    assert remade(**required, my_mark=8)[parameter].my_mark == 8
    with refused("my_mark", rule="1"):
        remade(**required, my_mark=0)
    with refused("my_mork"):
        remade(**required, my_mork=1)
