"""The commands that run something: parsing and printing only. Each imports its work when it runs."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.errors import ExitCode
from llmrecipes.faults.signals import early_signals

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Name in recipes/, or path of a YAML file.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, for example train.train_iters=50.")
]
RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run directory, recipe/run-id, run id, or a recipe's name for its newest run."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunsOption = Annotated[Path, typer.Option("--runs-dir", envvar="LLMRECIPES_RUNS", help="Where runs are kept.")]
DataOption = Annotated[Path, typer.Option("--data-dir", envvar="LLMRECIPES_DATA", help="Where prepared data is kept.")]
RanksOption = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", help="Ranks; default: all GPUs, else the fewest the layout takes."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME", help="Plan for this cluster profile (or YAML file), not this machine."),
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", metavar="N", min=1, help="Nodes of the cluster; default: the fewest it takes.")
]
RUNS, DATA = Path("runs"), Path("data")


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    for command in (train, prepare, smoke, verify, upcycle, generate, runs, ui):
        app.command(command.__name__)(command)


@early_signals()
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: RanksOption = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Name of the run; one that exists goes on.")
    ] = None,
    overfit_batch: Annotated[
        bool, typer.Option("--overfit-batch", help="Learn one batch by heart, or say why not.")
    ] = False,
    anomaly: Annotated[
        bool, typer.Option("--anomaly", help="Name the first module that gives a NaN or infinity (slow).")
    ] = False,
    profile_steps: Annotated[int, typer.Option("--profile", metavar="N", min=0, help="Profile N steps.")] = 0,
    sample: Annotated[bool, typer.Option(help="End with a text sample.")] = True,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="Start again after a fault, at most N times.")
    ] = 0,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume although its learning rate or data order changes."),
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Move what the run has recorded aside, and start at step 0.")
    ] = False,
    nnodes: Annotated[
        int, typer.Option("--nnodes", metavar="N", min=1, help="Machines of this run; start it on each of them.")
    ] = 1,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", metavar="K", help="Which of them this is, from 0; pods know.")
    ] = None,
    rdzv: Annotated[
        str | None, typer.Option("--rdzv", metavar="HOST:PORT", help="Where machine 0 listens; pods know.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="Cluster profile this machine belongs to.")
    ] = None,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Train a recipe here, or go on with a run (the same command with its --run-id)."""
    from llmrecipes.console import setup_logging
    from llmrecipes.launch.ranks import node
    from llmrecipes.recipe.load import load
    from llmrecipes.train.spec import RunOptions
    from llmrecipes.workflow.run import Paths, TrainOptions
    from llmrecipes.workflow.train import train as start

    setup_logging()
    here = node(nnodes, node_rank, rdzv, os.environ) if nnodes > 1 else None
    asked = RunOptions(
        overfit_batch=overfit_batch, anomaly=anomaly, profile_steps=profile_steps, sample=sample,
        from_scratch=from_scratch,
    )  # fmt: skip
    options = TrainOptions(nproc, run_id, cluster, here, max_restarts, accept_changes, asked)
    return start(load(recipe, overrides or []).recipe, Paths(runs_dir, data_dir), options, _say)


@early_signals()
def prepare(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every file's hash and the splits of what is there.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Processes; default: all cores.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataOption = DATA,
) -> None:
    """Turn a recipe's sources into a tokenizer and tokens; does nothing where they are there."""
    from llmrecipes.console import setup_logging
    from llmrecipes.data.prepare import prepare as make
    from llmrecipes.recipe.load import load

    setup_logging()
    prepared = make(load(recipe, overrides or []).recipe, data_dir, workers=workers, progress=None if as_json else _say)
    documents = prepared.verify() if verify else None
    if as_json:
        values = {"path": str(prepared.path), "verified_documents": documents}
        print(json.dumps({**values, **prepared.manifest.model_dump(mode="json")}, indent=2))
        return
    for split in ("train", "valid", "test"):
        counts = prepared.manifest.counts(split)
        print(f"{split:>6}  {counts.documents:>9,} documents  {counts.tokens:>13,} tokens  {counts.bytes:>15,} bytes")
    print(
        f"{prepared.path}"
        + ("" if documents is None else f": all hashes right, {documents:,} documents in one split each")
    )


