"""`eval`: parsing and printing only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli import completion
from llmrecipes.cli.shared_options import DATA, RUNS, DataOption, JsonOption, RunsOption, with_options
from llmrecipes.cli.tables import TextTable, show

if TYPE_CHECKING:
    from llmrecipes.evaluation.request import EvaluationRequest
    from llmrecipes.workflow.evaluate import Evaluation


@with_options(request="evaluation.request.EvaluationRequest")
def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP|@best]|DIR",
            help="Run directory, recipe/run-id, run id, or recipe name (its newest run); or a Hugging Face folder.",
            autocompletion=completion.runs,
        ),
    ],
    request: EvaluationRequest,
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
    if request.per_document is not None:
        print(f"loss of each document in {request.per_document}")


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
