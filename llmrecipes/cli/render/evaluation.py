"""Evaluations as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmrecipes.cli.render.table import aligned

if TYPE_CHECKING:
    from llmrecipes.workflow.evaluate import Evaluation

MOST_STEPS = 6
"""Columns of steps, the newest."""
SHOWN = ("documents", "tokens", "bytes", "window", "stride", "num_fewshot", "version", "pieces", "pairs")
"""Settings in the table of one evaluation; the record has all."""


def lines(done: Evaluation) -> list[str]:
    """The results of one evaluation, and where they are kept."""
    rows = [("task", "metric", "value", "on")]
    for record in done.records:
        settings = ", ".join(f"{key} {_words(value)}" for key, value in record["settings"].items() if key in SHOWN)
        for name, value in record["metrics"].items():
            rows.append((record["task"], name, number(value), settings))
            settings = ""
    found = [
        str(done.model) if done.run_dir is None else f"step {done.step} of {done.run_dir}",
        "",
        *aligned(rows, right=(2,)),
    ]
    for record in done.records:
        for example in record["examples"]:
            found += ["", *(f"{key}: {text!r}" for key, text in example.items())]
    if done.run_dir is None:
        return found
    return [*found, "", *(f"warning  {text}" for text in done.warnings), f"kept in {done.run_dir}/evaluations.jsonl"]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{inner} {key}" for key, inner in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def earlier_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """All evaluations of a run: a row for each metric, a column for each step.

    Results with other settings, such as fewer documents, have rows of their own. Of several at a step, the last counts.
    """
    if not records:
        return ["no evaluations yet: llmrecipes eval RUN"]
    steps = sorted({record["step"] for record in records})[-MOST_STEPS:]
    found: dict[tuple[str, str, str], dict[int, float | None]] = {}
    for record in records:
        settings = {key: value for key, value in record.get("settings", {}).items() if key != "harness"}
        for name, value in record["metrics"].items():
            key = record["task"], name, json.dumps(settings, sort_keys=True)
            found.setdefault(key, {})[record["step"]] = value
    rows = [("task", "metric", *(f"step {step}" for step in steps))]
    for (task, name, _), values in found.items():
        if values.keys() & set(steps):
            rows.append((task, name, *(number(values[step]) if step in values else "" for step in steps)))
    return aligned(rows, right=range(2, len(steps) + 2))


def number(value: float | None) -> str:
    """Four digits after the point, more for small ones; a dash for one that is not finite."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"
