"""`export`, `import` and `finetune`: parsing and printing only."""

from __future__ import annotations

import json
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
    JsonOption,
    NewRunIdOption,
    OverridesArgument,
    RunsOption,
    with_options,
)
from llmrecipes.errors import UserError
from llmrecipes.faults.signals import early_signals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmrecipes.models.create import CreatedRun
    from llmrecipes.models.export_options import ExportOptions


@early_signals()
@with_options(options="models.export_options.ExportOptions")
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP|@best]",
            help="Run directory, recipe/run-id, run id, or recipe name; @STEP selects an older checkpoint, @best the "
            "one "
            "with the lowest held-out loss.",
            autocompletion=completion.runs,
        ),
    ],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            help="Write hf (transformers), peft (only the adapters), onnx, torch-export (.pt2) or gguf.",
        ),
    ] = "hf",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write to this new folder; default: FORM/step-STEP in the run directory."
        ),
    ] = None,
    options: ExportOptions,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Export a checkpoint for other programs.

    Supports transformers, PEFT, ONNX Runtime, torch.export and llama.cpp. Reads any layout without a GPU; hf, peft
    and gguf with one tensor in memory at a time.
    """
    from llmrecipes.console import number, setup_logging
    from llmrecipes.models.export import export as make
    from llmrecipes.models.export_options import FORMS
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    if to not in FORMS:
        raise UserError(f"unknown form {to!r}", where="--to", rule=f"one of {', '.join(FORMS)}")
    if to == "peft":
        _export_adapter(run, out, runs_dir, as_json=as_json)
        return
    options.require_valid_for(to)
    if to != "hf":
        _export_program(run, to, out, runs_dir, data_dir, options, as_json=as_json)
        return
    exported = make(run, out, runs_dir, data_dir, options, None if as_json else Counted())
    if as_json:
        print(json.dumps(asdict(exported)))
        return
    files = "1 file" if exported.shards == 1 else f"{exported.shards} files"
    print(f"exported {exported.run}, step {exported.step}")
    print(f"to       {exported.path}")
    size = f"{exported.bytes / 2**20:,.1f} MiB in {files}"
    print(
        f"         {exported.family}, {number(exported.parameters)} parameters, {exported.dtype}, {size}, "
        f"{exported.seconds:.1f} s"
    )
    for note in exported.notes:
        print(f"note     {note}")


def _export_program(
    run: str, to: str, out: Path | None, runs_dir: Path, data_dir: Path, options: ExportOptions, *, as_json: bool
) -> None:
    from llmrecipes.console import number

    if to == "gguf":
        from llmrecipes.models.gguf_file import export_gguf

        exported = export_gguf(run, out, runs_dir, data_dir, options)
    else:
        from llmrecipes.models.exported_programs import export_program

        exported = export_program(run, to, out, runs_dir, data_dir, options)
    if as_json:
        print(json.dumps(asdict(exported)))
        return
    size = f"{exported.bytes / 2**20:,.1f} MiB, {exported.seconds:.1f} s"
    print(f"exported {exported.run}, step {exported.step}")
    print(f"to       {exported.path}")
    print(
        f"         {exported.form} of {exported.family}, {number(exported.parameters)} parameters, {exported.dtype}, "
        f"{size}"
    )
    if exported.largest_difference is not None:
        print(f"logits   at most {exported.largest_difference:.1e} from those of transformers, on random tokens")
    for note in exported.notes:
        print(f"note     {note}")


def _export_adapter(run: str, out: Path | None, runs_dir: Path, *, as_json: bool) -> None:
    from llmrecipes.console import number
    from llmrecipes.models.export import export_adapter

    exported = export_adapter(run, out, runs_dir)
    if as_json:
        print(json.dumps(asdict(exported)))
        return
    size = f"{exported.bytes / 2**20:,.1f} MiB, {exported.seconds:.1f} s"
    print(f"exported {exported.run}, step {exported.step}")
    print(f"to       {exported.path}")
    print(
        f"         PEFT, {exported.adapters} adapters of {exported.family}, {number(exported.parameters)} parameters, "
        f"{size}"
    )
    print(f"base     {exported.base}")


@early_signals()
def import_model(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder with config.json and safetensors, or name on the Hub.")
    ],
    overrides: OverridesArgument = NO_OVERRIDES,
    of: Annotated[
        str,
        typer.Option(
            "--from", metavar="FORM", help="Read this format: hf, or megatron, a torch_dist checkpoint of Megatron-LM."
        ),
    ] = "hf",
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="Describe the model by this recipe; needed with --from megatron."
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="R", help="Fetch this branch, tag or commit from the Hub; default: main."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name the new recipe; default: the model's name.")
    ] = None,
    ignored: Annotated[
        list[str] | None,
        typer.Option("--ignore-key", metavar="KEY", help="Ignore this unsupported key of config.json; repeatable."),
    ] = None,
    run_id: NewRunIdOption = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Create a run from a Hugging Face or Megatron-LM model.

    Writes a recipe and a checkpoint at step 0 that any layout can load. Example of overrides: model.seq_length=4096.
    """
    from llmrecipes.console import number, setup_logging
    from llmrecipes.models.importing import import_model as make
    from llmrecipes.runfiles import checked_run_id
    from llmrecipes.tracking.progress import Counted

    setup_logging()
    run_id = checked_run_id(run_id)
    if of != "hf":
        _import_megatron(source, of, recipe, overrides, runs_dir, run_id, as_json=as_json)
        return
    if recipe is not None:
        raise UserError(
            recipe, where="--recipe", rule="with --from hf, config.json describes the model", fix="--from megatron"
        )
    created = make(
        source, overrides, runs_dir, run_id, revision=revision, name=name, ignored=ignored or (),
        progress=None if as_json else Counted(),
    )  # fmt: skip
    if as_json:
        print(json.dumps(created.as_dict()))
        return
    origin = created.origin
    commit = "" if origin["commit"] is None else f" at {origin['commit']}"
    print(f"imported {origin['source']}{commit}: {origin['model_type']}, {number(origin['parameters'])} parameters")
    print(f"         weights in {origin['precision']}, {_precision_note(origin)}")
    if origin["left_out"]:
        print(f"         left out: {origin['left_out']} tensors of multi-token prediction")
    if origin["ignored_keys"]:
        print(f"         keys of config.json without effect: {', '.join(origin['ignored_keys'])}")
    if tokens := origin["new_rows"] - origin["padding_rows"]:
        print(f"         {tokens} new tokens: their embedding rows are the mean of the others")
    if origin["padding_rows"]:
        print(f"         {origin['padding_rows']} rows without a token pad the vocabulary")
    _print_created(created)


