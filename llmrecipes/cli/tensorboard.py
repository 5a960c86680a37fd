"""`llmrecipes tensorboard`: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.cli.commands import RUNS, RunsOption
from llmrecipes.errors import UserError


def tensorboard(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory, recipe/run-id, run id, or a recipe's name for its newest run; default: all runs.",
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 6006,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Open TensorBoard on a run or on all runs, on this machine only."""
    from llmrecipes.tracking.runs import list_runs
    from llmrecipes.tracking.tensorboard_ui import serve
    from llmrecipes.workflow.runs import find_run

    run_dirs = [Path(found.path) for found in list_runs(runs_dir)] if run is None else [find_run(run, runs_dir)]
    if not run_dirs:
        raise UserError("no runs yet", where=str(runs_dir), fix="train something first: make train")
    serve(run_dirs, port)
