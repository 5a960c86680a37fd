"""`llmrecipes search`: parsing and printing only."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from llmrecipes.cli.options import (
    DATA,
    RUNS,
    DataOption,
    JsonOption,
    OverridesArgument,
    RanksOption,
    RecipeArgument,
    RunsOption,
)
from llmrecipes.errors import ExitCode
from llmrecipes.faults.signals import early_signals


@early_signals()
def search(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: Annotated[int, typer.Option("--workers", metavar="N", min=1, help="Trials at a time.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the study, or join the processes that work on it.")
    ] = False,
    nproc: RanksOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Search hyperparameters: each trial is a training of its own.

    The recipe's section search has the space, the sampler and the limits.
    """
    from llmrecipes.commandline import command_line
    from llmrecipes.console import console, setup_logging
    from llmrecipes.launch.registry import launcher
    from llmrecipes.recipe.load import load
    from llmrecipes.search.command import search as start
    from llmrecipes.search.target import here
    from llmrecipes.workflow.run import Paths

    def say(line: str) -> None:
        if not as_json:
            console().print(line, markup=False)

    setup_logging()
    paths = Paths(runs_dir, data_dir)
    result = start(
        load(recipe, overrides or []).recipe,
        lambda: here(launcher("local"), {}, paths, workers, nproc),
        resume=resume,
        log=say,
    )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
        return int(result.code)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(result.trials.items()))
    say(f"study    {result.study}: {counts}")
    for best in result.best:
        values = " ".join(f"{key}={value}" for key, value in best["values"].items())
        measured = ", ".join(f"{name} {value:.5g}" for name, value in best.items() if name not in ("number", "values"))
        say(f"best     trial {best['number']}: {measured}  {values}")
    for path in result.recipes:
        say(f"train:   {command_line('train', path, runs_dir=runs_dir, data_dir=data_dir)}")
    return int(result.code if result.best or result.code != ExitCode.DONE else 1)
