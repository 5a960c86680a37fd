"""Shell completion: the scripts, and candidates for recipes, recipe keys, cluster profiles, engines and runs.

Nothing here loads torch or reads a run's contents, and an invalid recipe or directory has no completions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.commandline import PROGRAM, RUNS_DIR
from llmrecipes.runfiles import RunFiles

VARIABLE = "_LLMRECIPES_COMPLETE"
"""Set by the scripts when they ask for completions."""

NO_SPACE = "    [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *= ]] && compopt -o nospace 2>/dev/null\n"
"""For bash: no space after `train.train_iters=`."""


class Shell(StrEnum):
    """Shells that have completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell.

    For one session: source <(llmrecipes completion bash). docs/guide/install.md says where to install it.
    """
    print(script(shell))


def script(shell: Shell) -> str:
    """The script that the shell sources."""
    from typer.completion import get_completion_script

    text = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value)
    end = "    return 0\n"
    return text.replace(end, NO_SPACE + end) if shell is Shell.BASH else text


def enable() -> None:
    """Answer the scripts' requests; does nothing in any other process."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init

        completion_init()


def recipes(incomplete: str) -> list[str]:
    """Names of recipes; the shell completes paths."""
    from llmrecipes.recipe.load import names

    return _beginning(names(), incomplete)


def clusters(incomplete: str) -> list[str]:
    """Names of cluster profiles."""
    from llmrecipes.hardware.load import names

    return _beginning(names(), incomplete)


def engines(incomplete: str) -> list[str]:
    """Names of engines."""
    from llmrecipes.recipe.engines import ENGINES

    return _beginning(list(ENGINES), incomplete)


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """`key.path=` from the schema, one section at a time and lists by their first item, then the values of a key.

    bash splits `key=value` into three words, and completes the last one.
    """
    words: list[str] = ctx.params.get("overrides") or []
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={completion}" for completion in _beginning(list(_values(key)), value)]
    if words and words[-1] == "=":
        words = words[:-1]
        return _beginning(list(_values(words[-1])), incomplete) if words else []
    if words and incomplete == "" and os.environ.get("COMP_WORDS", "").endswith("="):
        return list(_values(words[-1]))
    return _beginning([f"{name}=" for name in _keys()], incomplete)


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """`recipe/run-id` of the runs in `--runs-dir`, or only a run id."""
    runs_dir = Path(ctx.params.get("runs_dir") or RUNS_DIR)
    known = RunFiles.all(runs_dir)
    full = _beginning(sorted(run.name for run in known), incomplete)
    return full or _beginning(sorted(run.run_id for run in known), incomplete)


def _beginning(words: list[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _keys() -> Iterator[str]:
    from llmrecipes.recipe.reading.keys import ITEM, keys

    yield from (key.name.replace(f".{ITEM}", ".0") for key in keys().values() if not key.section)


def _values(name: str) -> Iterator[str]:
    """The values of an enumeration, a boolean or null; none for numbers and text."""
    from llmrecipes.recipe.reading.keys import options_of

    for option in options_of(name):
        if option.get("type") == "boolean":
            yield from ("true", "false")
        elif option.get("type") == "null":
            yield "null"
        yield from (str(value) for value in option.get("enum", ()))
        if "const" in option:
            yield str(option["const"])
