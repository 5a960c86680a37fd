"""A recipe file and command-line overrides to a validated `Recipe`, with all problems reported at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from llmrecipes.errors import UserError
from llmrecipes.files import recipes_dir
from llmrecipes.nested import leaves
from llmrecipes.recipe import document
from llmrecipes.recipe.derived import layer_pattern
from llmrecipes.recipe.document import Kind, Problem
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.halves import half_of, learned_half
from llmrecipes.recipe.reading import foreign, former, layouts
from llmrecipes.recipe.reading.explain import explain
from llmrecipes.recipe.reading.overrides import Override, apply, parse_override
from llmrecipes.recipe.rules import recipe_rules, zero_rules
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.section import EXECUTION
from llmrecipes.recipe.sections.zero import Zero
from llmrecipes.runfiles import RECIPE

logger = logging.getLogger(__name__)

DEFAULTS_NOTE = "Omitted keys have their default values (docs/reference/keys.md)."
OTHERS = (".sh", ".bash", ".slurm", ".sbatch", ".json", ".toml", ".txt")
"""Suffixes of other programs' configurations."""
BESIDE = ("name", "description", "layouts", "checkpoint", "tracking", "search")
"""Sections and keys that compute nothing in a step."""
_GONE = {
    "gpt-1b-zero3": "gpt-1b layout=zero3",
    "gpt-1b-offload": "gpt-1b layout=offload-24gb",
    "llama3-8b-zero2": "llama3-8b layout=zero2",
}
RECIPES = Kind("recipe", "RECIPE", "recipes/", "name, model, train and optimizer", _GONE)


@dataclass(frozen=True)
class Loaded:
    """A validated recipe and its origin.

    `lines` maps dotted keys in the file to line numbers, `overridden` those set on the command line to the override's
    text.
    """

    recipe: Recipe
    path: Path
    lines: Mapping[str, int]
    overridden: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    """Keys of the file that have no effect with the stage and engine of the recipe; it has their defaults."""

    @cached_property
    def hash(self) -> str:
        """`recipe_hash(recipe)`."""
        return recipe_hash(self.recipe)

    def where(self, key: str) -> str:
        """Location of a key (or of the nearest section around it) for messages: file and line, or the override."""
        return document.where(key, self.path, self.lines, self.overridden)


def names(directory: Path | None = None) -> list[str]:
    """Names of the recipes in a folder, sorted."""
    return document.names(directory or recipes_dir())


def load(name_or_path: str, overrides: Sequence[str] = (), directory: Path | None = None) -> Loaded:
    """Read, override and check one recipe.

    Args:
        name_or_path: name in `directory`, or path of a YAML file (anything with a slash or a YAML suffix).
        overrides: `key.path=value`, values read as YAML; later ones take precedence.
        directory: folder of named recipes; None: `recipes_dir()`.

    Raises:
        UserError: no such recipe, unreadable file, or any problem in it; all problems are in one message.
    """
    plain = Path(name_or_path) if Path(name_or_path).suffix in OTHERS else None
    if plain is not None and plain.is_file():
        foreign.refuse(document.read(plain, RECIPES), plain)
    path = document.shown(document.find(name_or_path, directory or recipes_dir(), RECIPES))
    text = document.read(path, RECIPES)
    try:
        return _loaded(document.parse(text), path, overrides)
    except UserError:
        foreign.refuse(text, path)
        raise


