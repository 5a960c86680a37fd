"""A recipe in the making: values with where each comes from, and what was left out with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmrecipes.errors import UserError
from llmrecipes.recipe import document
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.reading.explain import explain
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.reading.overrides import apply, parse_override
from llmrecipes.recipe.reading.synonyms import synonym
from llmrecipes.recipe.rules import recipe_rules, zero_rules
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import HIDDEN, redact

DROPPABLE = ("layout.", "tracking.", "checkpoint.", "faults.")
"""Keys whose refused value is left out, with the rule: they do not change what is trained."""
SECTIONS = ("model", "train", "optimizer", "scheduler", "checkpoint", "layout", "tracking", "data")
"""In which a key of the original's name is looked for, in this order."""
_ELSEWHERE = {"seed": "train.seed", "split": "data.split", "optimizer": "optimizer.optimizer"}
NO_KEY = "a recipe has no such key"


@dataclass(frozen=True)
class Row:
    """What became of one value.

    Attributes:
        name: in the original; empty for a default that only the original program has.
        original: its value there.
        key: of the recipe; empty: left out.
        value: in the recipe.
        why: how it was changed, or why it was left out.
        differs: leaving it out changes the model or its training.
        wanted: keys of the recipe that it would say.
    """

    name: str
    original: Any
    key: str = ""
    value: Any = None
    why: str = ""
    differs: bool = False
    wanted: tuple[str, ...] = ()


@dataclass
class Draft:
    """Values of a recipe, and the account of the original's.

    Attributes:
        kind: what the original is, for people: "Megatron-LM".
        values: the recipe, as plain data.
        rows: account of every value of the original.
        advice: lines to print at the end.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, name: str = "", original: Any = None, why: str = "") -> None:
        """Write a key of the recipe.

        Args:
            key: dotted.
            value: in the recipe.
            name: in the file; empty: a default of the original program.
            original: value in the file; None: the same.
            why: how it was changed.
        """
        node = self.values
        *sections, leaf = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
        self.rows = [row for row in self.rows if row.key != key]
        self.rows.append(Row(name, value if original is None else original, key, value, why))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key, if it has been written."""
        node: Any = self.values
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def leave(
        self, name: str, original: Any, why: str = NO_KEY, *, differs: bool = False, wanted: tuple[str, ...] = ()
    ) -> None:
        """Account for a value that the recipe does not have; a key or token of a service is not kept."""
        if redact(f"{re.sub(r'\W', '_', name.lstrip('-')).upper()}={original}").endswith(HIDDEN):
            original = HIDDEN
        self.rows.append(Row(name, original, why=why, differs=differs, wanted=wanted))

    def default(self, key: str, value: Any, why: str = "") -> None:
        """Write what the original program has by default, unless the file set it, or the recipe's default is equal."""
        if self.get(key) is None and keys()[key].default != value:
            self.set(key, value, why=why or f"{self.kind}'s default")

    def take(self, name: str, value: Any, *, synonyms: bool = True) -> bool:
        """Write a value whose name is that of a key, or another name for exactly one key with the same meaning."""
        key = key_named(name, synonyms=synonyms)
        if key is None:
            return False
        self.set(key, value, name, value)
        return True

    def change(self, override: str) -> None:
        """Apply `key.path=value`, as at the end of every command."""
        change = parse_override(override)
        problem = apply(self.values, change)
        if problem is not None:
            raise UserError(problem.what, where=f"override {override!r}", rule=problem.rule, fix=problem.fix)
        self.rows = [row for row in self.rows if row.key != change.key]

    def problems(self) -> list[Problem]:
        """What makes the recipe invalid."""
        plain = document.parse(document.dump(self.values)).data
        try:
            recipe = Recipe.model_validate(plain)
        except ValidationError as error:
            return explain(error, {})
        return recipe_rules.check(zero_rules.selected(recipe, {})[0])

    def settle(self, where: Path) -> None:
        """Leave out refused values that change nothing in what is trained.

        Raises:
            UserError: others are refused, or a required key is missing; each with its name in the original.
        """
        for _ in range(len(self.values) * 20):
            problems = self.problems()
            dropped = [each for each in problems if each.key.startswith(DROPPABLE) and self.get(each.key) is not None]
            if not dropped:
                break
            for problem in dropped:
                self._drop(problem)
                if keys()[problem.key].default is True:  # as it is where the key is missing
                    self.set(problem.key, False, why=problem.rule)
        if problems:
            raise document.error_of([self._named(problem) for problem in problems], [], where, {}, {})

    def _drop(self, problem: Problem) -> None:
        section, _, leaf = problem.key.rpartition(".")
        value = self.get(section).pop(leaf)
        row = next((row for row in self.rows if row.key == problem.key), Row("", value))
        self.rows = [each for each in self.rows if each is not row]
        if row.name:
            self.leave(row.name, row.original, problem.rule or problem.what)

    def _named(self, problem: Problem) -> Problem:
        """A problem with the name that the original has for its key, and what the user can type."""
        row = next((row for row in self.rows if row.key == problem.key and row.name), None)
        what = problem.what if row is None else f"{problem.what}, from {row.name}"
        if problem.what == "missing":
            left = next((row for row in self.rows if problem.key in row.wanted), None)
            what = f"{self.kind} does not say it here" if left is None else f"{left.name}: {left.why}"
        fix = problem.fix or f"llmrecipes new --from … {problem.key}=VALUE"
        return Problem(problem.key, what, problem.rule, fix)

    def as_dict(self) -> dict[str, Any]:
        """The account, for programs."""
        rows = [asdict(row) for row in self.rows]
        return {
            "kind": self.kind,
            "translated": [row for row in rows if row["key"] and row["name"]],
            "defaults": [row for row in rows if row["key"] and not row["name"]],
            "left_out": [row for row in rows if not row["key"]],
        }


def key_named(name: str, *, synonyms: bool = True) -> str | None:
    """The key that another program's name means, if it means exactly one, without a difference."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    for section in SECTIONS:
        if f"{section}.{name}" in keys() and not keys()[f"{section}.{name}"].section:
            return f"{section}.{name}"
    foreign = synonym(name) if synonyms else None
    if foreign is None or foreign.note or len(foreign.keys) != 1 or ".N." in foreign.keys[0]:
        return None
    return foreign.keys[0]


def plain(text: str) -> Any:
    """A value on a command line as a number, boolean or text."""
    parsed = document.parse(text)
    return text if parsed.problems or isinstance(parsed.data, dict | list) else parsed.data


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; lists are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
