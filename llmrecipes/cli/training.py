"""`train`, `prepare`, `smoke`, `lr-range`, `verify`, `upcycle` and `convert`: parsing and printing only."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import (
    DATA,
    NO_OVERRIDES,
    RUNS,
    DataOption,
    FirstStageOption,
    JsonOption,
    NewRunIdOption,
    NodeCountOption,
    NodeRankOption,
    OverridesArgument,
    RanksOption,
    RecipeArgument,
    RendezvousOption,
    RunArgument,
    RunIdOption,
    RunsOption,
    with_options,
)
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from rich.text import Text

    from llmrecipes.verify.coordinates import Coordinates
    from llmrecipes.workflow.lr_range import LrRange


@early_signals()
@with_options(options="launch.run_options.RunOptions")
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    nproc: RanksOption = None,
    run_id: RunIdOption = None,
    options: Any = None,
    nnodes: NodeCountOption = 1,
    node_rank: NodeRankOption = None,
    rdzv: RendezvousOption = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            "--min-nodes",
            metavar="M",
            min=1,
            help="Start with at least M of the N nodes if some do not join (train.elastic); default: N.",
        ),
    ] = None,
    join_seconds: Annotated[
        float,
        typer.Option("--join-seconds", metavar="S", min=0, help="With --min-nodes, wait S seconds for all nodes."),
    ] = 180.0,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Use the environment of this cluster profile.",
            autocompletion=completion.clusters,
        ),
    ] = None,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Train a recipe on this machine, or resume a run.

    To resume, repeat the command with the run's --run-id.
    """
    from llmrecipes.console import setup_logging
    from llmrecipes.launch.ranks import node
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.run import Paths, TrainOptions
    from llmrecipes.workflow.train import train as start

    setup_logging()
    train_options = TrainOptions(
        nproc=nproc,
        run_id=run_id,
        cluster=cluster,
        node=node(nnodes, node_rank, rdzv, os.environ) if nnodes > 1 else None,
        min_nodes=min_nodes,
        join_seconds=join_seconds,
        run=options,
    )
    return start(load(recipe, overrides).recipe, Paths(runs_dir, data_dir), train_options, _say)


@early_signals()
def prepare(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check all file hashes, that no document is in two splits, and with near_duplicates that no "
            "near-copy of training text is held out.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="Start N worker processes; default: all cores."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="ray",
            help="Run on a Ray cluster (RAY_ADDRESS, or one on this machine) instead of processes of this machine; "
            "--workers limits the CPUs.",
        ),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataOption = DATA,
) -> None:
    """Tokenize a recipe's data, unless it is already prepared."""
    from llmrecipes.console import setup_logging
    from llmrecipes.data.prepare import prepare as make
    from llmrecipes.data.steps.split import SPLITS
    from llmrecipes.recipe.load import load

    setup_logging()
    log = None if as_json else _say
    prepared = make(load(recipe, overrides).recipe, data_dir, workers=workers, on=on, progress=log)
    documents, copies = None, None
    if verify:
        from llmrecipes.data.folder.leaks import check_near_copies  # imports megatron-core

        documents = prepared.verify()
        copies = check_near_copies(prepared)
    if as_json:
        near = None if copies is None else asdict(copies)
        values = {"path": str(prepared.path), "verified_documents": documents, "near_copies": near}
        print(json.dumps({**values, **prepared.manifest.model_dump(mode="json")}, indent=2))
        return
    rows = [("split", "documents", "tokens", "bytes")]
    for split in SPLITS:
        counts = prepared.manifest.counts(split)
        rows.append((split, f"{counts.documents:,}", f"{counts.tokens:,}", f"{counts.bytes:,}"))
    checked = "" if documents is None else f": all hashes match, {documents:,} documents, none in two splits"
    show(TextTable(rows, right=(1, 2, 3)), f"{prepared.path}{checked}")
    if copies is not None:
        typer.echo(str(copies))


