"""Slurm: jobs submitted with sbatch, queried with squeue, and with sacct if the cluster has accounting."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from llmrecipes.errors import UserError
from llmrecipes.files import folder
from llmrecipes.launch import record
from llmrecipes.launch.base import JobHandle, JobRef, JobState, JobStatus, LauncherOptions, Logs, Rendering, Submission
from llmrecipes.launch.job import Job
from llmrecipes.launch.launcher_options import SLURM, fields, options_of
from llmrecipes.launch.programs import SchedulerUnavailable, ask, require_program, run, tell
from llmrecipes.launch.slurm import partitions
from llmrecipes.launch.slurm.sbatch import after, command, notice, prepare_command, script_text
from llmrecipes.launch.slurm.slurm_options import SlurmOptions, SlurmRequest, value_of
from llmrecipes.runfiles import RunFiles

DRY_RUN = "--dry-run prints the command"
SCRIPTS = folder("slurm")
RUNNING = {"RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT", "RESIZING"}
PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED"}
HELD = {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
HELD_REASON = re.compile("held", re.IGNORECASE)
"""Of a pending job: `JobHeldUser`, `JobHeldAdmin`, `job requeued in held state`, `launch failed requeued held`."""
ENDED = {"COMPLETED": JobState.COMPLETED, "CANCELLED": JobState.CANCELLED}
"""Other states (FAILED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY ...) are failures, with the state as the reason."""
SQUEUE = ("squeue", "--noheader", "--states=all", "--Format=JobID:|,State:|,Reason:60|,exit_code:|,RestartCnt:|")
SACCT = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State,ExitCode")
SAVED_CODE = 75


class SlurmLauncher:
    """`--to slurm`."""

    takes: ClassVar = options_of(SLURM)
    needs_cluster: ClassVar = True
    shares_disk: ClassVar = True
    poll_seconds: ClassVar = 15.0

    def render(self, submission: Submission, chosen: LauncherOptions) -> Rendering:
        """sbatch's command line; and that of the job which tokenizes, if GPUs would wait for it."""
        planned = submission.planned_for_cluster
        warned = notice(planned.plan, planned.profile, submission.runs_dir, chosen.get("warning"))
        options = _options(submission, chosen, warned.seconds)
        request = SlurmRequest(
            planned.asked, planned.cluster, planned.nodes, submission.run_id, submission.runs_dir,
            submission.data_dir, submission.run_dir,
        )  # fmt: skip
        words = command(request, planned.plan, planned.profile, options, SCRIPTS / "train.sbatch")
        first: tuple[str, ...] = ()
        notes = {"last save": f"{warned.seconds} s before the time limit: {warned.reason}"}
        # With a dependency of their own users say what the job waits for.
        has_dependency = value_of("dependency", (*planned.profile.slurm.sbatch, *options.more)) is not None
        if planned.profile.gpus_per_node and not submission.prepared and not has_dependency:
            first = prepare_command(request, planned.profile, options, SCRIPTS / "prepare.sbatch")
            where = (
                ""
                if chosen.get("prepare-partition") or planned.profile.slurm.cpu_partition
                else ("; --prepare-partition NAME for one without GPUs")
            )
            count = options.prepare_nodes
            on = "on one node" if count == 1 else f"on {count:,} nodes, as a Ray cluster"
            notes["tokenize"] = f"the data is not prepared: a separate job prepares it first, {on}{where}"
        given_last = _options_of(words)
        return Rendering(
            words,
            first=first,
            shown=script_text(RunFiles(submission.run_dir).logs, words, first),
            details={
                "command": list(words),
                "prepare_command": list(first) or None,
            },
            notes=notes,
            place={"partition": given_last.get("partition")},
            time_limit=given_last.get("time"),
            has_token=bool(os.environ.get("HF_TOKEN")),  # jobs inherit the environment of sbatch
        )

    def require(self) -> None:
        """Requires sbatch."""
        require_program("sbatch", f"{DRY_RUN}; make train runs the recipe on this machine")

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        """Run sbatch, whose `--parsable` output is the id: `JOB`, or `JOB;CLUSTER` with several clusters."""
        words = rendering.command
        prepare = ""
        given = _options_of(words)
        known = partitions.known((f"--clusters={given['clusters']}",) if "clusters" in given else ())
        partitions.require_room(known, _wanted(given))
        if rendering.first:
            prepare = self._sbatch(rendering.first, known, "--prepare-partition")
            words = after(words, prepare.partition(";")[0])
        try:
            job = self._sbatch(words, known, "--partition")
        except UserError:
            if prepare:
                self.cancel(JobRef("slurm", prepare, submission.run_dir))
            raise
        return Job(self, JobRef("slurm", job, submission.run_dir))

    def _sbatch(self, words: Sequence[str], known: Sequence[partitions.SlurmPartition], option: str) -> str:
        """The id of the new job; a refused partition is answered with those that there are."""
        names = [entry.name for entry in known]
        asked = _names(_options_of(words).get("partition"))
        wrong = names and not set(asked) <= set(names)
        job = tell(words, fix=f"{option} {' or '.join(names)}" if wrong else DRY_RUN)
        if not self.names_job(job):
            raise UserError(f"printed {job!r}, which is not the id of a job", where=words[0], fix=DRY_RUN)
        return job

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """One squeue per cluster; then sacct and the exit files, for jobs that slurmctld has forgotten."""
        clusters: dict[str, dict[str, JobRef]] = defaultdict(dict)
        for ref in refs:
            number, _, cluster = ref.job_id.partition(";")
            clusters[cluster][number] = ref
        by_ref = {}
        for cluster, numbered in clusters.items():
            where = (f"--clusters={cluster}",) if cluster else ()
            known = _squeue(numbered, where)
            if forgotten := numbered.keys() - known.keys():
                known |= _sacct(forgotten, where)
            for number, ref in numbered.items():
                code = None if number in known else record.exit_code(ref.run_dir, number)
                if number in known or code is not None:
                    by_ref[ref] = known[number] if code is None else ended_with(code)
        return by_ref

    def cancel(self, ref: JobRef) -> None:
        """scancel, which gives the ranks Slurm's `KillWait` to save."""
        number, _, cluster = ref.job_id.partition(";")
        tell(("scancel", *((f"--clusters={cluster}",) if cluster else ()), number))

    def logs(self, ref: JobRef) -> Logs:
        """The file that all starts of the job append to."""
        return Logs(files=(RunFiles(ref.run_dir).logs / f"slurm-{ref.job_id.partition(';')[0]}.out",))

    def names_job(self, text: str) -> bool:
        """A number, or NUMBER;CLUSTER."""
        number = text.partition(";")[0]
        return number.isascii() and number.isdecimal()


