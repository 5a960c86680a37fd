"""`eval`: parsing and printing only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.options import DATA, RUNS, DataOption, JsonOption, RunsOption
from llmrecipes.cli.tables import TextTable, show
from llmrecipes.errors import UserError
from llmrecipes.evaluation import CHECKS, Check

if TYPE_CHECKING:
    from llmrecipes.workflow.evaluate import Evaluation


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP|@best]|DIR",
            help="Run directory, recipe/run-id, run id, or recipe name (its newest run); or a Hugging Face folder.",
            autocompletion=completion.runs,
        ),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", metavar="NAME", help="Run this lm-evaluation-harness task, group or task file; repeatable."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="Measure perplexity on valid, test, train, stdlib, or TYPE:PATH (a type of data.sources); repeatable. "
            "Default without --task and --check: valid.",
        ),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option("--check", metavar="NAME", help=f"Check generated text for: {', '.join(CHECKS)}; repeatable."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Use at most N documents per task or source; default: all."),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot", metavar="N", min=0, help="Put N examples before every question; default: the task's."
        ),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", metavar="DIR", help="Also look for task files in this folder.")
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Allow code referenced by task files, in a process without network and credentials."
        ),
    ] = False,
    text_key: Annotated[
        str,
        typer.Option("--text-key", metavar="NAME", help="Read the text of a jsonl or parquet source from this column."),
    ] = "text",
    per_document: Annotated[
        Path | None,
        typer.Option(
            "--per-document",
            metavar="DIR",
            help="Write the loss of every document of the split to this new folder, for data.curriculum.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", metavar="N", min=1, help="Measure perplexity in windows of N tokens; default: seq_length."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", metavar="N", min=1, help="Score N tokens of a window; default: half a window."),
    ] = None,
    prefix: Annotated[
        int, typer.Option("--prefix", metavar="N", min=1, help="Use prompts of N tokens for --check.")
    ] = 50,
    length: Annotated[
        int, typer.Option("--length", metavar="N", min=1, help="Continue prompts of --check by N tokens.")
    ] = 50,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, help="Write N continuations per --check.")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="T", min=0, help="Sample continuations of --check at this temperature."),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed the samples of --check.")] = 1234,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Score N sequences per forward pass of a replica.")
    ] = 8,
    tensor: Annotated[
        int, typer.Option("--tp", metavar="N", min=1, help="Split the model over N tensor-parallel ranks.")
    ] = 1,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="Start N ranks; default: --tp.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Only print the run's earlier evaluations, by step.")
    ] = False,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
    data_dir: DataOption = DATA,
) -> None:
    """Evaluate a model: perplexity, harness tasks, text checks.

    The model is a run's checkpoint or a Hugging Face folder. Tasks are from lm-evaluation-harness; checks test for
    repetition, memorisation and bias.
    """
    from llmrecipes.console import setup_logging
    from llmrecipes.evaluation import history
    from llmrecipes.evaluation.request import EvaluationRequest
    from llmrecipes.rundir import Run
    from llmrecipes.workflow.evaluate import EvaluationLayout, evaluate_run

    if compare:
        records = history.read(Run.find(run, runs_dir).path)
        if as_json:
            print(json.dumps(records, indent=2))
            return
        show(*earlier_lines(records))
        return
    setup_logging()
    request = EvaluationRequest(
        tasks=tuple(task or ()),
        include_path=include_path,
        trust_code=trust_code,
        data=tuple(data or ()),
        text_key=text_key,
        per_document=per_document,
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
    done = evaluate_run(run, request, runs_dir, data_dir, EvaluationLayout(tensor, nproc), progress=not as_json)
    if as_json:
        values = {
            "model": str(done.model),
            "step": done.step,
            "results": done.records,
            "precision": done.precision,
            "warnings": done.warnings,
        }
        print(json.dumps(values, indent=2))
        return
    show(*lines(done))
    if per_document is not None:
        print(f"loss of each document in {per_document}")


def _check(name: str) -> Check:
    for known in CHECKS:
        if name == known:
            return known
    from difflib import get_close_matches

    near = get_close_matches(name, CHECKS, n=1, cutoff=0.3) or CHECKS[:1]
    raise UserError(f"{name!r}", where="--check", rule=f"one of {', '.join(CHECKS)}", fix=f"--check {near[0]}")


def _evaluated(done: Evaluation) -> str:
    if done.run_dir is not None:
        return f"step {done.step} of {done.run_dir}"
    return str(done.model) if done.precision is None else f"{done.model}, computed in {done.precision}"


MOST_STEPS = 6
"""Columns of steps, the newest."""
SHOWN = ("documents", "tokens", "bytes", "window", "stride", "num_fewshot", "version", "pieces", "pairs")
"""Settings in the table of one evaluation; the record has all."""


def lines(done: Evaluation) -> list[str | TextTable]:
    """The results of one evaluation, and where they are kept."""
    rows = [("task", "metric", "value", "on")]
    for record in done.records:
        settings = ", ".join(f"{key} {_words(value)}" for key, value in record["settings"].items() if key in SHOWN)
        for name, value in record["metrics"].items():
            rows.append((record["task"], name, number(value), settings))
            settings = ""
    printed: list[str | TextTable] = [
        _evaluated(done),
        "",
        TextTable(rows, right=(2,)),
    ]
    for record in done.records:
        for example in record["examples"]:
            printed += ["", *(f"{key}: {text!r}" for key, text in example.items())]
    if done.run_dir is None:
        return printed
    return [*printed, "", *(f"warning  {text}" for text in done.warnings), f"kept in {done.run_dir}/evaluations.jsonl"]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{inner} {key}" for key, inner in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def earlier_lines(records: Sequence[dict[str, Any]]) -> list[str | TextTable]:
    """All evaluations of a run: a row for each metric, a column for each step.

    Results with other settings, such as fewer documents, have rows of their own. Of several at a step, the last counts.
    """
    if not records:
        return ["no evaluations yet: llmrecipes eval RUN"]
    steps = sorted({record["step"] for record in records})[-MOST_STEPS:]
    by_metric: dict[tuple[str, str, str], dict[int, float | None]] = {}
    for record in records:
        settings = {key: value for key, value in record.get("settings", {}).items() if key != "harness"}
        for name, value in record["metrics"].items():
            key = record["task"], name, json.dumps(settings, sort_keys=True)
            by_metric.setdefault(key, {})[record["step"]] = value
    rows = [("task", "metric", *(f"step {step}" for step in steps))]
    for (task, name, _), values in by_metric.items():
        if values.keys() & set(steps):
            rows.append((task, name, *(number(values[step]) if step in values else "" for step in steps)))
    return [TextTable(rows, right=range(2, len(steps) + 2))]


def number(value: float | None) -> str:
    """Four digits after the point, more for small ones; a dash for one that is not finite."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"
