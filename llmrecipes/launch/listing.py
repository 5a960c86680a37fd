"""The runs in a directory with their jobs: also those that wait in a queue and have not written anything."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.launch import record
from llmrecipes.launch.base import JobRef, JobState, JobStatus
from llmrecipes.launch.job import statuses
from llmrecipes.tracking.run_list import RunSummary, list_runs, summary

logger = logging.getLogger(__name__)
OVER = ("finished", "failed")
"""States of runs whose scheduler is not asked."""
WAITING = (JobState.PENDING, JobState.HELD)


def runs_with_jobs(runs_dir: Path) -> list[RunSummary]:
    """All runs under `runs_dir` and their jobs, oldest first; then submitted runs that have not started.

    A run whose job waits has the state of the job, `pending` or `held`, whatever it was before.
    """
    refs = {str(folder): ref for folder in record.submitted(runs_dir) if (ref := _ref(folder)) is not None}
    started = list_runs(runs_dir)
    queued = [summary(ref.run_dir) for path, ref in refs.items() if path not in {run.path for run in started}]
    runs = [*started, *queued]
    asked = [refs[run.path] for run in runs if run.path in refs and run.state not in OVER]
    known = _statuses(asked)
    return [_with_job(run, refs.get(run.path), known) for run in runs]


def _ref(folder: Path) -> JobRef | None:
    try:
        recorded = record.read(folder)
    except UserError as error:
        logger.warning("%s", error)
        return None
    return None if recorded is None else recorded.ref


def _statuses(refs: list[JobRef]) -> dict[JobRef, JobStatus]:
    """Statuses of the jobs of each scheduler that answers."""
    groups: dict[str, list[JobRef]] = defaultdict(list)
    for ref in refs:
        groups[ref.launcher].append(ref)
    known: dict[JobRef, JobStatus] = {}
    for name, group in groups.items():
        try:
            known |= statuses(group)
        except UserError as error:
            logger.warning("the state of %d jobs (%s) is unknown: %s", len(group), name, error)
    return known


def _with_job(run: RunSummary, ref: JobRef | None, known: dict[JobRef, JobStatus]) -> RunSummary:
    if ref is None:
        return run
    state = run.state
    job = known.get(ref)
    if job is not None and (job.state in WAITING or state == "unknown"):
        state = str(job.state)
    elif job is None and state == "unknown":
        state = "submitted"
    return replace(run, state=state, job=ref.job_id)
