"""What a report is made of: everything that a run's directory says, as far as it can be read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes import untrusted
from llmrecipes.data.folder.data_manifest import DataManifest
from llmrecipes.data.folder.prepared import open_prepared
from llmrecipes.diagnosis.finding import RunFinding
from llmrecipes.doctor import doctor_log
from llmrecipes.errors import UserError
from llmrecipes.evaluation import history as task_history
from llmrecipes.recipe.schema import Recipe
from llmrecipes.report.records import Records
from llmrecipes.report.starts import History, history
from llmrecipes.rundir import Run
from llmrecipes.runfiles import ENVIRONMENT, METRICS, PLAN
from llmrecipes.tracking.events import MEASURED
from llmrecipes.tracking.run_list import RunSummary
from llmrecipes.untrusted import number
from llmrecipes.workflow.diagnose import diagnose

if TYPE_CHECKING:
    from llmrecipes.hardware.profile import Costs

LOG_LINES = 40
MOST_LOGS = 8
LOG_BYTES = 64 * 1024
MOST_STARTS = 50
"""Environments of earlier starts that are compared."""


@dataclass
class Material:
    """A run, read once.

    Attributes:
        recipe: None: it is corrupt; `recipe_text` is the file as it is.
        plan, environment: of the newest start; empty: missing or corrupt.
        environments: of earlier starts, oldest first, by the step until which they counted.
        tasks: records of evaluations.jsonl.
        examined: what the doctor said before the newest starts, oldest first.
        data: manifest of the prepared data; None: not on this machine.
        costs: prices and power of the cluster; None: not named.
        unread: what could not be read, and why.
        now: when all this was read.
    """

    run: Run
    summary: RunSummary
    records: Records
    history: History
    findings: Sequence[RunFinding]
    recipe: Recipe | None
    recipe_text: str
    plan: dict[str, Any]
    environment: dict[str, Any]
    environments: list[tuple[str, dict[str, Any]]]
    tasks: list[dict[str, Any]]
    data: DataManifest | None
    logs: list[tuple[str, list[str]]]
    examined: list[dict[str, Any]] = field(default_factory=list)
    costs: Costs | None = None
    unread: list[str] = field(default_factory=list)
    now: float = field(default_factory=time.time)

    @classmethod
    def read(cls, run: Run, data_dir: Path, costs: Costs | None = None) -> Material:
        """Everything about a run; what cannot be read is named in `unread` instead of raised."""
        unread: list[str] = []
        metrics = Records()
        diagnosis = diagnose(run, data_dir, metrics.add)
        metrics.missing = next((text for text in diagnosis.absent if text.startswith(METRICS)), metrics.missing)
        plan = _document(run, run.path / PLAN, unread)
        recipe, text = _recipe(run, unread)
        ranks = number(plan.get("world_size"))
        if diagnosis.damaged:
            unread.append(f"metrics.jsonl: {diagnosis.damaged:,} lines are damaged and were skipped")
        try:
            tasks = task_history.read(run.path)
        except (OSError, ValueError) as error:
            unread.append(f"{run.evaluations.name}: {error}")
            tasks = []
        try:
            data = None if recipe is None else open_prepared(recipe, data_dir).manifest
        except (UserError, OSError, ValueError):
            data = None
        return cls(
            run=run,
            summary=run.summary(),
            records=metrics,
            history=history(metrics, None if ranks is None else int(ranks)),
            findings=diagnosis.findings,
            recipe=recipe,
            recipe_text=text,
            plan=plan,
            environment=_document(run, run.path / ENVIRONMENT, unread),
            environments=list(_earlier(run)),
            tasks=tasks,
            data=data,
            logs=list(_logs(run)),
            examined=doctor_log.read(run),
            costs=costs,
            unread=unread,
        )

    @property
    def running(self) -> bool:
        """Whether it still trains."""
        return self.summary.state == "running"

    def measured(self, name: str) -> float | None:
        """A number of the newest note `measured`, which a start leaves at its end: `measured/…` or `predicted/…`."""
        notes = list(self.records.of(MEASURED))
        return number(notes[-1]["details"].get(name)) if notes else None

    def planned(self, *names: str) -> float | None:
        """A number of the plan, by the names of its levels."""
        return number(at(self.plan, *names))


def at(values: Any, *names: str) -> Any:
    """A value in nested mappings; None if a level is missing or something else."""
    for name in names:
        if not isinstance(values, Mapping):
            return None
        values = values.get(name)
    return values


def _document(run: Run, path: Path, unread: list[str]) -> dict[str, Any]:
    try:
        values = untrusted.read_json(path, root=run.path)
    except FileNotFoundError:
        unread.append(f"{path.name}: missing")
        return {}
    except (OSError, ValueError) as error:
        unread.append(f"{path.name}: {getattr(error, 'what', error)}")
        return {}
    if not isinstance(values, dict):
        unread.append(f"{path.name}: not a JSON object")
        return {}
    return values


def _recipe(run: Run, unread: list[str]) -> tuple[Recipe | None, str]:
    try:
        text = untrusted.read(run.recipe_file, root=run.path, most=untrusted.RECORD).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        unread.append(f"{run.recipe_file.name}: {getattr(error, 'what', error)}")
        return None, ""
    try:
        return run.recipe(), text
    except UserError as error:
        unread.append(f"{run.recipe_file.name}: {error.what}")
        return None, text


def _earlier(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Environments that a later start has replaced (`tracking.run_tracker`)."""
    for path in sorted(run.logs.glob("env.until-step-*.json"))[-MOST_STARTS:]:
        try:
            values = untrusted.read_json(path, root=run.path)
        except (OSError, ValueError):
            continue
        if isinstance(values, dict):
            yield path.stem.removeprefix("env.until-step-").lstrip("0") or "0", values


def _logs(run: Run) -> Iterator[tuple[str, list[str]]]:
    """The last lines of logs, the newest log first."""
    try:
        paths = [path for path in run.logs.iterdir() if path.suffix in (".log", ".out", ".err")]
        paths.sort(key=lambda path: -path.stat().st_mtime)
    except OSError:
        return
    for path in paths[:MOST_LOGS]:
        try:
            with untrusted.open_file(path, root=run.path) as file:
                file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
                last = deque(file.read(LOG_BYTES).decode("utf-8", "replace").splitlines(), LOG_LINES)
        except (OSError, ValueError):
            continue
        if last:
            yield path.name, list(last)
