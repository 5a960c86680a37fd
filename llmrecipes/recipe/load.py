"""A recipe file and command-line overrides to a checked `Recipe`, with every problem named at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from llmrecipes.errors import UserError
from llmrecipes.recipe import document, rules
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.explain import explain
from llmrecipes.recipe.overrides import Override, apply, parse_override
from llmrecipes.recipe.schema import Recipe

# A resolved recipe in a run directory keeps the name of the recipe it came from.
RESOLVED_NAME = "recipe.yaml"


@dataclass(frozen=True)
class Loaded:
    """A checked recipe and where it came from.

    `lines` maps dotted keys that stand in the file to line numbers, `overridden` those set on the command line to the
    override's text. `hash` is `recipe_hash(recipe)`.
    """

    recipe: Recipe
    path: Path
    lines: Mapping[str, int]
    overridden: Mapping[str, str]
    hash: str

    def where(self, key: str) -> str:
        """Place of a key (or of the nearest section around it) for messages: file and line, or the override."""
        return _where(key, self.path, self.lines, self.overridden)


def recipes_dir() -> Path:
    """Folder of the named recipes: `LLMRECIPES_RECIPES`, else `recipes/` of this checkout."""
    configured = os.environ.get("LLMRECIPES_RECIPES")
    return Path(configured) if configured else Path(__file__).parents[2] / "recipes"


def names(directory: Path | None = None) -> list[str]:
    """Names of the recipes in a folder, sorted."""
    return sorted(path.stem for path in (directory or recipes_dir()).glob("*.yaml"))


def load(name_or_path: str, overrides: Sequence[str] = (), directory: Path | None = None) -> Loaded:
    """Read, override and check one recipe.

    Args:
        name_or_path: name in `directory`, or path of a YAML file (anything with a slash or a YAML suffix).
        overrides: `key.path=value`, values read as YAML; a later one wins over an earlier one.
        directory: folder of named recipes; None: `recipes_dir()`.

    Raises:
        UserError: no such recipe, unreadable file, or any problem in it; all problems are in one message.
    """
    path = _shown(find(name_or_path, directory or recipes_dir()))
    parsed = document.parse(_read(path))
    found = list(parsed.problems)
    data = parsed.data
    if data is None and not found:
        found.append(Problem("", "the file is empty", "a recipe has at least name, model, train and optimizer"))
    elif data is not None and not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        found.append(Problem("", f"{kind} at the top", "a recipe is a mapping of keys", line=1))
    misspelt: list[UserError] = []
    changes: list[Override] = []
    for text in overrides:
        try:
            changes.append(parse_override(text))
        except UserError as error:
            misspelt.append(error)
    overridden = {change.key: change.text for change in changes}

    recipe = None
    if isinstance(data, dict):
        for change in changes:
            problem = apply(data, change)
            if problem:
                found.append(problem)
        try:
            recipe = Recipe.model_validate(data)
        except ValidationError as error:
            reported = {problem.key for problem in found}
            found += [problem for problem in explain(error) if problem.key not in reported]
        else:
            found += _check_name(recipe, path, overridden) + rules.check(recipe)
    if found or misspelt or recipe is None:
        raise _error(found, misspelt, path, parsed.lines, overridden)
    return Loaded(recipe, path, parsed.lines, overridden, recipe_hash(recipe))


def find(name_or_path: str, directory: Path) -> Path:
    """The file of a recipe; UserError with the nearest names if there is none."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "no such file"
            raise UserError(what, where=str(path), rule="RECIPE is a name in recipes/ or the path of a YAML file")
        return path
    known = names(directory)
    if name_or_path in known:
        return directory / f"{name_or_path}.yaml"
    close = get_close_matches(name_or_path, known, n=3, cutoff=0.4)
    raise UserError(
        f"no recipe named {name_or_path!r} in {directory}",
        rule="RECIPE is a name in recipes/ or the path of a YAML file",
        fix=f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}",
    )


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out, as YAML that `load` takes again."""
    return document.dump(recipe.model_dump(mode="json"))


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 (hex) of the resolved recipe's canonical JSON; comments, order and spelling of the file do not matter."""
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(document.MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(raw) > document.MAX_BYTES:
        raise UserError("larger than 1 MiB", where=str(path), rule="a recipe is a short text file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"byte 0x{raw[error.start]:02x} is not UTF-8", where=f"{path}:{line}",
                        rule="recipes are UTF-8 text") from error  # fmt: skip


def _shown(path: Path) -> Path:
    """The path as messages show it: relative to the working directory where it lies below."""
    here = Path.cwd()
    absolute = path.absolute()
    return absolute.relative_to(here) if absolute.is_relative_to(here) else path


def _check_name(recipe: Recipe, path: Path, overridden: Mapping[str, str]) -> list[Problem]:
    if "name" in overridden or path.name == RESOLVED_NAME or recipe.name == path.stem:
        return []
    return [
        Problem(
            "name",
            f"{recipe.name!r} in a file named {path.name}",
            "a recipe has the name of its file, so that two recipes never share runs/<name>",
            f"name: {path.stem}",
        )
    ]


def _where(key: str, path: Path, lines: Mapping[str, int], overridden: Mapping[str, str]) -> str:
    name = key
    while name:
        if name in overridden:
            return f"override {overridden[name]!r}"
        if name in lines:
            return f"{path}:{lines[name]}"
        name = name.rpartition(".")[0]
    return str(path)


def _error(
    problems: list[Problem],
    misspelt: list[UserError],
    path: Path,
    lines: Mapping[str, int],
    overridden: Mapping[str, str],
) -> UserError:
    """One error for everything: problems of the file in its order, then overrides that could not be read."""
    errors = []
    for problem in sorted(problems, key=lambda each: each.line or lines.get(each.key, 0)):
        place = f"{path}:{problem.line}" if problem.line else _where(problem.key, path, lines, overridden)
        where = f"{place}: {problem.key}" if problem.key else place
        errors.append(UserError(problem.what, where=where, rule=problem.rule, fix=problem.fix))
    errors += misspelt
    if len(errors) == 1:
        return errors[0]
    return UserError("\n".join([f"{path}: {len(errors)} problems", *(str(error) for error in errors)]))
