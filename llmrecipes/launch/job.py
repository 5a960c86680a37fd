"""A submitted job, for any launcher; and status queries for many jobs at once."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from llmrecipes.errors import UserError
from llmrecipes.launch import record
from llmrecipes.launch.base import EXIT_CODES, JobHandle, JobRef, JobResult, JobState, JobStatus, Launcher, Logs
from llmrecipes.launch.programs import SchedulerUnavailable
from llmrecipes.launch.registry import launcher
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking import status
from llmrecipes.tracking.run_list import summary

logger = logging.getLogger(__name__)

FIRST_POLL_SECONDS = 0.5
PATIENCE_SECONDS = 3600.0
"""How long to retry while a scheduler does not answer: jobs survive a restart of its daemons."""
HELD_SECONDS = 60.0
"""A job that leaves bad nodes out is held for a moment while they are set."""
RECORDED = {"finished": JobState.COMPLETED, "saved": JobState.SAVED, "failed": JobState.FAILED}


class Job:
    """A `JobHandle` for any launcher."""

    def __init__(self, launcher: Launcher, ref: JobRef) -> None:
        self._launcher = launcher
        self.ref = ref

    @property
    def status(self) -> JobStatus:
        """The current status of the job."""
        return _statuses(self._launcher, [self.ref])[self.ref]

    @property
    def state(self) -> JobState:
        return self.status.state

    def wait(
        self, timeout: float | None = None, changed: Callable[[JobStatus], None] = lambda _status: None
    ) -> JobState:
        """See `JobHandle.wait`. A query that the scheduler does not answer is retried for an hour."""
        started = answered = since = time.monotonic()
        before = None
        pause = min(FIRST_POLL_SECONDS, self._launcher.poll_seconds)
        while True:
            try:
                now = self.status
                answered = time.monotonic()
            except SchedulerUnavailable as error:
                if before is None or time.monotonic() - answered > PATIENCE_SECONDS:
                    raise
                logger.warning("%s; still waiting for the job", error)
                now = before
            if now != before:
                changed(now)
                since = time.monotonic()
                pause = min(FIRST_POLL_SECONDS, self._launcher.poll_seconds)
            before = now
            left = None if timeout is None else started + timeout - time.monotonic()
            stuck = now.state == JobState.HELD and now.restarts and time.monotonic() - since >= HELD_SECONDS
            if now.state.ended or stuck or (left is not None and left <= 0):
                return now.state
            time.sleep(pause if left is None else min(pause, left))
            pause = min(2 * pause, self._launcher.poll_seconds)

    def cancel(self) -> None:
        """See `JobHandle.cancel`."""
        if self.state.ended:
            return
        known = record.read(self.ref.run_dir)
        if known is None or known.ref.job_id != self.ref.job_id:  # the run has a newer job
            self._launcher.cancel(self.ref)
            return
        record.write(self.ref, cancelled=True)  # before scancel: a waiting process must see it when the job ends
        try:
            self._launcher.cancel(self.ref)
        except UserError:
            record.write(self.ref)
            raise

    def logs(self) -> Logs:
        return self._launcher.logs(self.ref)

    def result(self) -> JobResult:
        """See `JobHandle.result`. The numbers are from the run's record, if this machine can read it."""
        now = self.status
        code = EXIT_CODES.get(now.state, 1) if now.exit_code is None else now.exit_code
        run = summary(self.ref.run_dir)
        return JobResult(now.state, code, now.reason, run.step, run.total, run.loss, run.valid_loss)


def handle(ref: JobRef) -> JobHandle:
    """The job that a reference names."""
    return Job(launcher(ref.launcher), ref)


def statuses(refs: Iterable[JobRef]) -> dict[JobRef, JobStatus]:
    """The status of many jobs, with one query to each scheduler.

    Raises:
        UserError: a scheduler does not answer.
    """
    groups: dict[str, list[JobRef]] = defaultdict(list)
    for ref in refs:
        groups[ref.launcher].append(ref)
    return {ref: status for name, group in groups.items() for ref, status in _statuses(launcher(name), group).items()}


def _statuses(launcher: Launcher, refs: list[JobRef]) -> dict[JobRef, JobStatus]:
    known = launcher.statuses(refs)
    return {ref: _as_cancelled(ref, known[ref]) if ref in known else _recorded(ref) for ref in refs}


def _as_cancelled(ref: JobRef, reported: JobStatus) -> JobStatus:
    """A job that saved because it was cancelled counts as cancelled."""
    if reported.state in (JobState.SAVED, JobState.FAILED) and _was_cancelled(ref):
        return replace(reported, state=JobState.CANCELLED)
    return reported


def _recorded(ref: JobRef) -> JobStatus:
    """The status, from the run's record, of an ended job that its scheduler has forgotten."""
    values = status.read(ref.run_dir)
    try:
        run = RunFiles(ref.run_dir)
        newer = run.status_file.stat().st_mtime >= run.submission.stat().st_mtime or _was_cancelled(ref)
    except OSError:
        newer = False
    state = RECORDED.get(str(values.get("state")), JobState.UNKNOWN) if newer else JobState.UNKNOWN
    if state != JobState.COMPLETED and _was_cancelled(ref):
        state = JobState.CANCELLED
    return JobStatus(state, reason="" if state == JobState.COMPLETED else "the scheduler no longer knows this job")


def _was_cancelled(ref: JobRef) -> bool:
    try:
        known = record.read(ref.run_dir)
    except UserError:
        return False
    return known is not None and known.cancelled and known.ref.job_id == ref.job_id
