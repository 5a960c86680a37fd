"""Pydantic's validation errors as this project's problems: the value, the rule, the nearest key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from llmrecipes.recipe.document import MAX_SHOWN, Problem, clip, dotted
from llmrecipes.recipe.reading.keys import Hint, RecipeKey, admits, hint, is_section, keys, normal, options_of
from llmrecipes.recipe.reading.synonyms import VALUES, synonym
from llmrecipes.recipe.schema import Recipe

_TYPES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


def explain(error: ValidationError, lines: Mapping[str, int], document: type[BaseModel] = Recipe) -> list[Problem]:
    """One problem for each invalid key; consequences of another problem are omitted.

    Hints need a search through all keys: only the unknown keys that will be shown get one, the first of the file.

    Args:
        lines: line of each dotted key in the file.
    """
    errors = [_at_type(details) for details in error.errors(include_url=False, include_context=False)]
    known = keys(document)
    unknown = {_place(details, known): details for details in errors if details["type"] == "extra_forbidden"}
    first = sorted(unknown, key=lambda key: lines.get(key, 0))[:MAX_SHOWN]
    hints = {key: _unknown(key, _own_keys(key, unknown[key], known), document) for key in first}
    problems = [_problem(details, document, hints) for details in errors]
    around = {parent for problem in problems for parent in _parents(problem.key)}
    meant = {key for hint in hints.values() for key in hint.keys}
    kept = {
        problem.key: problem  # a value that fits no type of a union is reported once for each of them
        for problem, details in zip(problems, errors, strict=True)
        if not _follows(problem.key, details, around, meant)
    }
    return list(kept.values())


def _parents(key: str) -> Iterator[str]:
    while key := key.rpartition(".")[0]:
        yield key


def _follows(key: str, details: ErrorDetails, around: set[str], meant: set[str]) -> bool:
    """A list is 'too short' or 'no integer' if its item is invalid; a key is 'missing' if it is misspelt.

    A default that depends on other keys is not made if one of its section is invalid.
    """
    if details["type"] == "default_factory_not_called":
        return True
    if isinstance(details["input"], list | tuple):
        return key in around
    return details["type"] == "missing" and key in meant


def _at_type(details: ErrorDetails) -> ErrorDetails:
    """A section without a type, or of an unknown one, as an error of its key `type`, or of a key that stands for it."""
    if not details["type"].startswith("union_tag_"):
        return details
    section = details["input"]
    if "type" in section:
        return {**details, "type": "literal_error", "loc": (*details["loc"], "type"), "input": section["type"]}
    meant = (key for key in section if get_close_matches(key.partition(":")[0], ["type"]))
    if (key := next(meant, None)) is not None:
        return {**details, "type": "extra_forbidden", "loc": (*details["loc"], key), "input": section[key]}
    return {**details, "type": "missing", "loc": (*details["loc"], "type")}


def _place(details: ErrorDetails, known: dict[str, RecipeKey]) -> str:
    """Dotted key of the value, without the names that pydantic inserts for the types of a union."""
    place: tuple[int | str, ...] = ()
    for depth, part in enumerate(details["loc"], start=1):
        longer = (*place, part)
        unknown = details["type"] == "extra_forbidden" and depth == len(details["loc"])
        if unknown or isinstance(part, int) or normal(dotted(longer)) in known or _is_free(place, known):
            place = longer
    return dotted(place)


def _is_free(place: tuple[int | str, ...], known: dict[str, RecipeKey]) -> bool:
    """Whether it is a mapping with keys of the user, or in one of `layouts`, which are sections."""
    key = known.get(normal(dotted(place)))
    return place[:1] == ("layouts",) or (key is not None and key.free)


def _problem(details: ErrorDetails, document: type[BaseModel], hints: Mapping[str, Hint]) -> Problem:
    kind = details["type"]
    all_keys = keys(document)
    key = _place(details, all_keys)
    known = all_keys.get(normal(key))
    if kind == "extra_forbidden":
        own = _own_keys(key, details, all_keys)
        if known and known.by_type and own is not None:
            return _of_another_type(known, key, str(details["loc"][-2]), own)
        name, colon, value = str(details["loc"][-1]).partition(":")
        if colon and details["input"] is None:  # {type:text} is a key without a value
            return Problem(key, "unknown key", fix=f"put a space after the colon: {name}: {value}")
        return Problem(key, "unknown key", fix=str(hints.get(key, "")))
    if known is None and any(_is_free(details["loc"][:depth], all_keys) for depth in range(1, len(details["loc"]))):
        return Problem(key, f"{show(details['input'])} is not valid", rule_of(details))
    of_types = known.by_type.items() if known else ()
    known = next((key_of_type for name, key_of_type in of_types if name in details["loc"]), known)
    takes = known.takes if known else ""
    if kind == "missing":
        if known is None:  # an item of a list of fixed length, reported by its index
            key = key.rpartition(".")[0]
            above = next(each for each in (key, *_parents(key)) if normal(each) in all_keys)
            return Problem(
                key, f"{show(details['input'])} is too short", f"{above} must be {all_keys[normal(above)].takes}"
            )
        return Problem(key, "missing", f"{key} is required: {takes}")
    fix = _spelling(key, details["input"], options_of(key, document))
    if known is None:
        key_of_list = key.rpartition(".")[0]
        takes = all_keys[normal(key_of_list)].takes if normal(key_of_list) in all_keys else rule_of(details)
    return Problem(key, f"{show(details['input'])} is not valid", f"{clip(key)} must be {takes}", fix)


def _own_keys(key: str, details: ErrorDetails, known: Mapping[str, RecipeKey]) -> list[str] | None:
    """The keys that the section around an unknown key has beside `type`; None: its type is not one of several."""
    chosen = known.get(normal(f"{key.rpartition('.')[0]}.type"))
    of_type = str(details["loc"][-2]) if len(details["loc"]) > 1 else ""
    if chosen is None or of_type not in chosen.by_type:
        return None
    return [other.name.rpartition(".")[2] for other in chosen.by_type[of_type].beside]


def _of_another_type(known: RecipeKey, key: str, of_type: str, own: list[str]) -> Problem:
    name = key.rpartition(".")[2]
    types = ", ".join(known.by_type)
    return Problem(
        key,
        f"set with type {of_type}",
        f"{name} is a key of {types}; {of_type} has {', '.join(own) or 'none'}",
        f"remove {name}" if len(known.by_type) > 1 else f"remove {name}, or type {types}",
    )


def rule_of(details: ErrorDetails) -> str:
    """pydantic's sentence; patterns and choices in it keep their case."""
    message = details["msg"]
    return message[:1].lower() + message[1:]


