"""`merge`: parsing and printing only."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import DATA, RUNS, DataOption, JsonOption, NewRunIdOption, RunsOption, with_options
from llmrecipes.errors import UserError
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from llmrecipes.models.merge_options import MergeOptions


@early_signals()
@with_options(options="models.merge_options.MergeOptions")
def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Models to merge: runs, RUN@STEP for an older checkpoint, or Hugging Face folders.",
            autocompletion=completion.runs,
        ),
    ],
    options: MergeOptions,
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORM", help="Write hf, a folder for transformers, or run, a run at step 0."),
    ] = "hf",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write to this new folder; needed with --to hf.")
    ] = None,
    run_id: NewRunIdOption = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="Take task vectors relative to this base model.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="TYPE", help="Write weights as fp32, bf16 or fp16; default: the first model's."
        ),
    ] = None,
    tokenizer: Annotated[bool, typer.Option(help="Require equal tokenizers and write one.")] = True,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Merge models of one shape into one.

    Works tensor by tensor, without a GPU. Use linear to average several checkpoints of a run.
    """
    from llmrecipes.console import number, setup_logging
    from llmrecipes.models.merge import Output
    from llmrecipes.models.merge import merge as make
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    if to == "run":
        for option, value in (("--out", out), ("--dtype", dtype)):
            if value is not None:
                raise UserError("set with --to run", where=option, rule="only valid with --to hf", fix="remove it")
        _merge_runs(models, options, base, run_id, runs_dir, as_json=as_json)
        return
    if to != "hf":
        raise UserError(f"unknown form {to!r}", where="--to", rule="must be hf or run")
    if out is None:
        raise UserError(
            "not set",
            where="--out",
            rule="--to hf needs a folder that does not exist yet",
            fix="--out DIR, or --to run",
        )
    output = Output(out, dtype, tokenizer=tokenizer)
    merged = make(models, options, output, runs_dir, data_dir, base, None if as_json else Counted())
    if as_json:
        print(json.dumps(asdict(merged)))
        return
    print(_what(models, base, options.method))
    files = "1 file" if merged.shards == 1 else f"{merged.shards} files"
    print(f"to     {merged.path}")
    size = f"{merged.bytes / 2**20:,.1f} MiB in {files}"
    print(f"       {number(merged.parameters)} parameters, {size}, {merged.seconds:.1f} s")


def _merge_runs(
    models: list[str], options: MergeOptions, base: str | None, run_id: str | None, runs_dir: Path, *, as_json: bool
) -> None:
    from llmrecipes.commandline import resume_command
    from llmrecipes.models.merge import merge_runs
    from llmrecipes.runfiles import checked_run_id
    from llmrecipes.tracking.progress import Counted

    progress = None if as_json else Counted()
    created = merge_runs(models, options, runs_dir, checked_run_id(run_id), base, progress)
    if as_json:
        print(json.dumps(created.as_dict()))
        return
    print(_what(models, base, options.method))
    print(f"to     {created.run_dir}, {created.origin['seconds']:.1f} s")
    print(f"train: {resume_command(Path(created.run_dir))}")


def _what(models: list[str], base: str | None, method: str) -> str:
    return f"merged {', '.join(models)}{f' from {base}' if base else ''} by {method}"