@early_signals()
def smoke(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    nproc: RanksOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Rehearse a recipe with a small model: train, save, resume.

    The losses after resuming must equal those of an uninterrupted run.
    """
    from llmrecipes.console import setup_logging
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.run import Paths
    from llmrecipes.workflow.smoke import smoke as rehearse

    setup_logging()
    result = rehearse(load(recipe, overrides).recipe, Paths(runs_dir, data_dir), nproc, _silent if as_json else _say)
    print(json.dumps(result.as_dict(), indent=2) if as_json else result.as_text())
    return int(ExitCode.DONE if result.ok else 1)


@early_signals()
def lr_range(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    low: Annotated[float, typer.Option("--low", metavar="LR", help="Start at this learning rate.")] = 1e-6,
    high: Annotated[float, typer.Option("--high", metavar="LR", help="End at this learning rate.")] = 1.0,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Train for N steps.")] = 100,
    nproc: RanksOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Plot the loss to an .svg, .png or .pdf file.")
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Find a learning rate by raising it during training.

    It is a first guess within minutes, from where the loss is lowest; `llmrecipes search` compares full runs.
    """
    from llmrecipes.console import console, setup_logging
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow import lr_range as workflow
    from llmrecipes.workflow.run import Paths

    if plot is not None:
        from llmrecipes.scaling.plot import require_file

        require_file(plot)
    setup_logging()
    loaded = load(recipe, overrides).recipe
    log = _silent if as_json else _say
    result = workflow.lr_range(loaded, Paths(runs_dir, data_dir), low, high, steps, nproc, log)
    if plot is not None:
        workflow.draw(result, plot)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
        return
    for line in lr_range_lines(result):
        console().print(line, soft_wrap=True)


def lr_range_lines(result: LrRange) -> Iterator[str | Text]:
    """The curve, and what it says."""
    from llmrecipes.cli.comparison import Series
    from llmrecipes.cli.comparison import plot as plotted

    xs = [math.log10(rate) for rate in result.rates]
    yield "smoothed loss over log10 of the learning rate:"
    yield from plotted([Series("a", xs, result.smoothed)], width=60, height=14, braille=True)
    yield f"lowest     {result.lowest:.2e}"
    yield f"diverged   {'no' if result.diverged is None else f'{result.diverged:.2e}'}"
    if result.suggestion is None:
        yield f"suggestion none: {result.advice}"
    else:
        yield f"suggestion optimizer.lr={result.suggestion:.2e}"
        yield f"           {result.rule}"


@early_signals()
def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    iters: Annotated[int, typer.Option("--iters", metavar="N", min=1, help="Compare N steps.")] = 5,
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="T", help="Accept relative differences up to T.")
    ] = 1e-5,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", help="Use N ranks; default: two replicas of the smallest layout."),
    ] = None,
    stage: FirstStageOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Compare a recipe's parallel layout with a single process.

    Trains the same small model in both; losses, gradients and weights must agree.
    """
    from llmrecipes.console import setup_logging
    from llmrecipes.recipe.derived.stage_runs import as_run, stage_named, stage_recipes
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.run import Paths
    from llmrecipes.workflow.verify import VerifyOptions
    from llmrecipes.workflow.verify import verify as compare

    setup_logging()
    options = VerifyOptions(iters, tolerance, nproc)
    loaded = load(recipe, overrides).recipe
    if loaded.stages or stage is not None:
        loaded = as_run(stage_recipes(loaded)[0] if stage is None else stage_named(loaded, stage))
    answer = compare(loaded, Paths(runs_dir, data_dir), options, _silent if as_json else _say)
    if as_json:
        print(json.dumps(answer.result.as_dict(), indent=2))
    else:
        from llmrecipes.console import console
        from llmrecipes.verify.report import report

        console().print(report(answer.result))
        _say(f"plot: {answer.folder / 'verify.svg'}")
    return int(ExitCode.DONE if answer.result.ok else 1)


@early_signals()
def coordinates(
    recipe: RecipeArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    widths: Annotated[
        str, typer.Option("--widths", metavar="N,N,...", help="Compare these values of hidden_size.")
    ] = "64,128,256,512",
    iters: Annotated[int, typer.Option("--iters", metavar="N", min=1, help="Train N steps per width.")] = 5,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Check that activations do not grow with the width.

    Trains small models in one process. With model.use_mup activations are flat; otherwise they grow.
    """
    from llmrecipes.console import setup_logging
    from llmrecipes.recipe.load import load
    from llmrecipes.verify.coordinates import MOST_GROWTH
    from llmrecipes.workflow.run import Paths
    from llmrecipes.workflow.verify import coordinates as measure

    setup_logging()
    try:
        chosen = [int(width) for width in widths.split(",")]
    except ValueError:
        raise UserError(widths, where="--widths", rule="must be comma-separated integers", fix="64,128,256") from None
    measured = measure(
        load(recipe, overrides).recipe, Paths(runs_dir, data_dir), chosen, iters, _silent if as_json else _say
    )
    if as_json:
        print(json.dumps(measured.as_dict(), indent=2))
    else:
        show(*coordinate_lines(measured, MOST_GROWTH))
    return int(ExitCode.DONE if measured.ok else 1)


