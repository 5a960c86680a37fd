"""Rows of a GPU report, and the pages that show them; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from llmrecipes import webpage
from llmrecipes.io import write_atomic

STAGES = ("right", "fast", "big", "state", "fp8")
"""In the order of the report."""

QUESTIONS = {
    "right": "Does it compute what a CPU computes?",
    "fast": "How fast are whole models on one GPU?",
    "big": "How long does a layer of a large model take?",
    "state": "What do saving and loading cost?",
    "fp8": "What does fp8 give?",
}
ROWS, MARKDOWN, PAGE_NAME = "report.jsonl", "report.md", "report.html"
OFF = 0.1
"""Relative difference from the expected value beyond which a row is flagged."""


class Row(BaseModel):
    """One result."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    stage: str
    item: str
    quantity: str
    value: float | None = None
    unit: str = ""
    expected: float | None = None
    """From the plan, or another calculation; a difference of more than `OFF` is flagged."""
    limit: float | None = None
    """Largest value that is right, instead of `expected`."""
    status: Literal["measured", "skipped", "failed"] = "measured"
    note: str = ""

    @property
    def off(self) -> bool:
        """Whether the value is not the expected one."""
        if self.status == "failed":
            return True
        if self.value is None:
            return False
        if self.limit is not None:
            return not self.value <= self.limit
        return self.expected is not None and not abs(self.value - self.expected) <= OFF * abs(self.expected)

    def cells(self) -> tuple[str, ...]:
        """Item, quantity, value, expected, flag and note as text."""
        value = self.status if self.value is None else f"{_text(self.value)} {self.unit}".strip()
        expected = "" if self.expected is None else f"{_text(self.expected)} {self.unit}".strip()
        if self.limit is not None:
            expected = f"≤ {_text(self.limit)} {self.unit}".strip()
        return self.item, self.quantity, value, expected, self._flag(), self.note

    def _flag(self) -> str:
        if not self.off:
            return ""
        if self.value is None or not self.expected:
            return "OFF"
        return f"OFF {self.value / self.expected - 1:+.0%}"


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def read(folder: Path) -> list[Row]:
    """Rows of a report; those that a later run has replaced are left out. A line that a kill has cut is ignored."""
    path = folder / ROWS
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    newest: dict[tuple[str, str, str], Row] = {}
    for line in lines:
        try:
            row = Row.model_validate_json(line)
        except ValueError:
            continue
        # A result replaces the row of an item that was skipped or has failed as a whole.
        if row.status == "measured":
            for key in [key for key, old in newest.items() if key[:2] == (row.stage, row.item)]:
                if newest[key].quantity == "item":
                    del newest[key]
        newest[row.stage, row.item, row.quantity] = row
    return list(newest.values())


def append(folder: Path, row: Row, about: Sequence[str]) -> None:
    """Write a row to disk at once, and both pages anew."""
    with (folder / ROWS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False) + "\n")
    rows = read(folder)
    write_atomic(folder / MARKDOWN, markdown(rows, about))
    write_atomic(folder / PAGE_NAME, page(rows, about))


_HEAD = ("item", "quantity", "measured", "expected", "", "note")


def markdown(rows: Iterable[Row], about: Sequence[str]) -> str:
    """The report as Markdown.

    Args:
        rows: of all stages.
        about: lines about machine and versions.
    """
    rows = list(rows)
    lines = ["# GPU report", "", *(f"- {line}" for line in about), "", _summary(rows), ""]
    for stage, of_stage in _by_stage(rows):
        lines += [f"## {stage}: {QUESTIONS[stage]}", "", f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row.cells())} |" for row in of_stage]
        lines.append("")
    return "\n".join(lines)


def page(rows: Iterable[Row], about: Sequence[str]) -> str:
    """The report as an HTML page that needs no network."""
    rows = list(rows)
    body = ["<h1>GPU report</h1>", "<ul>", *(f"<li>{webpage.text(line)}</li>" for line in about), "</ul>"]
    body.append(f"<p><b>{webpage.text(_summary(rows))}</b></p>")
    for stage, of_stage in _by_stage(rows):
        body.append(f"<h2>{stage}: {webpage.text(QUESTIONS[stage])}</h2>")
        kinds = ("off" if row.off else row.status for row in of_stage)
        body.append(webpage.table(_HEAD, (row.cells() for row in of_stage), numbers=(2, 3), classes=kinds))
    return webpage.page("GPU report", "\n".join(body))


def _summary(rows: Sequence[Row]) -> str:
    off, skipped = sum(row.off for row in rows), sum(row.status == "skipped" for row in rows)
    return f"{len(rows)} rows: {off} off by more than {OFF:.0%} or failed, {skipped} skipped"


def _by_stage(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    stages = [(stage, [row for row in rows if row.stage == stage]) for stage in STAGES]
    return [(stage, of_stage) for stage, of_stage in stages if of_stage]
