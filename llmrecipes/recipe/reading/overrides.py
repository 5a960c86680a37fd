"""`key.path=value` on the command line, read by the same rules as a recipe file."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.recipe import document
from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.reading.former import current
from llmrecipes.recipe.reading.keys import ITEM, hint, is_key, keys, normal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Override:
    """One change: dotted key, plain value, and the text the user wrote."""

    key: str
    value: Any
    text: str


def parse_override(text: str, hints: bool = True) -> Override:
    """Read `key.path=value`; the value is YAML (`3e-4`, `true`, `null`, `[1, 2]`), an empty one is null.

    Args:
        hints: search for the intended key if it is unknown.

    Raises:
        UserError: no `=`, an unknown key, or a value that is not YAML.
    """
    where = f"override {clip(text)!r}"
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(
            "not KEY=VALUE",
            where=where,
            rule="an override is a dotted key and a value",
            fix="for example train.train_iters=50",
        )
    if ITEM in key.split("."):
        raise UserError(
            f"{ITEM} must be replaced by an index", where=f"{where}: {key}", fix=key.replace(f".{ITEM}", ".0")
        )
    if not is_key(key) and is_key(current(key)):
        logger.warning("note: %s: %s is %s now", where, clip(key), current(key))
        key = current(key)
    if not is_key(key):
        raise UserError("unknown key", where=f"{where}: {clip(key)}", fix=str(hint(key)) if hints else "")
    parsed = document.parse(value)
    if parsed.problems:
        problem = parsed.problems[0]
        raise UserError(problem.what, where=where, rule=problem.rule, fix=problem.fix)
    return Override(key, parsed.data, text)


def apply(data: dict[str, Any], change: Override) -> Problem | None:
    """Set one key in plain recipe data, in place.

    A list that the file does not set is first replaced by its default, so that its items can be addressed; the index
    one past the end appends. Returns the problem if the location does not exist.
    """
    node: Any = data
    parts = change.key.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isdecimal():
                return Problem(
                    change.key,
                    f"{part!r} in a list",
                    "list items are numbered from 0",
                    f"{'.'.join([*parts[:depth], '0', *parts[depth + 1 :]])}",
                )
            index = int(part)
            if index > len(node):
                return Problem(
                    change.key,
                    f"no item {index}",
                    f"the list has {len(node)} item{'s' * (len(node) != 1)}",
                    f"an index from 0 to {len(node)}; {len(node)} appends",
                )
            if index == len(node):
                node.append({})
            if last:
                node[index] = change.value
            else:
                node = node[index]
        elif isinstance(node, dict):
            if last:
                node[part] = change.value
            else:
                if node.get(part) is None:
                    node[part] = _blank(".".join(parts[: depth + 1]))
                node = node[part]
        else:
            # A scalar in place of a section: the schema reports that at its line.
            return None
    return None


def _blank(name: str) -> Any:
    """Initial value of an absent section or list: its default for a list, empty for a section."""
    known = keys()
    if f"{normal(name)}.{ITEM}" not in known:
        return {}
    return [{k: v for k, v in item.items() if v is not None} for item in known[normal(name)].default or []]
