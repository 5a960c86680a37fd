"""`prune`: parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    RUNS,
    DataOption,
    JsonOption,
    NewRunIdOption,
    OverridesArgument,
    RunArgument,
    RunsOption,
    with_options,
)
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from llmrecipes.recipe.variants.pruned_models import PruneOptions


@early_signals()
@with_options(options="recipe.variants.pruned_models.PruneOptions")
def prune(
    run: RunArgument,
    *,
    overrides: OverridesArgument = NO_OVERRIDES,
    options: PruneOptions,
    data: Annotated[
        str,
        typer.Option("--data", metavar="DATA", help="Measure on train, valid or test data of the run, or TYPE:PATH."),
    ] = "train",
    sequences: Annotated[int, typer.Option("--sequences", metavar="N", min=1, help="Measure on N sequences.")] = 128,
    run_id: NewRunIdOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Turn a run into a smaller or sparser run.

    The new run starts from the parts of the model that contribute most on sample text.
    """
    from llmrecipes.commandline import resume_command
    from llmrecipes.console import number, setup_logging
    from llmrecipes.models.prune import PruningText
    from llmrecipes.models.prune import prune as make
    from llmrecipes.rundir import Run
    from llmrecipes.runfiles import checked_run_id
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    run_id = checked_run_id(run_id)
    created = make(
        Run.find(run, runs_dir).path,
        options,
        PruningText(data, sequences),
        overrides,
        runs_dir,
        data_dir,
        run_id,
        None if as_json else Counted(),
    )
    if as_json:
        print(json.dumps(created.as_dict()))
        return
    origin = created.origin
    before = number(origin["parameters_before"])
    after = number(origin["parameters"])
    text = f" on {origin['tokens']:,} tokens" if "tokens" in origin else ""
    print(f"pruned {origin['run']}, step {origin['step']}, {before} parameters, by {origin['method']}{text}")
    if "layers" in origin:
        print(f"kept   layers {', '.join(map(str, origin['layers']))}")
    zeros = f", {origin['zeros']:.1%} of the layers' weights are zero" if "zeros" in origin else ""
    print(f"to     {created.run_dir}, {after} parameters{zeros}")
    print(f"train: {resume_command(Path(created.run_dir))}")
