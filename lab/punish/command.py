"""`punish`: parsing and printing only."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    RUNS,
    DataOption,
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    RunsOption,
)
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.console import setup_logging
from llmrecipes.errors import ExitCode
from llmrecipes.faults.signals import early_signals


@early_signals()
def punish(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    minutes: Annotated[float, typer.Option("--minutes", metavar="M", min=0, help="Inject faults for M minutes.")] = 5.0,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed for choosing faults, ranks and times.")] = 0,
    every: Annotated[
        float | None,
        typer.Option(
            "--every", metavar="SECONDS", min=1, help="Mean seconds between faults; default: one after another."
        ),
    ] = None,
    nproc: Annotated[int, typer.Option("--nproc", metavar="N", min=1, help="Train on N ranks.")] = 4,
    steps: Annotated[int, typer.Option("--steps", metavar="K", min=40, help="Train each run for K steps.")] = 120,
    save_interval: Annotated[
        int, typer.Option("--save-interval", metavar="K", min=1, help="Save every K steps, evaluate every 2 K.")
    ] = 10,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", metavar="NAME", help="Inject this fault; repeatable; default: all.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Inject every fault once instead of for --minutes.")] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Inject faults into runs, and measure recovery.

    Trains short runs of the recipe on this machine, restarts them, and compares them with an uninterrupted one.
    """
    from lab.punish.campaign import begin
    from lab.punish.faults import Pace
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.run import Paths

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    setup_logging()
    loaded = load(recipe, overrides).recipe
    pace = Pace(seed, None if once else minutes, every, save_interval)
    result = begin(loaded, Paths(runs_dir, data_dir), nproc, steps, pace, fault, say)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        show(TextTable(result.rows(), right=(1, 2, 3)), result.summary())
    return int(ExitCode.DONE if result.ok else 1)
