"""`eval`: parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.options import DATA, RUNS, DataOption, JsonOption, RunsOption
from llmrecipes.errors import UserError
from llmrecipes.evaluation import CHECKS, Check


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|DIR",
            help="Run directory, recipe/run-id, run id, or recipe name (its newest run); or a Hugging Face folder.",
            autocompletion=completion.runs,
        ),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME", help="lm-evaluation-harness task or group, or task file; repeatable."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="Perplexity on valid, test, train, stdlib, or TYPE:PATH with a type of data.sources; repeatable. "
            "Default if nothing is asked for: valid.",
        ),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option("--check", metavar="NAME", help=f"Check what it writes: {', '.join(CHECKS)}; repeatable."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Documents of each task and source.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", metavar="N", min=0, help="Examples in a task's context.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", metavar="DIR", help="Folder with more task files.")
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Run the code that task files name, in a process without network and credentials."
        ),
    ] = False,
    text_key: Annotated[
        str, typer.Option("--text-key", metavar="NAME", help="Column of the text in a jsonl or parquet source.")
    ] = "text",
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="N", min=1, help="Tokens that perplexity reads at once; default: seq_length."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", metavar="N", min=1, help="Tokens that a window scores; default: half a window."),
    ] = None,
    prefix: Annotated[int, typer.Option("--prefix", metavar="N", min=1, help="Tokens of a check's prompts.")] = 50,
    length: Annotated[
        int, typer.Option("--length", metavar="N", min=1, help="Tokens of a check's continuations.")
    ] = 50,
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Continuations in a check.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0, help="Of a check's sampled continuations.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of a check's draws.")] = 1234,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Rows in a forward pass of one replica.")
    ] = 8,
    tensor: Annotated[int, typer.Option("--tp", metavar="N", min=1, help="Ranks that share the model.")] = 1,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="All ranks; default: those of --tp.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Evaluate nothing; show the run's evaluations over its steps.")
    ] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Evaluate a model: perplexity, harness tasks, its own texts.

    The model is a run's checkpoint or a Hugging Face folder. Tasks are those of lm-evaluation-harness; checks are of
    repetition, memorisation and bias.
    """
    from llmrecipes.cli.render.evaluation import earlier_lines, lines
    from llmrecipes.console import console, setup_logging
    from llmrecipes.evaluation import history
    from llmrecipes.evaluation.request import Request
    from llmrecipes.workflow.evaluate import Layout, evaluate_run
    from llmrecipes.workflow.runs import find_run

    if compare:
        found = history.read(find_run(run, runs_dir))
        if as_json:
            print(json.dumps(found, indent=2))
            return
        for line in earlier_lines(found):
            console().print(line, markup=False, soft_wrap=True)
        return
    setup_logging()
    request = Request(
        tasks=tuple(task or ()),
        include_path=include_path,
        trust_code=trust_code,
        data=tuple(data or ()),
        text_key=text_key,
        checks=tuple(map(_check, check or ())),
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        window=window,
        stride=stride,
        prefix=prefix,
        length=length,
        samples=samples,
        temperature=temperature,
        seed=seed,
    )
    done = evaluate_run(run, request, runs_dir, data_dir, Layout(tensor, nproc), progress=not as_json)
    if as_json:
        values = {"model": str(done.model), "step": done.step, "results": done.records, "warnings": done.warnings}
        print(json.dumps(values, indent=2))
        return
    for line in lines(done):
        console().print(line, markup=False, soft_wrap=True)


def _check(name: str) -> Check:
    for known in CHECKS:
        if name == known:
            return known
    from difflib import get_close_matches

    near = get_close_matches(name, CHECKS, n=1, cutoff=0.3) or CHECKS[:1]
    raise UserError(f"{name!r}", where="--check", rule=f"one of {', '.join(CHECKS)}", fix=f"--check {near[0]}")
