"""`runs`, `diagnose`, `generate`, `ui` and `tensorboard`: parsing and printing only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import DATA, RUNS, DataOption, JsonOption, RunArgument, RunsOption, with_options
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from llmrecipes.engine.sampling import Sampling
    from llmrecipes.tracking.run_list import RunSummary

COLUMNS = ("run", "job", "state", "step", "loss", "valid loss", "newest checkpoint", "started")
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Serve on this TCP port.")]


def runs(as_json: JsonOption = False, runs_dir: RunsOption = RUNS) -> None:
    """List runs with their job, state, step and loss."""
    from llmrecipes.launch.listing import runs_with_jobs

    listed = runs_with_jobs(runs_dir)
    if as_json:
        print(json.dumps([run.as_dict() for run in listed], indent=2))
    else:  # oldest first
        show(TextTable([COLUMNS, *map(_row, listed)]) if listed else "no runs yet: llmrecipes train gpt-tiny")


def _row(run: RunSummary) -> tuple[str, ...]:
    started = "" if run.started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    return (
        f"{run.recipe}/{run.run_id}",
        run.job or "",
        run.state,
        f"{run.step or 0}/{run.total or '?'}",
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.valid_loss is None else f"{run.valid_loss:.4f}",
        str(run.checkpoints[-1]) if run.checkpoints else "none",
        started,
    )


def diagnose(
    run: RunArgument, as_json: JsonOption = False, runs_dir: RunsOption = RUNS, data_dir: DataOption = DATA
) -> None:
    """Check a run for common errors, with evidence and advice."""
    from llmrecipes.rundir import Run
    from llmrecipes.workflow import diagnose as workflow

    diagnosis = workflow.diagnose(Run.find(run, runs_dir), data_dir)
    print(workflow.as_json(diagnosis) if as_json else workflow.text(diagnosis))


@with_options(sampling="engine.sampling.Sampling")
def generate(
    run: RunArgument,
    *,
    prompt: Annotated[str, typer.Option("--prompt", help="Continue this text.")] = "def ",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Generate at most N tokens.")
    ] = 128,
    sampling: Sampling,
    num_samples: Annotated[
        int, typer.Option("--num-samples", metavar="N", min=1, help="Generate N continuations.")
    ] = 1,
    ema: Annotated[
        bool, typer.Option("--ema", help="Use the moving average of the weights (`optimizer.ema_decay`).")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a message, using the run's chat template.")
    ] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Generate text with a run's newest checkpoint."""
    from llmrecipes.console import setup_logging
    from llmrecipes.rundir import Run
    from llmrecipes.workflow.generate import GenerationRequest, samples

    setup_logging()
    request = GenerationRequest(prompt, max_new_tokens, sampling, num_samples, ema, chat)
    for sample in samples(Run.find(run, runs_dir).path, data_dir, request):
        if as_json:
            print(json.dumps({"step": sample.step, "prompt": prompt, "text": sample.text, "tokens": sample.tokens}))
        else:
            print(f"{sample.prompt}{chr(10) if chat else ''}{sample.text}\n")


def ui(port: PortOption = 5000, runs_dir: RunsOption = RUNS) -> None:
    """Open MLflow on all runs (localhost only)."""
    from llmrecipes.tracking.web import serve_mlflow

    serve_mlflow(runs_dir, port)


def tensorboard(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory, recipe/run-id, run id, or recipe name (its newest run); default: all runs.",
            autocompletion=completion.runs,
        ),
    ] = None,
    port: PortOption = 6006,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Open TensorBoard on a run or on all runs (localhost only)."""
    from llmrecipes.rundir import Run
    from llmrecipes.tracking.run_list import list_runs
    from llmrecipes.tracking.web import serve_tensorboard

    run_dirs = (
        [Path(run_summary.path) for run_summary in list_runs(runs_dir)]
        if run is None
        else [Run.find(run, runs_dir).path]
    )
    if not run_dirs:
        raise UserError("no runs yet", where=str(runs_dir), fix="start one: llmrecipes train gpt-tiny")
    serve_tensorboard(run_dirs, port)
