"""What the doctor said before a start, kept with the run: a line of `logs/doctor.jsonl` for each check.

Findings that several nodes have in common are one, with their number, so that a line of thousands of nodes stays small.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmrecipes import untrusted
from llmrecipes.doctor.check_result import Finding
from llmrecipes.redact import redacted
from llmrecipes.runfiles import RunFiles

MOST_FINDINGS = 500
"""Of a line; the most severe are kept."""
NAMED_NODES = 8
"""Of a finding; the others are counted."""
MOST_LINES = 50
"""That are read, the newest."""
_ORDER = ("fail", "warn", "skip", "ok")


def summary(findings: Sequence[Finding], bad: Sequence[str]) -> dict[str, Any]:
    """JSON values without secrets, the most severe findings first."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, node=""), []).append(finding.node)
    groups = sorted(nodes.items(), key=lambda item: _ORDER.index(item[0].status))
    shown = [
        {"check": finding.check, "status": finding.status, "what": finding.what, "fix": finding.fix,
         "nodes": of[:NAMED_NODES], "number": len(of)}
        for finding, of in groups[:MOST_FINDINGS]
    ]  # fmt: skip
    values = {
        "time": time.time(),
        "ok": not bad,
        "nodes": len({finding.node for finding in findings if finding.node}),
        "bad_nodes": list(bad),
        "findings": shown,
        "left_out": max(0, len(groups) - MOST_FINDINGS),
    }
    return redacted(values)


def keep(path: Path, findings: Sequence[Finding], bad: Sequence[str]) -> str | None:
    """Append what was found to a file; returns why that failed: no run may fail because of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(summary(findings, bad)) + "\n")
    except OSError as error:
        return f"{path}: cannot store the doctor's findings with the run: {error.strerror}"
    return None


def adopt(path: Path, run: RunFiles) -> None:
    """Move the lines of a file, which a job has written before it knew the run's directory, to the run."""
    try:
        text = untrusted.read(path, most=untrusted.MANIFEST)
        with run.doctor.open("ab") as file:
            file.write(text)
        path.unlink()
    except (OSError, ValueError):
        return  # there is none, or it stays where it is


def read(run: RunFiles) -> list[dict[str, Any]]:
    """The newest lines, oldest first; those that cannot be read are left out."""
    try:
        kept = list(untrusted.lines(run.doctor, root=run.path))[-MOST_LINES:]
    except (OSError, ValueError):
        return []
    findings = []
    for line in kept:
        try:
            value = untrusted.parse_line(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("findings"), list):
            findings.append(value)
    return findings
