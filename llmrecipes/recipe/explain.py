"""Pydantic's validation errors in this project's words: the value, the rule, the nearest key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from llmrecipes.recipe.document import Problem, dotted
from llmrecipes.recipe.keys import Key, keys, nearest, normal
from llmrecipes.recipe.schema import Recipe

_TYPES = {
    str: "a string",
    bool: "a truth value",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


def explain(error: ValidationError, document: type[BaseModel] = Recipe) -> list[Problem]:
    """One problem for each wrong key; what only follows from another one is left out."""
    found = error.errors(include_url=False)
    problems = [_problem(details, document) for details in found]
    wrong = [problem.key for problem in problems]
    meant = {problem.fix.removeprefix("did you mean ").rstrip("?") for problem in problems}
    kept = {
        problem.key: problem  # a value that fits no type of a union is reported once for each of them
        for problem, details in zip(problems, found, strict=True)
        if not _follows(problem.key, details, wrong, meant)
    }
    return list(kept.values())


def _follows(key: str, details: ErrorDetails, wrong: list[str], meant: set[str]) -> bool:
    """A list is 'too short' or 'no integer' when its item is wrong; a key is 'missing' when it stands misspelt."""
    if isinstance(details["input"], list | tuple):
        return any(other.startswith(f"{key}.") for other in wrong)
    return details["type"] == "missing" and key in meant


def _place(details: ErrorDetails, known: dict[str, Key]) -> str:
    """Dotted key of the value, without the names that pydantic puts in for the types of a union."""
    place: tuple[int | str, ...] = ()
    for part in details["loc"]:
        longer = (*place, part)
        if isinstance(part, int) or normal(dotted(longer)) in known or _is_free(place, known):
            place = longer
    return dotted(place)


def _is_free(place: tuple[int | str, ...], known: dict[str, Key]) -> bool:
    key = known.get(normal(dotted(place)))
    return key is not None and key.free


def _problem(details: ErrorDetails, document: type[BaseModel]) -> Problem:
    kind, all_keys = details["type"], keys(document)
    key = dotted(details["loc"]) if kind == "extra_forbidden" else _place(details, all_keys)
    known = all_keys.get(normal(key))
    if kind == "extra_forbidden":
        return Problem(key, "unknown key", fix=_unknown(key, details["loc"], document))
    if known is None and any(_is_free(details["loc"][:depth], all_keys) for depth in range(1, len(details["loc"]))):
        return Problem(key, f"{show(details['input'])} does not fit", details["msg"].lower())
    takes = known.takes if known else ""
    if kind == "missing":
        if known is None:  # an item of a list of fixed length, reported by its index
            key = key.rpartition(".")[0]
            return Problem(key, f"{show(details['input'])} is too short", f"{all_keys[normal(key)].takes}")
        return Problem(key, "missing", f"{key} is required: {takes}")
    if known is None:
        key_of_list = key.rpartition(".")[0]
        takes = all_keys[normal(key_of_list)].takes if normal(key_of_list) in all_keys else details["msg"].lower()
    return Problem(key, f"{show(details['input'])} does not fit", f"{key} is {takes}", _spelling(details, takes))


def _unknown(key: str, loc: tuple[int | str, ...], document: type[BaseModel]) -> str:
    last = str(loc[-1])
    if len(loc) == 1 and last in keys(document):
        section, _, name = last.rpartition(".")
        return f"nest it: {name} under {section}"
    close = nearest(key, document)
    return f"did you mean {close}?" if close else ""


def _spelling(details: ErrorDetails, takes: str) -> str:
    """How to write what was probably meant, for the slips YAML invites."""
    value = details["input"]
    if isinstance(value, str):
        if value.lower() in ("yes", "on", "no", "off") and "true or false" in takes:
            return "true" if value.lower() in ("yes", "on") else "false"
        plain = value.replace("_", "").replace(",", "")
        if plain.isdecimal() and ("integer" in takes or "number" in takes):
            return f"{plain}, without quotes or separators"
    if isinstance(value, float) and value.is_integer() and "integer" in takes:
        return f"{int(value)}"
    if value is None and takes == "a mapping":
        return "put keys under it, indented, or leave it out"
    return ""


def show(value: Any) -> str:
    """A value with its type, short enough for one line."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true (a truth value)" if value else "false (a truth value)"
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}…"
    return f"{text} ({_TYPES.get(type(value), type(value).__name__)})"