def ended_with(code: int) -> JobStatus:
    """The status of a job that has left the queue, by the exit code of its batch script."""
    states = {0: JobState.COMPLETED, SAVED_CODE: JobState.SAVED}
    return JobStatus(states.get(code, JobState.FAILED), code)


def status_of(word: str, exit_code: str, reason: str = "", restarts: int = 0) -> JobStatus:
    """The status for a Slurm state.

    Args:
        word: a state such as `TIMEOUT`, or `CANCELLED by 0`.
        exit_code: of the batch script, as `CODE:SIGNAL` (sacct), or both in one number as in wait(2) (squeue).
        reason: why the job waits, or why it failed.
        restarts: number of requeues.
    """
    state = word.partition(" ")[0].rstrip("+")
    pending = "" if reason in ("None", "") else reason
    if state in HELD or (state in PENDING and HELD_REASON.search(pending)):
        return JobStatus(JobState.HELD, reason=pending, restarts=restarts)
    if state in PENDING:
        return JobStatus(JobState.PENDING, reason=pending, restarts=restarts)
    if state in RUNNING:
        return JobStatus(JobState.RUNNING, restarts=restarts)
    ended = _exit_code(exit_code)
    if state == "FAILED" and ended:
        return replace(ended_with(ended), restarts=restarts)
    job_state = ENDED.get(state, JobState.FAILED)
    code_or_none = ended or (0 if job_state == JobState.COMPLETED else None)
    return JobStatus(job_state, code_or_none, "" if state in ENDED else state, restarts)


def _exit_code(text: str) -> int:
    """The exit code of a batch script, or 128 and its signal; 0 also for a job that Slurm has ended."""
    code, colon, number = text.partition(":")
    if not colon and code.isdecimal():
        code, number = str(int(code) >> 8), str(int(code) & 0x7F)
    signal = int(number) if number.isdecimal() else 0
    return (int(code) if code.isdecimal() else 0) or (128 + signal if signal else 0)


def _options_of(words: Sequence[str]) -> dict[str, str]:
    """The options of an sbatch command with their last values."""
    return dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)


def _names(partition: str | None) -> tuple[str, ...]:
    """The partitions that a value names; without one, those of sbatch's variable."""
    return tuple(filter(None, (partition or os.environ.get("SBATCH_PARTITION", "")).split(",")))


def _wanted(given: Mapping[str, str]) -> partitions.WantedResources:
    fewest = re.match("[0-9]*", given["nodes"])
    return partitions.WantedResources(
        _names(given.get("partition")),
        int(fewest[0] or 1) if fewest else 1,
        given.get("time") or os.environ.get("SBATCH_TIMELIMIT"),
        int(given["signal"].rpartition("@")[2]),
    )


def _squeue(job_ids: Iterable[str], where: tuple[str, ...]) -> dict[str, JobStatus]:
    require_program("squeue", "run it on a login node")
    code, answer, words = run((*SQUEUE, *where, f"--jobs={','.join(job_ids)}"))
    if code and "Invalid job id" in words:  # printed for a query of a single, unknown id
        return {}
    if code:
        raise SchedulerUnavailable(f"exit code {code}:\n{words}", where="squeue")
    rows = (line.split("|") for line in answer.splitlines() if line.count("|") == 5)
    return {
        row[0].strip(): status_of(row[1].strip(), row[3].strip(), row[2].strip(), int(row[4].strip() or 0))
        for row in rows
    }


def _sacct(job_ids: Iterable[str], where: tuple[str, ...]) -> dict[str, JobStatus]:
    """The last record of each job; none if the cluster has no accounting."""
    try:
        answer = ask((*SACCT, *where, f"--jobs={','.join(job_ids)}"))
    except SchedulerUnavailable:
        return {}
    rows = (line.split("|") for line in answer.splitlines() if line.count("|") == 2)
    return {row[0]: status_of(row[1], row[2]) for row in rows}


def _options(submission: Submission, chosen: LauncherOptions, warning_seconds: int) -> SlurmOptions:
    values = fields(chosen, ("warning", "sbatch"))
    if "image" not in values:
        values.setdefault("python", sys.executable)
    more = tuple(chosen.get("sbatch") or ())
    return SlurmOptions(**values, warning=warning_seconds, run=submission.options, more=more)
