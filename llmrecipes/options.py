"""Options that are declared once: the fields of a model that have an `Option`.

The command line shows them (`cli/shared_options.py`), and the Python API takes them by the names of the fields. A model
is a dataclass, or a pydantic model where types must be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from re import findall
from typing import Any, TypeVar, get_args, get_type_hints

from llmrecipes.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """How a field appears on the command line."""

    help: str
    name: str | None = None
    """Without dashes; None: that of the field."""
    metavar: str | None = None
    least: float | None = None
    read: Callable[[str], Any] | None = None
    """Parses what is written on the command line, such as 500MB, into the value; then `help` must name the default."""
    also: str | None = None
    """Another name."""


@dataclass(frozen=True)
class Field:
    """A field of a model that is an option; `default` is `inspect.Parameter.empty` if it must be set."""

    name: str
    kind: Any
    default: Any
    option: Any

    @property
    def word(self) -> str:
        """Its name on the command line, without dashes."""
        return self.option.name or self.name.replace("_", "-")


def declared(model: type) -> dict[str, Field]:
    """The options of a model by the names of its fields, in their order."""
    hints = get_type_hints(model, include_extras=True)
    fields: dict[str, Field] = {}
    for name, parameter in signature(model).parameters.items():
        kind, *metadata = get_args(hints[name]) or [hints[name]]
        option = next((each for each in metadata if isinstance(each, Option)), None)
        if option is not None:
            fields[name] = Field(name, kind, parameter.default, option)
    return fields


def made(model: type[T], values: Mapping[str, Any], *, words: bool = False) -> T:
    """A model with these values of its fields.

    Args:
        words: name options in errors as on the command line.

    Raises:
        UserError: an option that the model does not have, or a value that it does not take.
    """
    fields = declared(model)
    for name in values.keys() - fields.keys():
        raise UserError("no such option", where=name, rule=f"one of {', '.join(fields)}")
    try:
        built = model(**values)
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        raise _refused(error.errors()[0], fields, words=words) from error
    for name, field in fields.items():
        value = getattr(built, name)
        least = field.option.least
        if least is not None and value is not None and not value >= least:  # nan is neither
            raise UserError(f"{value}", where=f"--{field.word}" if words else name, rule=f"must be at least {least}")
    return built


def takes(parameter: str, model: type) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Let a function of the Python API take the fields of a model as keywords, and get the model as this parameter."""

    def mark(function: Callable[..., T]) -> Callable[..., T]:
        own = signature(function).parameters
        parameters = [each for each in own.values() if each.name != parameter]
        position = [*own].index(parameter)
        parameters[position:position] = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.kind)
            for field in declared(model).values()
        ]

        @wraps(function)
        def decorated(*positional: Any, **keywords: Any) -> T:
            options = {name: keywords.pop(name) for name in [*keywords] if name not in own}
            return function(*positional, **keywords, **{parameter: made(model, options)})

        decorated.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return decorated

    return mark


def _refused(problem: Mapping[str, Any], fields: Mapping[str, Field], *, words: bool) -> UserError:
    """The error of a value that pydantic refuses."""
    name, *within = problem["loc"]
    where = f"--{fields[name].word}" if words else ".".join(map(str, (name, *within)))
    known = findall("'(.+?)'", problem["ctx"]["expected"]) if problem["type"] == "literal_error" else []
    near = get_close_matches(str(problem["input"]), known, n=1, cutoff=0)
    rule = f"one of {', '.join(known)}" if known else problem["msg"]
    fix = f"{where} {near[0]}" if near and words else ""
    return UserError(f"{problem['input']!r}", where=where, rule=rule, fix=fix)