def _precision_note(origin: Mapping[str, Any]) -> str:
    if origin["precision"] == origin["stored_precision"]:
        return "as in the folder (train.precision)"
    return f"as train.precision; {origin['stored_precision']} in the folder"


def _print_created(created: CreatedRun) -> None:
    from llmrecipes.commandline import resume_command
    from llmrecipes.units import GIB

    memory = created.origin["peak_memory_bytes"] / GIB
    print(f"to       {created.run_dir}, in {created.origin['seconds']:.1f} s with {memory:.2f} GiB of memory")
    print(f"train:   {resume_command(Path(created.run_dir))}")


def _import_megatron(
    source: str, of: str, recipe: str | None, overrides: list[str], runs_dir: Path, run_id: str, *, as_json: bool
) -> None:
    from llmrecipes.console import number
    from llmrecipes.models.importing import import_megatron as make
    from llmrecipes.tracking.progress import Counted

    if of != "megatron":
        raise UserError(f"{of!r}", where="--from", rule="must be hf or megatron")
    if recipe is None:
        raise UserError(
            "not set",
            where="--recipe",
            rule="a Megatron-LM checkpoint has no description of data and training",
            fix="--recipe FILE.yaml, with a model section that describes the trained model",
        )
    created = make(Path(source), recipe, overrides, runs_dir, run_id, None if as_json else Counted())
    if as_json:
        print(json.dumps(created.as_dict()))
        return
    origin = created.origin
    iteration = "" if origin["iteration"] is None else f", iteration {origin['iteration']}"
    print(f"imported {origin['source']}{iteration}: {number(origin['parameters'])} parameters")
    for note in origin["notes"]:
        print(f"note     {note}")
    _print_created(created)


@early_signals()
def finetune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder with config.json and safetensors, name on the Hub, or a run (RUN, RUN@STEP or RUN@best), "
            "which is exported first.",
            autocompletion=completion.runs,
        ),
    ],
    overrides: OverridesArgument = NO_OVERRIDES,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Train on these conversations: .jsonl, .parquet, or TYPE:PATH such as hub:NAME.",
        ),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train adapters, and merge them into the exported model.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="NAME",
            help="Use the chat template chatml, llama3 or qwen3; default: the tokenizer's.",
        ),
    ] = None,
    epochs: Annotated[
        float, typer.Option("--epochs", metavar="N", min=0.01, help="Train for N passes over the data.")
    ] = 2.0,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr", metavar="X", min=1e-9, help="Set the peak learning rate; default: 1e-5, with --lora 2e-4."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write recipe and model to this folder; default: MODEL-sft or MODEL-lora."
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="Run only this step: recipe, prepare, train or export."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the steps; run nothing.")] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="R", help="Fetch this branch, tag or commit from the Hub; default: main."),
    ] = None,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> int:
    """Fine-tune a Hugging Face model or a run on conversations.

    Writes a recipe, prepares the data, trains and exports the model. Repeat the command to continue where it was
    interrupted; finished steps are skipped.
    """
    from llmrecipes.commandline import command_line
    from llmrecipes.console import console, setup_logging
    from llmrecipes.models.finetune import RUN_ID, STEPS, Finetuning, steps
    from llmrecipes.models.finetune import finetune as do
    from llmrecipes.workflow.run import Paths

    setup_logging()
    if data is None:
        raise UserError("not set", where="--data", rule="fine-tuning needs conversations", fix="--data chat.jsonl")
    if step is not None and step not in STEPS:
        raise UserError(f"{step!r}", where="--step", rule=f"one of {', '.join(STEPS)}")
    request = Finetuning(model, data, out, lora, template, epochs, lr, revision, tuple(overrides))
    paths = Paths(runs_dir, data_dir)
    if dry_run:
        for number, part in enumerate(steps(request, paths), 1):
            print(f"{number}/{len(STEPS)} {part.name:<8} {'done' if part.done else 'to do'}  {part.command}")
        return 0
    code = do(request, paths, lambda line: console().print(line, markup=False, soft_wrap=True), step)
    if code == 0 and step in (None, "export"):
        if lora:
            adapters = command_line("export", f"{request.name}/{RUN_ID}", options={"to": "peft"}, runs_dir=runs_dir)
            print(f"adapters only: {adapters}")
        print(f"serve:   {command_line('serve', request.exported)}")
    return code
