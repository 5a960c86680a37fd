"""`grow`: parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.options import RUNS, JsonOption, NewRunIdOption, OverridesArgument, RunsOption
from llmrecipes.faults.signals import early_signals


@early_signals()
def grow(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run to grow from its newest checkpoint, or RUN@STEP.",
            autocompletion=completion.runs,
        ),
    ],
    overrides: OverridesArgument = None,
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", min=1, help="Grow to N layers.")] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="METHOD",
            help="Add layers as identity (default; the loss stays), stack or interpolate.",
        ),
    ] = None,
    hidden_size: Annotated[
        int | None,
        typer.Option("--hidden-size", metavar="N", min=1, help="Grow the residual stream to a multiple of its width."),
    ] = None,
    ffn_hidden_size: Annotated[
        int | None, typer.Option("--ffn-hidden-size", metavar="N", min=1, help="Grow dense MLPs to this width.")
    ] = None,
    moe_ffn_hidden_size: Annotated[
        int | None, typer.Option("--moe-ffn-hidden-size", metavar="N", min=1, help="Grow routed experts to this width.")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option("--heads", metavar="N", min=1, help="Grow to a multiple of the attention heads."),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option("--experts", metavar="N", min=1, help="Grow to a multiple of the experts and of their top k."),
    ] = None,
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
    from llmrecipes.recipe.growing import Growth
    from llmrecipes.runfiles import checked_run_id
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    growth = Growth(layers, by, hidden_size, ffn_hidden_size, moe_ffn_hidden_size, heads, experts)
    created = make(run, growth, overrides or [], runs_dir, checked_run_id(run_id), None if as_json else Counted())
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
