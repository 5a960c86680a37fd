"""Looking up a run by path, id or recipe."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.tracking.runs import RunSummary

COLUMNS = ("run", "state", "step", "loss", "valid loss", "newest checkpoint", "started")


def table(runs: Sequence[RunSummary]) -> str:
    """Runs as a table, oldest first."""
    if not runs:
        return "no runs yet: llmrecipes train gpt-tiny"
    rows = [COLUMNS, *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(run: RunSummary) -> tuple[str, ...]:
    started = "" if run.started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    return (
        f"{run.recipe}/{run.run_id}",
        run.state,
        f"{run.step or 0}/{run.total or '?'}",
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.valid_loss is None else f"{run.valid_loss:.4f}",
        str(run.checkpoints[-1]) if run.checkpoints else "none",
        started,
    )


def find_run(name: str, runs_dir: Path) -> Path:
    """The directory of a run.

    Args:
        name: its path, `recipe/run-id`, a run id, or a recipe's name for its newest run.
        runs_dir: where runs are kept.

    Raises:
        UserError: no run matches, or several do.
    """
    for path in (Path(name), runs_dir / name):
        if (path / "recipe.yaml").is_file():
            return path
    runs = sorted(runs_dir.glob("*/[!.]*/recipe.yaml"))  # a hidden folder is one that is being written
    named = [path.parent for path in runs if path.parent.name == name]
    newest = [path.parent for path in runs if path.parent.parent.name == name]
    if len(named) == 1:
        return named[0]
    if len(named) > 1:
        paths = ", ".join(map(str, named))
        raise UserError(f"several runs have this id: {paths}", where=name, fix="use recipe/run-id")
    if newest:
        return max(newest, key=lambda path: (path / "recipe.yaml").stat().st_mtime)
    near = difflib.get_close_matches(name, [f"{p.parent.parent.name}/{p.parent.name}" for p in runs], n=3, cutoff=0.3)
    raise UserError(
        f"no run {name}",
        where=str(runs_dir),
        rule="a run is named by its path, recipe/run-id, its run id, or its recipe (the newest run)",
        fix=f"one of {', '.join(near)}" if near else "llmrecipes runs lists all runs",
    )
