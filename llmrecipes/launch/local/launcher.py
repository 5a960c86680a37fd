"""This machine: a run in a separate process, which outlives the one that submitted it."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

import psutil

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.process import Watch
from llmrecipes.launch import lease as leases
from llmrecipes.launch import record
from llmrecipes.launch.base import JobHandle, JobRef, JobState, JobStatus, LauncherOptions, Logs, Rendering, Submission
from llmrecipes.launch.job import Job
from llmrecipes.launch.launcher_options import LOCAL, options_of
from llmrecipes.launch.programs import SchedulerUnavailable
from llmrecipes.runfiles import RunFiles

MODULE = "llmrecipes.workflow.local_job"
KILLED = 128 + signal.SIGKILL


class LocalLauncher:
    """`--to local`. A job's id is HOST:PID:TOKEN; the token distinguishes a later process with the same PID.

    The job of another machine, or of another container on this one, is known by its lease: see `launch.lease`.
    """

    takes: ClassVar = options_of(LOCAL)
    needs_cluster: ClassVar = False
    shares_disk: ClassVar = True
    poll_seconds: ClassVar = 0.5
    _started: ClassVar[list[subprocess.Popen[bytes]]] = []
    """Child processes, kept to be reaped."""
    _watch: ClassVar = Watch()

    def render(self, submission: Submission, chosen: LauncherOptions) -> Rendering:
        """The command of the process."""
        planned = submission.planned
        if planned.nodes != 1:
            raise UserError(
                f"{planned.nodes} with --to local",
                where="--nodes",
                rule="--to local runs on this machine only",
                fix="--to slurm or --to k8s",
            )
        values = {
            "exit-file": RunFiles(submission.run_dir).exit_code,
            "cluster": planned.cluster,
            "nproc": planned.plan.world_size,
            "run-id": submission.run_id,
            "runs-dir": submission.runs_dir,
            "data-dir": submission.data_dir,
            "max-restarts": chosen.get("max-restarts"),
        }
        words = [sys.executable, "-m", MODULE]
        words += [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
        command = (*words, *submission.options.words(), "--", *planned.asked)
        return Rendering(
            command,
            shown=shlex.join(command) + "\n",
            details={"command": list(command)},
            place={"host": socket.gethostname()},
            time_limit="none",
            has_token=bool(os.environ.get("HF_TOKEN")),
        )

    def require(self) -> None:
        """Nothing: the ranks run on this machine."""

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        """Start the process, in a new session so that a Ctrl-C here does not reach it."""
        token = secrets.token_hex(4)
        python, *words = rendering.command
        log = RunFiles(submission.run_dir).logs / f"local-{token}.out"
        try:
            leases.take(submission.run_dir, token)  # before the process exists: from now on no other job has the run
        except OSError as error:
            raise UserError(
                f"cannot write: {error.strerror}", where=str(RunFiles(submission.run_dir).lease), fix="--runs-dir DIR"
            ) from error
        with log.open("ab") as output:
            process = subprocess.Popen(
                [python, *words[:2], "--token", token, *words[2:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **submission.environment},
            )
        self._started.append(process)
        return Job(self, JobRef("local", f"{socket.gethostname()}:{process.pid}:{token}", submission.run_dir))

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """From the processes of this machine, and the exit codes they have written."""
        self._started[:] = [process for process in self._started if process.poll() is None]
        return {ref: status for ref in refs if (status := _status(ref, self._watch)) is not None}

    def cancel(self, ref: JobRef) -> None:
        """SIGTERM: the ranks save and exit. A job elsewhere sees a request in its run's directory."""
        if not _is_here(ref):
            with suppress(OSError):
                leases.request_cancel(ref.run_dir, _parts(ref)[2])
        elif (process := _process(ref)) is not None:
            process.send_signal(signal.SIGTERM)

    def logs(self, ref: JobRef) -> Logs:
        """The output of the process and its first rank, and that of the other ranks."""
        folder = RunFiles(ref.run_dir).logs
        return Logs((folder / f"local-{_parts(ref)[2]}.out", *sorted(folder.glob("rank-*.log"))))

    def names_job(self, text: str) -> bool:
        """HOST:PID:TOKEN."""
        parts = text.split(":")
        return len(parts) == 3 and parts[1].isdecimal()


def _status(ref: JobRef, watch: Watch) -> JobStatus | None:
    host, _, token = _parts(ref)
    is_here = _is_here(ref)
    running = is_here and _process(ref) is not None
    code = record.exit_code(ref.run_dir, token)  # read after checking the process, which writes it before it exits
    if code is not None:
        states = {int(ExitCode.DONE): JobState.COMPLETED, int(ExitCode.REQUEUE): JobState.SAVED}
        return JobStatus(states.get(code, JobState.FAILED), code)
    if not is_here:
        lease = _lease(ref)
        if lease is None:
            return None
        if watch.unchanged((ref.run_dir, token), lease.stamp) < leases.LEASE_SECONDS:
            return JobStatus(JobState.RUNNING)
        reason = f"the job on {host} has not renewed its lease for {leases.LEASE_SECONDS:g} s"
        return JobStatus(JobState.UNKNOWN, reason=reason)
    if running:
        return JobStatus(JobState.RUNNING)
    if not (RunFiles(ref.run_dir).logs / f"local-{token}.out").exists():
        return None
    return JobStatus(JobState.FAILED, KILLED, "its process was killed")


def _lease(ref: JobRef) -> leases.Lease | None:
    """The lease of a job; None if it never had one, or a newer job has its run.

    Raises:
        SchedulerUnavailable: the run's directory cannot be read at the moment.
    """
    try:
        lease = leases.read(ref.run_dir)
    except OSError as error:
        raise SchedulerUnavailable(f"cannot read: {error.strerror}", where=str(RunFiles(ref.run_dir).lease)) from error
    return lease if lease is not None and lease.token == _parts(ref)[2] else None


def _is_here(ref: JobRef) -> bool:
    """Whether a job can be looked up by its process id."""
    lease = _lease(ref)
    return _parts(ref)[0] == socket.gethostname() if lease is None else lease.machine.is_this


def _process(ref: JobRef) -> psutil.Process | None:
    _, pid, token = _parts(ref)
    if not _is_here(ref):
        return None
    try:
        process = psutil.Process(int(pid))
        words = process.cmdline()
        # Linux tells the parent of a new process that it runs before the words can be read.
        return process if not words or token in words else None
    except psutil.Error:
        return None


def _parts(ref: JobRef) -> tuple[str, str, str]:
    host, pid, token = ref.job_id.split(":")
    return host, pid, token
