"""`merge`: parsing and printing only."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.options import DATA, RUNS, DataOption, JsonOption, NewRunIdOption, RunsOption
from llmrecipes.errors import UserError
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from llmrecipes.hf.merge_options import MergeOptions


@early_signals()
def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Runs, RUN@STEP for an older checkpoint, or folders that transformers can load.",
            autocompletion=completion.runs,
        ),
    ],
    method: Annotated[
        str, typer.Option("--method", metavar="NAME", help="linear, slerp, task-arithmetic, ties, dare or dare-ties.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORM", help="hf: a folder for transformers; run: a run before its first step."),
    ] = "hf",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write with --to hf; it must not exist.")
    ] = None,
    run_id: NewRunIdOption = None,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="W,W,...", help="One for each model; default: 1 each.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="What the models were fine-tuned from.")
    ] = None,
    density: Annotated[
        str | None,
        typer.Option("--density", metavar="P[,P...]", help="Share of each task vector that stays (ties, dare)."),
    ] = None,
    t: Annotated[float | None, typer.Option("--t", metavar="T", help="Position between two models (slerp).")] = None,
    scale: Annotated[
        float | None, typer.Option("--lambda", metavar="L", help="Factor of the merged task vector; default: 1.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Divide by the sum of the weights; default: linear and ties do.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of what dare drops; default: 0.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="fp32, bf16 or fp16; default: the first model's.")
    ] = None,
    tokenizer: Annotated[bool, typer.Option(help="Compare and write tokenizers.")] = True,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Merge models of one shape into one.

    Tensor by tensor, without a GPU. Of several checkpoints of one run, linear makes their average.
    """
    from llmrecipes.console import number, setup_logging
    from llmrecipes.hf.merge_options import MergeOptions
    from llmrecipes.tracking.progress import Counted
    from llmrecipes.workflow.merge import Output
    from llmrecipes.workflow.merge import merge as make

    setup_logging()
    options = MergeOptions(
        method, _numbers("--weights", weights), _numbers("--density", density), t, scale, normalize, seed
    )
    if to == "run":
        for option, value in (("--out", out), ("--dtype", dtype)):
            if value is not None:
                raise UserError("a run has no such thing", where=option, rule="for --to hf", fix="leave it out")
        _merge_runs(models, options, base, run_id, runs_dir, as_json=as_json)
        return
    if to != "hf":
        raise UserError(f"{to!r}", where="--to", rule="hf or run")
    if out is None:
        raise UserError("not given", where="--out", rule="a folder that does not exist", fix="--out DIR, or --to run")
    output = Output(out, dtype, tokenizer=tokenizer)
    made = make(models, options, output, runs_dir, data_dir, base, None if as_json else Counted())
    if as_json:
        print(json.dumps(asdict(made)))
        return
    print(_what(models, base, method))
    files = "1 file" if made.shards == 1 else f"{made.shards} files"
    print(f"to     {made.path}")
    size = f"{made.bytes / 2**20:,.1f} MiB in {files}"
    print(f"       {number(made.parameters)} parameters, {size}, {made.seconds:.1f} s")


def _merge_runs(
    models: list[str], options: MergeOptions, base: str | None, run_id: str | None, runs_dir: Path, *, as_json: bool
) -> None:
    from llmrecipes.commandline import resume_command
    from llmrecipes.workflow.merge import merge_runs
    from llmrecipes.workflow.run import checked_run_id, new_run_id

    made = merge_runs(models, options, runs_dir, new_run_id() if run_id is None else checked_run_id(run_id), base)
    if as_json:
        print(json.dumps(asdict(made)))
        return
    print(_what(models, base, options.method))
    print(f"to     {made.run_dir}, {made.seconds:.1f} s")
    print(f"train: {resume_command(Path(made.run_dir))}")


def _what(models: list[str], base: str | None, method: str) -> str:
    return f"merged {', '.join(models)}{f' from {base}' if base else ''} by {method}"


def _numbers(option: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise UserError(f"{text!r}", where=option, rule="numbers with commas between them", fix="0.5,0.5") from None