def upcycle(
    run: RunArgument,
    overrides: OverridesArgument = NO_OVERRIDES,
    run_id: NewRunIdOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Turn a dense run into a mixture-of-experts run.

    The new run starts with the dense run's loss. Example of overrides: model.num_moe_experts=8.
    """
    from llmrecipes.commandline import resume_command
    from llmrecipes.console import number, setup_logging
    from llmrecipes.models.upcycle import upcycle as make
    from llmrecipes.rundir import Run
    from llmrecipes.runfiles import checked_run_id

    setup_logging()
    run_id = checked_run_id(run_id)
    created = make(Run.find(run, runs_dir).path, overrides, runs_dir, run_id)
    if as_json:
        print(json.dumps(created.as_dict()))
        return
    origin = created.origin
    parameters, active, dense = (number(origin[key]) for key in ("parameters", "active_parameters", "dense_parameters"))
    print(f"upcycled {origin['dense_run']}, step {origin['dense_step']}, {dense} parameters")
    print(f"to       {created.run_dir}, {parameters} parameters, {active} active")
    print(f"train:   {resume_command(Path(created.run_dir))}")


@early_signals()
def convert(
    run: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="ENGINE",
            help="Engine of the new run: megatron or deepspeed.",
            autocompletion=completion.engines,
        ),
    ],
    overrides: OverridesArgument = NO_OVERRIDES,
    run_id: NewRunIdOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Copy a run to a different engine or ZeRO stage.

    The new run resumes from the newest checkpoint, with its optimizer state. Example of overrides: layout.zero.stage=3.
    """
    from llmrecipes.commandline import resume_command
    from llmrecipes.console import setup_logging
    from llmrecipes.models.convert import convert as make
    from llmrecipes.rundir import Run
    from llmrecipes.runfiles import checked_run_id

    setup_logging()
    run_id = checked_run_id(run_id)
    created = make(Run.find(run, runs_dir).path, to, overrides, runs_dir, run_id)
    if as_json:
        print(json.dumps(created.as_dict()))
        return
    origin = created.origin
    stage = "" if origin["zero_stage"] is None else f", layout.zero.stage {origin['zero_stage']}"
    print(f"converted {origin['from_run']}, step {origin['step']}, saved by engine {origin['from_engine']}")
    print(f"to        {created.run_dir}, engine {origin['engine']}{stage}")
    print(f"resume:   {resume_command(Path(created.run_dir))}")


def _say(line: str) -> None:
    from llmrecipes.console import console

    console().print(line, markup=False)


def _silent(_line: str) -> None:
    pass


def coordinate_lines(measured: Coordinates, most: float) -> Iterator[str | TextTable]:
    """Activations in the first and the last step, and how they grow with the width."""
    steps = sorted({0, measured.steps - 1})
    for step in steps:
        rows = [("hidden_size", *map(str, measured.widths), "growth")]
        rows += [
            (name, *(f"{value:.4g}" for value in values[step]), f"{measured.growth(name, step):+.2f}")
            for name, values in measured.values.items()
        ]
        yield f"mean absolute activation in step {step + 1}, and its growth with width (exponent)"
        yield TextTable(rows, right=range(1, len(rows[0])))
        yield ""
    worst = measured.growth(measured.worst)
    if measured.ok:
        fastest = f"{measured.worst}: {worst:+.2f}"
        yield f"flat: after {measured.steps} steps nothing grows faster than width^{most:g} ({fastest})"
    else:
        yield f"growing: {measured.worst} grows with width^{worst:.2f}, above {most:g}"
