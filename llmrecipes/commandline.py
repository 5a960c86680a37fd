"""Commands suggested to users, quoted for a shell; the only module that formats them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmrecipes.runfiles import RunFiles

PROGRAM = "llmrecipes"
RUNS_DIR, DATA_DIR = Path("runs"), Path("data")
"""Defaults of `--runs-dir` and `--data-dir` if neither the option nor its variable is set."""
RUNS_VARIABLE = "LLMRECIPES_RUNS"
DATA_VARIABLE = "LLMRECIPES_DATA"

Value = str | int | float | Path | bool | None


def command_line(
    name: str,
    *arguments: str | Path,
    overrides: Sequence[str] = (),
    options: Mapping[str, Value] | None = None,
    runs_dir: Path | None = None,
    data_dir: Path | None = None,
) -> str:
    """A command that the command line parses to these arguments, whatever they contain.

    Args:
        name: of the command, for example `train` or `bench step`.
        arguments: positional ones.
        overrides: `key.path=value`, which follow them.
        options: by name without dashes, such as `run-id`; None and False omit an option, True is a flag.
        runs_dir, data_dir: omitted if they are the default in every shell, including this one; None: the command
            does not have the option.
    """
    given: dict[str, Value] = dict(options or {})
    if runs_dir is not None and not _is_default(runs_dir, RUNS_DIR, RUNS_VARIABLE):
        given["runs-dir"] = runs_dir
    if data_dir is not None and not _is_default(data_dir, DATA_DIR, DATA_VARIABLE):
        given["data-dir"] = data_dir
    words = [PROGRAM, *name.split()]
    positional = [str(argument) for argument in (*arguments, *overrides)]
    dashed = any(word.startswith("-") for word in positional)
    flags = [word for option, value in given.items() for word in _option(option, value)]
    # Everything after `--` is positional, so the options go before it.
    words += [*flags, "--", *positional] if dashed else [*positional, *flags]
    return shlex.join(words)


def resume_command(run_dir: Path, *, data_dir: Path | None = None) -> str:
    """The command that resumes a run, or starts one whose directory has only been prepared.

    Args:
        run_dir: `<runs-dir>/<recipe>/<run-id>`.
        data_dir: where its prepared data is; None: the default.
    """
    run = RunFiles(run_dir)
    return command_line(
        "train", run.recipe_file, options={"run-id": run.run_id}, runs_dir=run.runs_dir, data_dir=data_dir
    )


def _is_default(path: Path, default: Path, variable: str) -> bool:
    return path == default and os.environ.get(variable) in (None, "", str(default))


def _option(name: str, value: Value) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    text = str(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
