"""`llmrecipes diagnose`: what looks wrong in a run, read from its directory, whatever state that is in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrecipes.diagnosis.checks import Checks
from llmrecipes.diagnosis.data_checks import of_data
from llmrecipes.diagnosis.finding import Record, RunFacts, RunFinding
from llmrecipes.errors import UserError
from llmrecipes.redact import redact
from llmrecipes.rundir import Run
from llmrecipes.tracking.jsonl import parse
from llmrecipes.untrusted import lines, read_json


@dataclass(frozen=True)
class Diagnosis:
    """What the checks say about a run.

    Attributes:
        state: as in `llmrecipes runs`.
        steps: read from metrics.jsonl.
        damaged: lines of it that cannot be read; the last line of a run that is still training may be incomplete.
        findings: the most severe first.
        absent: what could not be judged, and why.
    """

    run: str
    state: str
    step: int | None
    total: int | None
    steps: int
    damaged: int
    findings: tuple[RunFinding, ...]
    absent: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Output of `diagnose --json`."""
        return {**vars(self), "findings": [finding.as_dict() for finding in self.findings], "absent": list(self.absent)}


def diagnose(run: Run, data_dir: Path | None = None, see: Callable[[Record], None] | None = None) -> Diagnosis:
    """Check a run, which may still be training, be damaged or be of another version: what is absent is not judged.

    Args:
        data_dir: where its prepared data is; None: data is not judged.
        see: called with each record, so that a caller that needs them does not read a long file again.
    """
    absent: list[str] = []
    recipe = None
    try:
        recipe = run.recipe()
    except (UserError, OSError, ValueError) as error:
        absent.append(f"rules that depend on the recipe: {redact(str(getattr(error, 'what', error)))}")
    checks = Checks(RunFacts() if recipe is None else RunFacts.of(recipe))
    steps = damaged = 0
    torn = False
    try:
        for line in lines(run.metrics, root=run.path):
            torn = not line.endswith(b"\n")
            record = parse(line)
            if record is None:
                damaged += not torn
                continue
            steps += "loss" in record
            checks.add(record)
            if see is not None:
                see(record)
    except (OSError, UserError) as error:
        absent.append(f"metrics.jsonl: {getattr(error, 'what', None) or getattr(error, 'strerror', None) or error}")
    if not steps:
        absent.append("no step is recorded")
    if recipe is not None and data_dir is not None:
        from llmrecipes.data.folder.prepared import fingerprint

        folder = data_dir / fingerprint(recipe)
        try:
            manifest = read_json(folder / "manifest.json", root=folder)
            for seen in of_data(manifest if isinstance(manifest, dict) else {}):
                checks.see(seen)
        except (OSError, UserError, ValueError):
            absent.append(f"data: no readable manifest in {folder}")
    summary = run.summary()
    return Diagnosis(
        run=run.name,
        state=summary.state,
        step=summary.step,
        total=summary.total,
        steps=steps,
        damaged=damaged,
        findings=tuple(checks.findings()),
        absent=tuple(absent),
    )


def text(diagnosis: Diagnosis) -> str:
    """The same for people."""
    head = f"{diagnosis.run}  {diagnosis.state}, step {diagnosis.step or 0}/{diagnosis.total or '?'}"
    parts = [f"{head}; {diagnosis.steps:,} steps read"]
    if diagnosis.damaged:
        parts.append(f"{diagnosis.damaged:,} damaged lines of metrics.jsonl were left out")
    for finding in diagnosis.findings:
        parts += [
            "",
            f"{finding.severity.upper()}  {finding.title}{_when(finding)}",
            f"  {finding.text}",
            f"  fix: {finding.advice}",
        ]
        parts.append(f"  {finding.link}")
    if not diagnosis.findings:
        parts += ["", "nothing looks wrong" if diagnosis.steps else "nothing to judge yet"]
    if diagnosis.absent:
        parts += ["", *(f"not judged: {reason}" for reason in diagnosis.absent)]
    return "\n".join(parts)


def _when(finding: RunFinding) -> str:
    if finding.first_step is None:
        return ""
    if finding.first_step == finding.last_step:
        return f" (step {finding.first_step})"
    return f" (steps {finding.first_step} to {finding.last_step}, {finding.count} times)"


def as_json(diagnosis: Diagnosis) -> str:
    """Strict JSON."""
    return json.dumps(diagnosis.as_dict(), indent=2, allow_nan=False, default=str)
