"""The tracker that forwards everything a run reports to its sinks; used on one rank only."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from llmrecipes.diagnosis.check_rules import CHECKED
from llmrecipes.diagnosis.checks import Checks
from llmrecipes.diagnosis.finding import RunFacts
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.io import write_atomic
from llmrecipes.packages import find_spec
from llmrecipes.recipe.derived.extras import of_tracking
from llmrecipes.recipe.load import recipe_hash, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.plugins import MetricSink, declared, resolve
from llmrecipes.redact import redact, redacted
from llmrecipes.runfiles import DOCUMENTS, RunFiles
from llmrecipes.tracking.events import DatasetUse, EvalMetrics, Note, RunStart, RunStatus, Sink, StepMetrics
from llmrecipes.tracking.jsonl import JsonlSink, record
from llmrecipes.untrusted import Refused, parse_json, read

logger = logging.getLogger(__name__)

TRAINJOB_URL = "KUBEFLOW_TRAINER_SERVER_URL"
STATUS = MetricSink(target="llmrecipes.tracking.status:StatusSink", rehearsal=True, keeps_steps=False)
PROGRESS = MetricSink(target="llmrecipes.tracking.progress:ProgressSink", rehearsal=True, keeps_steps=False)
TRAINJOB = MetricSink(target="llmrecipes.tracking.trainjob:TrainJobSink", rehearsal=True, keeps_steps=False)


def opened_by(recipe: Recipe) -> dict[str, MetricSink]:
    """The sinks of a run besides metrics.jsonl: those without a key, and those that the recipe enables, by their key.

    A TrainJob's status is one of them in pods that Kubeflow Trainer has given an address for it. Progress is last: it
    prints what opening the others has to say.
    """
    sinks = declared(type(recipe.tracking), MetricSink)
    enabled = {f"tracking.{name}": sink for name, sink in sinks.items() if getattr(recipe.tracking, name)}
    trainjob = {"the status of the TrainJob": TRAINJOB} if os.environ.get(TRAINJOB_URL) else {}
    return {"status.json": STATUS, **enabled, **trainjob, "progress": PROGRESS}


def require_packages_of_tracking(recipe: Recipe) -> None:
    """Refuse a recipe with a key of `tracking` whose package is not installed.

    Raises:
        UserError: the package is missing.
    """
    for need in of_tracking(recipe):
        if find_spec(need.package) is None:
            raise UserError(
                f"needs the package {need.package}, which is not installed",
                where=need.key,
                rule=f"{need.package} is in the optional extra {need.extra}",
                fix=f"pip install -e '.[{need.extra}]' in the checkout, or leave it out",
            )


class RunTracker:
    """Forwards every event to metrics.jsonl, and then to the sinks that the recipe opens (`opened_by`).

    metrics.jsonl is first and must be writable when the run starts. Any other sink that fails is dropped with one
    warning; training continues. As a context manager it closes with the status that matches how the block was left.

    What looks wrong by the checks of `diagnosis` becomes a note, the first time in a start.
    `reached` has `step` and `time` of the last step that an earlier attempt has lost; empty: none was lost.
    `energy` is what all earlier attempts have used.
    """

    def __init__(self, record: JsonlSink, others: Mapping[str, Sink], checks: Checks) -> None:
        self._record = record
        self._others = dict(others)
        self._checks: Checks | None = checks
        self._closed = False
        self.reached, self.energy = record.reached, record.energy

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        *,
        plan: Mapping[str, Any],
        environment: Mapping[str, Any],
        run_dir: Path,
        runs_dir: Path,
        resumed_step: int,
        total_steps: int,
        tags: Mapping[str, str] | None = None,
        datasets: Sequence[DatasetUse] = (),
        console: Console | None = None,
    ) -> Self:
        """Write recipe.yaml, plan.json and env.json, and open all sinks that the recipe enables.

        Args:
            plan: the derived plan, as JSON values.
            environment: see `environment.capture`.
            run_dir: `<runs_dir>/<recipe>/<run-id>`; created if missing.
            resumed_step: the step the run resumes from, 0 for a new run. Later records are dropped.
            total_steps: the last step.
            tags: more tags for MLflow, such as the layout in words.
            datasets: what the run reads.
            console: where progress is shown; default: standard output.

        Raises:
            UserError: the run directory cannot be written, or a library that the recipe needs is missing.
        """
        require_packages_of_tracking(recipe)
        documents = (
            redact(to_yaml(recipe)),
            json.dumps(redacted(plan), indent=2) + "\n",
            json.dumps(redacted(environment), indent=2) + "\n",
        )
        try:
            RunFiles(run_dir).logs.mkdir(parents=True, exist_ok=True)
            notes = [
                note
                for name, text in zip(DOCUMENTS, documents, strict=True)
                if (note := _record_document(run_dir, name, text, resumed_step))
            ]
        except OSError as error:
            raise UserError(
                f"cannot write: {error.strerror}",
                where=str(error.filename or run_dir),
                fix="make the directory writable or choose another one with --runs-dir",
            ) from error
        jsonl = JsonlSink(RunFiles(run_dir).metrics, resumed_step)
        if jsonl.problems:
            logger.warning("%s: %s", RunFiles(run_dir).metrics, "; ".join(jsonl.problems))
            notes.append(Note(step=resumed_step, event="metrics_damaged", details={"problems": jsonl.problems}))
        start = RunStart(
            recipe=recipe,
            run_dir=run_dir,
            runs_dir=runs_dir,
            resumed_step=resumed_step,
            total_steps=total_steps,
            tags=redacted(_tags(environment)) | {"recipe.hash": recipe_hash(recipe)} | redacted(dict(tags or {})),
            documents=DOCUMENTS,
            console=console or Console(),
            messages=SimpleQueue(),
            datasets=tuple(datasets),
        )
        others: dict[str, Sink] = {}
        for name, sink in opened_by(recipe).items():
            try:
                others[name] = resolve(sink.target).of(start)
            except Exception as error:  # no sink may prevent the run
                logger.warning("%s is disabled for this run: %s: %s", name, type(error).__name__, error)
        tracker = cls(jsonl, others, Checks(RunFacts.of(recipe)))
        for note in notes:
            tracker.note(note)
        return tracker

    def step(self, metrics: StepMetrics) -> None:
        """Report one optimizer step. Call it at every step; it applies the intervals."""
        self._record.step(metrics)
        self._tell_others(lambda sink: sink.step(metrics))
        self._check(metrics)

    def eval(self, metrics: EvalMetrics) -> None:
        """Report one evaluation."""
        self._record.eval(metrics)
        self._tell_others(lambda sink: sink.eval(metrics))
        self._check(metrics)

    def note(self, note: Note) -> None:
        """Report an event; its details may quote an error, so they are redacted for all sinks."""
        note = replace(note, details=redacted(note.details))
        self._record.note(note)
        self._tell_others(lambda sink: sink.note(note))
        self._check(note)

    def _check(self, event: StepMetrics | EvalMetrics | Note) -> None:
        if self._checks is None:
            return
        try:
            seen = self._checks.add(record(event))
        except Exception as error:  # a check must not stop the training
            self._checks = None
            logger.warning("checks are disabled for the rest of this run: %s: %s", type(error).__name__, error)
            return
        for finding in seen:
            if finding.rule in CHECKED:  # the others are notes already
                details = {
                    "severity": finding.severity,
                    "text": finding.text,
                    "fix": finding.advice,
                    "see": finding.link,
                }
                self.note(Note(step=event.step, event=finding.rule, details=details, alarm=finding.severity != "info"))

    def close(self, status: RunStatus) -> None:
        """End the run; further calls do nothing. Waits for MLflow and W&B, but not longer than half a minute."""
        if self._closed:
            return
        self._closed = True
        self._record.close(status)
        self._tell_others(lambda sink: sink.end(status))  # all of them, before waiting for the first
        self._tell_others(lambda sink: sink.close(status))

    def _tell_others(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._others.items()):
            try:
                call(sink)
            except Exception as error:  # a bug or a full disk in one of them must not stop the training
                del self._others[name]
                logger.warning("%s is disabled for the rest of this run: %s: %s", name, type(error).__name__, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(_status_of(error))


def _status_of(error: BaseException | None) -> RunStatus:
    """Status of a run whose block raised `error`."""
    code = error.code if isinstance(error, UserError | SystemExit) else None
    if error is None or (isinstance(error, SystemExit) and code in (None, 0)):
        return "FINISHED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) or code == ExitCode.REQUEUE else "FAILED"


def _tags(environment: Mapping[str, Any]) -> dict[str, str]:
    git = environment.get("git") or {}
    version = (environment.get("packages") or {}).get("llmrecipes")
    tags = {"llmrecipes.version": version, "git.commit": git.get("commit"), "git.dirty": git.get("dirty")}
    return {key: str(value) for key, value in tags.items() if value is not None}


def _record_document(run_dir: Path, name: str, text: str, resumed_step: int) -> Note | None:
    """Write a document of the run; a previous version that differs is kept in logs/, named by `resumed_step`.

    Returns:
        A note, if the previous one was corrupt.
    """
    path = run_dir / name
    try:
        data = read(path, root=run_dir) if path.exists() else text.encode()
        damaged = path.suffix == ".json" and not _is_json(data)
    except Refused:
        data, damaged = b"", True
    note = None
    if data != text.encode():
        what = "damaged-at" if damaged else "until"
        kept = RunFiles(run_dir).logs / f"{path.stem}.{what}-step-{resumed_step:08d}{path.suffix}"
        path.replace(kept)
        if damaged:
            logger.warning("%s was corrupt; moved to %s and rewritten", path, kept)
            note = Note(step=resumed_step, event="document_damaged", details={"file": name, "path": str(kept)})
    write_atomic(path, text)
    return note


def _is_json(data: bytes) -> bool:
    try:
        parse_json(data)
    except ValueError:
        return False
    return True