def load_values(values: Mapping[str, object], path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """`load`, of values that were made from another file.

    Args:
        path: the file, for messages.
    """
    parsed = document.parse(document.dump(values))
    return _loaded(replace(parsed, lines={}), path, [f"name={values['name']}", *overrides])


def _loaded(parsed: document.ParsedDocument, path: Path, overrides: Sequence[str]) -> Loaded:
    problems = list(parsed.problems)
    data = parsed.data
    problems += document.require_mapping(parsed, RECIPES)
    misspelt: list[UserError] = []
    changes: list[Override] = []
    for text in overrides:
        try:
            changes.append(parse_override(text, hints=len(misspelt) < document.MAX_SHOWN))
        except UserError as error:
            misspelt.append(error)
    named = [change for change in changes if change.key == "layout" and layouts.is_name(change.value)]
    overridden = {"layout.name" if change in named else change.key: change.text for change in changes}

    recipe = None
    ignored: list[str] = []
    if isinstance(data, dict):
        if (today := former.translated(data)) != data:
            data, parsed = today, replace(parsed, lines={former.current(key): at for key, at in parsed.lines.items()})
            if path.name != RECIPE:
                logger.warning("note: %s: %s", path, former.NOTE)
        for change in named:
            layouts.replace(data, change.value)
        applied = (apply(data, change) for change in changes if change not in named)
        problems += [problem for problem in applied if problem]
        problems += layouts.take(data, parsed.lines)
        pattern, wrong = layer_pattern.take(data)
        problems += wrong
        try:
            recipe = Recipe.model_validate(data)
        except ValidationError as error:
            reported = {problem.key for problem in problems} | ({"model.num_layers"} if wrong else set())
            found = layouts.once(explain(error, parsed.lines), data)
            problems += [problem for problem in found if problem.key not in reported]
        else:
            recipe, ignored = zero_rules.selected(recipe, overridden)
            problems += _check_name(recipe, path, overridden)
            problems += recipe_rules.check(recipe) or ([] if wrong else layer_pattern.contradicted(pattern, recipe))
    if problems or misspelt or recipe is None:
        raise document.error_of(problems, misspelt, path, parsed.lines, overridden)
    if ignored:
        stage = cast(Zero, recipe.layout.zero).stage
        engine = engine_name(recipe)
        names = ", ".join(f"layout.zero.{key}" for key in ignored)
        logger.warning(
            "note: %s: keys without effect at layout.zero.stage %d with engine %s: %s", path, stage, engine, names
        )
    return Loaded(recipe, path, parsed.lines, overridden, tuple(f"layout.zero.{key}" for key in ignored))


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load` accepts: all defaults but those that `layout: auto` is to replace."""
    return document.dump(layouts.left_out(recipe))


def short(recipe: Recipe, comments: Mapping[str, str] | None = None, header: str = "") -> str:
    """What differs from the defaults, as YAML that `load` reads back to an equal recipe; and the weights of a blend.

    Args:
        comments: by dotted key.
    """
    values = changed_values(recipe)
    sources = recipe.data.sources
    for source, shown in zip(sources, values.get("data", {}).get("sources", ()), strict=False):
        if len(sources) > 1:
            shown["weight"] = source.weight
    text = document.dump_for_people(values, comments or {}, header)
    if Recipe.model_validate(document.parse(text).data) != recipe:
        raise RuntimeError(f"the short form of recipe {recipe.name} is of another recipe:\n{text}")
    return text


def changed_values(recipe: Recipe) -> dict[str, Any]:
    """Plain values that are not those of the defaults."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    _drop_made_defaults(recipe, values)
    return values


def _drop_made_defaults(section: BaseModel, values: dict[str, Any]) -> None:
    """Leave out defaults that depend on other keys, which `exclude_defaults` keeps."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel) and name in values:
            _drop_made_defaults(value, values[name])
        elif field.default_factory and value == field.get_default(
            call_default_factory=True, validated_data=vars(section)
        ):
            values.pop(name, None)


def executed(recipe: Recipe) -> dict[str, Any]:
    """How steps are computed, where that differs from the defaults: values by dotted key."""
    values = leaves(changed_values(recipe))
    return {name: value for name, value in values if name.split(".")[0] not in BESIDE and half_of(name) is EXECUTION}


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 (hex) of what is learned: the same however it is executed, and however the file is written."""
    return hash_of(learned_half(recipe))


def hash_of(values: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of plain values as canonical JSON."""
    import hashlib  # not at the top: `llmrecipes list` needs no hash

    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _check_name(recipe: Recipe, path: Path, overridden: Mapping[str, str]) -> list[Problem]:
    # A resolved recipe in a run directory keeps the name of the recipe it came from.
    if "name" in overridden or path.name == RECIPE or recipe.name == path.stem:
        return []
    return [
        Problem(
            "name",
            f"{recipe.name!r} in a file named {path.name}",
            "name must match the file name, so that recipes never share runs/<name>",
            f"name: {path.stem}",
        )
    ]
