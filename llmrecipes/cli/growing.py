"""`grow`: parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import (
    NO_OVERRIDES,
    RUNS,
    JsonOption,
    NewRunIdOption,
    OverridesArgument,
    RunsOption,
    with_options,
)
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from llmrecipes.recipe.variants.growth import Growth


@early_signals()
@with_options(growth="recipe.variants.growth.Growth")
def grow(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run to grow from its newest checkpoint, or RUN@STEP.",
            autocompletion=completion.runs,
        ),
    ],
    growth: Growth,
    overrides: OverridesArgument = NO_OVERRIDES,
    run_id: NewRunIdOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Turn a run into one with a deeper or wider model.

    Wider models and new layers by identity start with the run's loss. The optimizer state is new. Example of overrides:
    train.train_iters=1000.
    """
    from llmrecipes.commandline import resume_command
    from llmrecipes.console import number, setup_logging
    from llmrecipes.models.grow import grow as make
    from llmrecipes.runfiles import checked_run_id
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    created = make(run, growth, overrides, runs_dir, checked_run_id(run_id), None if as_json else Counted())
    if as_json:
        print(json.dumps(created.as_dict()))
        return
    origin = created.origin
    sizes = ", ".join(f"{name} {before:,} to {after:,}" for name, (before, after) in origin["sizes"].items())
    by_method = f", layers by {origin['by']}" if origin["by"] else ""
    print(f"grown  {origin['from_run']}, step {origin['step']}, {number(origin['parameters_before'])} parameters")
    print(f"       {sizes}{by_method}")
    print(f"to     {created.run_dir}, {number(origin['parameters'])} parameters")
    if origin["preserves"]:
        print("loss   unchanged before the first step: the grown model computes the same")
    else:
        print(f"loss   changes before the first step: {origin['by']} does not preserve what the model computes")
    print("       optimizer state and data order start from the beginning")
    print(f"train: {resume_command(Path(created.run_dir))}")