@early_signals()
def smoke(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: RanksOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Rehearse a recipe with a small model of its kind: train, save, resume, compare."""
    from llmrecipes.console import setup_logging
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.run import Paths
    from llmrecipes.workflow.smoke import smoke as rehearse

    setup_logging()
    result = rehearse(
        load(recipe, overrides or []).recipe,
        Paths(runs_dir, data_dir),
        nproc,
        (lambda _line: None) if as_json else _say,
    )
    print(json.dumps(result.as_dict(), indent=2) if as_json else result.as_text())
    return int(ExitCode.DONE if result.ok else 1)


def upcycle(
    run: RunArgument,
    overrides: OverridesArgument = None,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Name of the new run.")] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Turn a dense run into the start of a mixture of experts (model.num_moe_experts=8 ...) with the same loss."""
    from llmrecipes.console import number, setup_logging
    from llmrecipes.workflow.run import checked_run_id, new_run_id
    from llmrecipes.workflow.runs import find_run
    from llmrecipes.workflow.upcycle import upcycle as make

    setup_logging()
    run_id = new_run_id() if run_id is None else checked_run_id(run_id)
    made = make(find_run(run, runs_dir), overrides or [], runs_dir, run_id)
    if as_json:
        print(json.dumps(asdict(made)))
        return
    print(f"upcycled {made.dense_run}, step {made.dense_step}, {number(made.dense_parameters)} parameters")
    print(f"to       {made.run_dir}, {number(made.parameters)} parameters, {number(made.active_parameters)} active")
    elsewhere = "" if runs_dir == RUNS else f" --runs-dir {shlex.quote(str(runs_dir))}"
    recipe = shlex.quote(f"{made.run_dir}/recipe.yaml")
    print(f"go on:   llmrecipes train {recipe} --run-id {run_id}{elsewhere}")


@early_signals()
def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    iters: Annotated[int, typer.Option("--iters", metavar="N", min=1, help="Steps to compare.")] = 5,
    tolerance: Annotated[float, typer.Option("--tolerance", metavar="T", help="Largest relative difference.")] = 1e-5,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", help="Ranks; default: two replicas of the smallest layout.")
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Prove that a recipe's layout computes the same training as one process, with a small model of its kind."""
    from llmrecipes.console import console, setup_logging
    from llmrecipes.recipe.load import load
    from llmrecipes.workflow.run import Paths
    from llmrecipes.workflow.verify import VerifyOptions
    from llmrecipes.workflow.verify import verify as compare

    setup_logging()
    options = VerifyOptions(iters, tolerance, nproc)
    log = (lambda _line: None) if as_json else _say
    answer = compare(load(recipe, overrides or []).recipe, Paths(runs_dir, data_dir), options, log)
    if as_json:
        print(json.dumps(answer.result.as_dict(), indent=2))
    else:
        from llmrecipes.verify.report import report

        console().print(report(answer.result))
        _say(f"drawn in {answer.folder / 'verify.svg'}")
    return int(ExitCode.DONE if answer.result.ok else 1)


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")] = "def ",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="0 for all.")] = 40,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1)] = 1,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Continue a prompt with a run's newest checkpoint."""
    from llmrecipes.console import setup_logging
    from llmrecipes.workflow.generate import Request, samples
    from llmrecipes.workflow.runs import find_run

    setup_logging()
    request = Request(prompt, max_new_tokens, temperature, top_k, top_p, seed, num_samples)
    for sample in samples(find_run(run, runs_dir), data_dir, request):
        if as_json:
            print(json.dumps({"step": sample.step, "prompt": prompt, "text": sample.text, "tokens": sample.tokens}))
        else:
            print(f"{sample.prompt}{sample.text}\n")


def runs(as_json: JsonOption = False, runs_dir: RunsOption = RUNS) -> None:
    """The runs there are, and how far they are."""
    from llmrecipes.tracking.runs import list_runs
    from llmrecipes.workflow.runs import table

    found = list_runs(runs_dir)
    print(json.dumps([run.as_dict() for run in found], indent=2) if as_json else table(found))


def ui(port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 5000, runs_dir: RunsOption = RUNS) -> None:
    """Open MLflow on the runs, on this machine only."""
    from llmrecipes.tracking.ui import serve

    serve(runs_dir, port)


def _say(line: str) -> None:
    from llmrecipes.console import console

    console().print(line, markup=False)