def _unknown(key: str, own: list[str] | None, document: type[BaseModel]) -> Hint:
    section, _, name = key.rpartition(".")
    if key.startswith("layouts."):  # whose layouts have the keys of another section
        layout, _, inner = key.removeprefix("layouts.").partition(".")
        meant = hint(f"layout.{inner}", document)
        keys_of_layout = (each.removeprefix("layout.") for each in meant.keys if each.startswith("layout."))
        return Hint(tuple(f"layouts.{layout}.{each}" for each in keys_of_layout), meant.note)
    if close := get_close_matches(name, own or (), n=1):
        return Hint((f"{section}.{close[0]}",))
    # Only a key that contains dots can be valid although it is unknown.
    return Hint(note=f"nest it: {name} under {section}") if key in keys(document) else hint(key, document)


def _spelling(key: str, value: object, options: tuple[Mapping[str, Any], ...]) -> str:
    """The probably intended value, for common YAML mistakes; only values that one of the types accepts."""
    types = [node.get("type") for node in options]
    if isinstance(value, str):
        choices = [str(choice) for node in options for choice in node.get("enum", ())]
        wanted = VALUES.get(value.lower(), value).lower()
        same = next((choice for choice in choices if choice.lower() == wanted), "")
        if same:
            return same
        if close := get_close_matches(wanted, choices, n=1, cutoff=0.8):
            return close[0]
        if value.lower() in ("yes", "on", "no", "off") and "boolean" in types:
            return "true" if value.lower() in ("yes", "on") else "false"
        plain = value.replace("_", "").replace(",", "")
        if len(plain) < 20 and plain.isdecimal() and any(admits(node, int(plain)) for node in options):
            return f"{plain}, without quotes or separators"
    if isinstance(value, float) and value.is_integer() and any(admits(node, int(value)) for node in options):
        return f"{int(value)}"
    if isinstance(value, dict) and (foreign := synonym(key)):
        return foreign.note
    if value is None and any(map(is_section, options)):
        return "indent its keys below it, or remove it"
    return ""


def show(value: Any) -> str:
    """A value with its type, short enough for one line."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true (a boolean)" if value else "false (a boolean)"
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}…"
    return f"{text} ({_TYPES.get(type(value), type(value).__name__)})"
