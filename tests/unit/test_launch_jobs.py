"""Submitted jobs: one protocol for all launchers, what schedulers answer, and what users see of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from llmrecipes.api_commands import submit_recipe
from llmrecipes.cli import app
from llmrecipes.cli.app import run
from llmrecipes.launch import job as jobs
from llmrecipes.launch import launcher_options, record, registry
from llmrecipes.launch.base import (
    JobHandle,
    JobRef,
    JobState,
    JobStatus,
    LauncherOptions,
    Logs,
    Rendering,
    Submission,
)
from llmrecipes.launch.job import Job, handle, statuses
from llmrecipes.launch.kubernetes import launcher as kubernetes
from llmrecipes.launch.launcher_options import LauncherOption
from llmrecipes.launch.programs import SchedulerUnavailable
from llmrecipes.launch.run_options import JOB_FIELDS, JOB_OPTIONS, RunOptions, add_arguments, taken
from llmrecipes.launch.slurm.launcher import status_of
from llmrecipes.runfiles import RunFiles
from tests.helpers import tiny_on, train_lines, write_recipe
from tests.refusals import refused, require_message

PENDING, RUNNING = JobStatus(JobState.PENDING, reason="Priority"), JobStatus(JobState.RUNNING)


@dataclass
class Tiny:
    """A third launcher: its jobs are in the states that a test has written down."""

    takes: ClassVar = frozenset({"queue"})
    needs_cluster: ClassVar = False
    shares_disk: ClassVar = True
    poll_seconds: ClassVar = 0.001
    story: ClassVar[list[JobStatus | BaseException]] = []
    asked: ClassVar[list[int]] = []
    cancelled: ClassVar[list[str]] = []
    given: LauncherOptions = field(default_factory=dict)

    def render(self, submission: Submission, given: LauncherOptions) -> Rendering:
        return Rendering(("tiny", str(given["queue"])), shown="tiny\n", place={"queue": given["queue"]})

    def require(self) -> None: ...

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        return Job(self, JobRef("tiny", "tiny-1", submission.run_dir))

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        self.asked.append(len(refs))
        now = self.story.pop(0) if len(self.story) > 1 else self.story[0]
        if isinstance(now, BaseException):
            raise now
        return {ref: now for ref in refs if ref.job_id != "forgotten"}

    def cancel(self, ref: JobRef) -> None:
        self.cancelled.append(ref.job_id)
        self.story[:] = [JobStatus(JobState.SAVED, 75)]

    def logs(self, ref: JobRef) -> Logs:
        return Logs(files=(ref.run_dir / "logs" / "tiny.out",))

    def names_job(self, text: str) -> bool:
        return text.startswith("tiny-")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[JobStatus | BaseException]:
    """The story of the tiny launcher, which is one line of the table."""
    monkeypatch.setitem(registry.LAUNCHERS, "tiny", f"{__name__}:Tiny")
    monkeypatch.chdir(tmp_path)
    for values in (Tiny.story, Tiny.asked, Tiny.cancelled):
        values.clear()
    return Tiny.story


SUBMIT = ["submit", "gpt-tiny", "--to", "tiny", "--queue", "q", "--run-id", "r1"]


def wrote(run_dir: Path, **values: Any) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "status.json").write_text(json.dumps(values))


@pytest.mark.parametrize("code", [0, 2, 75, 93])
def test_a_launcher_is_a_line_of_the_table_and_wait_ends_with_its_code(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], code: int
) -> None:
    state = {0: JobState.COMPLETED, 75: JobState.SAVED}.get(code, JobState.FAILED)
    # Requeued in between, and once away: still one job.
    again = replace(RUNNING, restarts=1)  # between two questions
    tiny += [PENDING, RUNNING, SchedulerUnavailable("away"), RUNNING, again, PENDING, JobStatus(state, code)]
    assert run([*SUBMIT, "--wait"]) == code
    told = capsys.readouterr()
    assert [line.split()[1] for line in told.err.splitlines() if line[2] == line[5] == ":" and "WARN" not in line] == [
        "pending", "running", "running,", "pending", state,
    ]  # fmt: skip
    assert "(Priority)" in told.err
    assert f"{state}, exit code {code}" in told.out


def test_wait_ends_when_a_job_is_held_after_it_had_started(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """By its user before it starts, and for a moment while nodes are left out, it is only told."""
    monkeypatch.setattr(jobs, "HELD_SECONDS", 0.02)
    held = JobStatus(JobState.HELD, reason="JobHeldUser")
    log = tmp_path / "runs/gpt-tiny/r1/logs/tiny.out"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(f"line {number}" for number in range(100)) + "\nbad nodes: n2\n")
    tiny += [*[held] * 50, RUNNING, replace(held, restarts=1), replace(PENDING, restarts=1), replace(held, restarts=2)]
    assert run([*SUBMIT, "--wait"]) == 93
    told = capsys.readouterr()
    assert "bad nodes: n2" in told.err and "line 99" in told.err and "line 50" not in told.err
    assert str(log) in told.err and "release tiny-1" in told.err and "held, exit code 93" in told.out
    tiny[:] = [JobStatus(JobState.FAILED, 93)]
    assert run([*SUBMIT, "--wait"]) == 93
    assert "bad nodes: n2" in capsys.readouterr().err


def test_runs_have_their_jobs_and_those_that_wait_are_listed(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def listed() -> dict[str, tuple[str, str | None]]:
        assert run(["runs", "--json"]) == 0
        return {row["run_id"]: (row["state"], row["job"]) for row in json.loads(capsys.readouterr().out)}

    tiny.append(PENDING)
    assert run(SUBMIT) == 0
    wrote(tmp_path / "runs/gpt-tiny/own", state="finished", step=3, total=3)
    wrote(tmp_path / "runs/gpt-tiny/done", state="finished", step=3, total=3)
    record.write(JobRef("tiny", "tiny-2", tmp_path / "runs/gpt-tiny/done"))
    capsys.readouterr()
    Tiny.asked.clear()
    own = {"own": ("finished", None), "done": ("finished", "tiny-2")}
    assert listed() == {**own, "r1": ("pending", "tiny-1")}
    assert Tiny.asked == [1]  # not about a run that has finished
    tiny[:] = [JobStatus(JobState.HELD, restarts=1)]
    wrote(tmp_path / "runs/gpt-tiny/r1", state="saved", step=3, total=9)
    assert listed() == {**own, "r1": ("held", "tiny-1")}
    tiny[:] = [JobStatus(JobState.SAVED, 75)]
    assert listed() == {**own, "r1": ("saved", "tiny-1")}
    (tmp_path / "runs/gpt-tiny/r1/status.json").unlink()
    tiny[:] = [SchedulerUnavailable("away")]
    assert listed() == {**own, "r1": ("submitted", "tiny-1")}
    assert run(["runs"]) == 0
    assert "tiny-1" in capsys.readouterr().out


def test_wait_as_json_has_the_result_with_the_runs_numbers(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs/gpt-tiny/r1"
    wrote(run_dir, state="failed", step=7, total=10, valid_loss=2.5)
    (run_dir / "metrics.jsonl").write_text('{"step": 6, "loss": 3.5}\n{"step": 7, "loss": 3.25}\n')
    tiny += [RUNNING, JobStatus(JobState.FAILED, 93, "NonZeroExitCode")]
    assert run([*SUBMIT, "--wait", "--json"]) == 93
    answer = json.loads(capsys.readouterr().out)
    assert (answer["job_id"], answer["launcher"], answer["state"]) == ("tiny-1", "tiny", "failed")
    assert answer["result"] == {
        "state": "failed", "exit_code": 93, "reason": "NonZeroExitCode", "step": 7, "total": 10, "loss": 3.25,
        "valid_loss": 2.5,
    }  # fmt: skip


def test_submit_as_json_has_the_state(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.append(PENDING)
    assert run([*SUBMIT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "pending"
    assert run([*SUBMIT, "--json", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] is None
    assert run([*SUBMIT, "--wait", "--dry-run"]) == 2
    require_message(capsys.readouterr().err, "--wait", rule="--dry-run")
    assert run([*SUBMIT, "--partition", "x"]) == 2
    require_message(capsys.readouterr().err, "--partition", rule="--to")


def test_ctrl_c_leaves_the_job_alone_and_says_how_to_cancel_it(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny += [RUNNING, KeyboardInterrupt()]
    assert run([*SUBMIT, "--wait"]) == 130
    assert f"llmrecipes cancel {tmp_path}/runs/gpt-tiny/r1" in capsys.readouterr().err
    assert not Tiny.cancelled


@pytest.mark.parametrize("name", ["r1", "gpt-tiny/r1", "runs/gpt-tiny/r1", "tiny-1"])
def test_a_job_is_cancelled_by_any_of_its_names_and_once(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    tiny.append(RUNNING)
    assert run(SUBMIT) == 0
    capsys.readouterr()
    assert run(["cancel", name, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["cancelled"], answer["job_id"]) == ("running", True, "tiny-1")
    # Its ranks saved because of it: the job is cancelled, not waiting to be run again.
    assert run(["cancel", name, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["cancelled"], Tiny.cancelled) == ("cancelled", False, ["tiny-1"])


def test_cancel_refuses_what_is_no_job(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["cancel", "nothing", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["where"] == "runs"
    by_hand = tmp_path / "runs/gpt-tiny/by-hand"
    by_hand.mkdir(parents=True)
    (by_hand / "recipe.yaml").touch()
    assert run(["cancel", "gpt-tiny/by-hand"]) == 2
    require_message(capsys.readouterr().err, "runs/gpt-tiny/by-hand")
    RunFiles(by_hand).logs.mkdir()
    RunFiles(by_hand).submission.write_text("{")
    assert run(["cancel", "gpt-tiny/by-hand"]) == 2
    require_message(capsys.readouterr().err, "runs/gpt-tiny/by-hand/logs/submission.json")


def test_many_jobs_are_one_question_and_a_forgotten_one_is_told_by_its_run(
    tiny: list[JobStatus | BaseException], tmp_path: Path
) -> None:
    tiny.append(RUNNING)
    refs = [JobRef("tiny", f"tiny-{number}", tmp_path / str(number)) for number in range(50)]
    assert {found.state for found in statuses(refs).values()} == {JobState.RUNNING}
    assert Tiny.asked == [50]
    expected = {"finished": "completed", "saved": "saved", "failed": "failed", "interrupted": "unknown"}
    for state, found in expected.items():
        ref = JobRef("tiny", "forgotten", tmp_path / state)
        wrote(ref.run_dir, state=state, step=1)
        assert handle(ref).state == "unknown"  # of an earlier job, as far as anyone can tell
        record.write(ref)
        os.utime(ref.run_dir / "status.json")
        assert handle(ref).state == found
        record.write(ref, cancelled=True)
        assert handle(ref).state == ("completed" if state == "finished" else "cancelled")


def test_a_scheduler_that_stays_away_ends_the_waiting(
    tiny: list[JobStatus | BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = handle(JobRef("tiny", "tiny-1", tmp_path))
    tiny += [RUNNING, SchedulerUnavailable("away")]
    monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(SchedulerUnavailable):
        job.wait()
    tiny[:] = [RUNNING]
    assert job.wait(timeout=0.01) == JobState.RUNNING


# -- Slurm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "exit_code", "reason", "expected"),
    [
        ("PENDING", "0:0", "Priority", JobStatus(JobState.PENDING, reason="Priority")),
        ("REQUEUE_HOLD", "0:0", "held", JobStatus(JobState.HELD, None, "held")),
        ("PENDING", "0:0", "JobHeldUser", JobStatus(JobState.HELD, None, "JobHeldUser")),
        ("PENDING", "0:0", "job requeued in held state", JobStatus(JobState.HELD, None, "job requeued in held state")),
        ("COMPLETING", "0:0", "None", RUNNING),
        ("COMPLETED", "0:0", "None", JobStatus(JobState.COMPLETED, 0)),
        ("FAILED", "2:0", "NonZeroExitCode", JobStatus(JobState.FAILED, 2)),
        ("FAILED", "93:0", "NonZeroExitCode", JobStatus(JobState.FAILED, 93)),
        ("FAILED", "75:0", "NonZeroExitCode", JobStatus(JobState.SAVED, 75)),
        ("CANCELLED by 0", "0:15", "", JobStatus(JobState.CANCELLED, 143)),
        ("CANCELLED", "0:0", "None", JobStatus(JobState.CANCELLED)),
        ("FAILED", "23808", "NonZeroExitCode", JobStatus(JobState.FAILED, 93)),  # squeue's way to write it
        ("CANCELLED", "15", "None", JobStatus(JobState.CANCELLED, 143)),
        ("TIMEOUT", "0:0", "TimeLimit", JobStatus(JobState.FAILED, None, "TIMEOUT")),
        ("NODE_FAIL", "1:0", "None", JobStatus(JobState.FAILED, 1, "NODE_FAIL")),
    ],
)  # fmt: skip
def test_slurms_words(word: str, exit_code: str, reason: str, expected: JobStatus) -> None:
    assert status_of(word, exit_code, reason) == expected


def fake(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.calls\n{script}\n')
    path.chmod(0o755)


def calls(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


def test_slurm_is_asked_once_for_many_and_needs_no_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    fake(programs, "squeue", 'echo "1|RUNNING|None|0|2|"; echo "2|PENDING|Resources|0|0|"')
    fake(programs, "sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    refs = [JobRef("slurm", str(number), tmp_path / str(number)) for number in range(1, 5)]
    (tmp_path / "3/logs").mkdir(parents=True)
    (tmp_path / "3/logs/exit").write_text("3 93\n")
    (tmp_path / "4/logs").mkdir(parents=True)
    (tmp_path / "4/logs/exit").write_text("3 0\n")  # of an earlier job of the run
    found = statuses(refs)
    assert [found[ref].state for ref in refs] == ["running", "pending", "failed", "unknown"]
    assert (found[refs[0]].restarts, found[refs[2]].exit_code) == (2, 93)
    assert (len(calls(programs, "squeue")), len(calls(programs, "sacct"))) == (1, 1)
    fake(programs, "sacct", 'echo "3|CANCELLED by 0|0:15"; echo "4|COMPLETED|0:0"')
    assert [statuses(refs)[ref].state for ref in refs[2:]] == ["cancelled", "completed"]
    fake(programs, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SchedulerUnavailable):
        statuses(refs)
    monkeypatch.setenv("PATH", "/nowhere")
    with refused("squeue"):
        statuses(refs)


def test_jobs_of_several_slurm_clusters_are_asked_for_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    fake(programs, "squeue", 'case "$*" in *clusters=b*) echo "CLUSTER: b"; echo "7|RUNNING|None|0|0|";; esac')
    fake(programs, "sacct", "exit 1")
    fake(programs, "scancel", "exit 0")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    here, there = (JobRef("slurm", job_id, tmp_path) for job_id in ("7", "7;b"))
    assert [statuses([here, there])[ref].state for ref in (here, there)] == ["unknown", "running"]
    handle(there).cancel()
    assert calls(programs, "scancel") == ["--clusters=b 7"]
    assert handle(there).logs().files == (tmp_path / "logs/slurm-7.out",)


# -- Kubernetes: what the API server answers, from its types -----------------------------------------------------------


def condition(kind: str, **more: str) -> dict[str, Any]:
    return {"conditions": [{"type": "Suspended", "status": "False"}, {"type": kind, "status": "True", **more}]}


@pytest.mark.parametrize(
    ("status", "state", "code"),
    [
        ({}, "pending", None),
        ({"active": 2, "ready": 0}, "pending", None),
        ({"active": 2, "ready": 2}, "running", None),
        (condition("Suspended"), "pending", None),
        (condition("Complete"), "completed", 0),
        (condition("Completed"), "completed", 0),
        ({"replicatedJobsStatus": [{"name": "node", "ready": 1, "active": 1}]}, "running", None),
        ({"jobsStatus": [{"name": "node", "ready": 0, "active": 1}]}, "pending", None),
        (
            condition(
                "Failed",
                reason="PodFailurePolicy",
                message="Container node for pod ml/x-0-abcde failed with exit code 93 matching FailJob rule at index 0",
            ),
            "failed",
            93,
        ),
        (condition("Failed", reason="BackoffLimitExceeded", message="Job has reached its limit"), "failed", None),
    ],
)
def test_the_status_of_a_workload(status: dict[str, Any], state: str, code: int | None) -> None:
    found = kubernetes.status_of({"metadata": {"name": "x"}, "status": status})
    assert (found.state, found.exit_code) == (state, code)


def test_kubernetes_is_asked_once_a_namespace_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    items = [{"metadata": {"name": name}, "status": {"ready": 1}} for name in ("a", "c")]
    fake(programs, "kubectl", f"echo '{json.dumps({'kind': 'List', 'items': items})}'")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    refs = [JobRef("k8s", f"ml/job/{name}", tmp_path / name) for name in "abc"]
    other = JobRef("k8s", "ml/jobset/a", tmp_path / "set")
    found = statuses([*refs, other])
    assert [found[ref].state for ref in (*refs, other)] == ["running", "unknown", "running", "running"]
    first, second = calls(programs, "kubectl")
    assert first == (
        "get job --namespace ml --selector app.kubernetes.io/instance in (a,b,c) --output json"
    ) and second.startswith("get jobset ")
    record.write(refs[0])
    handle(refs[0]).cancel()
    assert calls(programs, "kubectl")[-1] == "delete job a --namespace ml --ignore-not-found --wait=false"
    fake(programs, "kubectl", "echo '{\"items\": []}'")
    assert handle(refs[0]).state == JobState.CANCELLED
    assert "app.kubernetes.io/instance=a" in handle(refs[0]).logs().command


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_exit_code_of_a_jobset_is_that_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As JobSet 0.11 and the Job controller of Kubernetes 1.36 wrote them."""
    set_told = "applying FailJobSet failure policy action (first failed job: a-node-0)"
    job_told = "Container node for pod ml/a-node-0-1-v6c2q failed with exit code 93 matching FailJob rule at index 0"
    answers = {
        kind: {
            "metadata": {"name": "a"},
            "status": condition("Failed", reason="FailJobSetFailurePolicyAction", message=set_told),
        },
        "job": {
            "metadata": {"name": "a-node-0", "labels": {"jobset.sigs.k8s.io/jobset-name": "a"}},
            "status": condition("Failed", reason="PodFailurePolicy", message=job_told),
        },
    }
    programs = tmp_path / "bin"
    for name, answer in answers.items():
        (tmp_path / name).write_text(json.dumps({"kind": "List", "items": [answer]}))
    fake(programs, "kubectl", f"cat {tmp_path}/$2")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    ref = JobRef("k8s", f"ml/{kind}/a", tmp_path / "a")
    assert statuses([ref])[ref].exit_code == 93
    assert "jobset.sigs.k8s.io/jobset-name in (a)" in calls(programs, "kubectl")[-1]


# -- this machine ------------------------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_a_local_job_leaves_its_exit_code_and_a_killed_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source that is not there: the job ends with 2 before it loads torch, and the submission knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    recipe = write_recipe(tiny_on(Path("/nothing/here")), tmp_path)
    assert run(["submit", recipe, "--to", "local", "--run-id", "r", "--wait", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["result"]["exit_code"], answer["ranks"]) == ("failed", 2, 1)
    [log] = (tmp_path / "runs/tiny/r/logs").glob("local-*.out")
    assert "/nothing/here" in log.read_text() and "Traceback" not in log.read_text()
    with subprocess.Popen([sys.executable, "-c", "input()", "abcd"], stdin=subprocess.PIPE) as process:
        ref = JobRef("local", f"{socket.gethostname()}:{process.pid}:abcd", tmp_path)
        assert handle(ref).state == JobState.RUNNING
        with monkeypatch.context() as early:
            early.setattr(psutil.Process, "cmdline", lambda _: [])
            assert handle(ref).state == JobState.RUNNING
        assert handle(JobRef("local", f"elsewhere:{process.pid}:abcd", tmp_path)).state == JobState.UNKNOWN
        record.write(ref)
        (tmp_path / "logs/local-abcd.out").touch()
        process.kill()
    assert handle(ref).result().exit_code == 137
    assert run(["submit", "gpt-tiny", "--to", "local", "--nodes", "2", "--dry-run"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_local_job_is_cancelled_and_resumed(
    elsewhere: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    corpus: Path,
    data_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    recipe = write_recipe(tiny_on(corpus, train={"train_iters": 400}), tmp_path)
    words = ["submit", recipe, "--to", "local", "--run-id", "r", "--data-dir", str(data_dir), "--json"]
    assert run(words) == 0
    job = handle(record.read(tmp_path / "runs/tiny/r").ref)  # type: ignore[union-attr]
    while not train_lines(tmp_path / "runs/tiny/r"):
        assert job.wait(timeout=0.1) == JobState.RUNNING
    if elsewhere:  # what a cancellation on another machine sees: it can send no signal
        path = RunFiles(tmp_path / "runs/tiny/r").lease
        path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another boot"}))
    assert run(["cancel", "r"]) == 0
    assert job.wait(timeout=240) == JobState.CANCELLED
    result = job.result()
    assert (result.exit_code, result.total) == (75, 400) and result.step
    capsys.readouterr()
    assert run([*words, f"train.train_iters={result.step + 3}", "--accept-changes", "--wait"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["step"] == result.step + 3


LAUNCHER_VALUES = {
    "time": "8:00:00", "runtime": "apptainer", "image": f"example.com/y@sha256:{'1' * 64}", "python": "/opt/python3",
    "warning": "300", "max-restarts": "0", "sbatch": "--comment=x", "prepare-nodes": "2", "flavor": "jobset",
    "secret": "TOKEN=name", "tracking-uri": "http://mlflow:5000", "host-network": None, "prepared": None,
    "topology": "rack",
}  # fmt: skip
"""Values of the options that do not take any word; None: a flag."""


@pytest.mark.parametrize("to", [*registry.LAUNCHERS])
def test_no_option_of_a_launcher_is_ignored(to: str, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> tuple[str, str]:
        assert run([*command, *words, "--dry-run"]) == 0
        told = capsys.readouterr()
        return told.out, told.err

    command = ["submit", "gpt-7b", "--to", to, "--run-id", "r", "--cluster", "h100-ib"]
    if to == "local":
        command[1] = "gpt-tiny"
        del command[-2:]
    image = ["--image", f"example.com/x@sha256:{'0' * 64}"]
    for name in registry.launcher(to).takes:
        value = LAUNCHER_VALUES.get(name, "word")
        words = [f"--{name}"] if value is None else [f"--{name}={value}"]
        more = image if name == "runtime" or (to == "k8s" and name != "image") else []
        more = [*more, "--queue", "q"] if name == "topology" else more
        before = image if to == "k8s" else []
        assert shown(*more, *words) != shown(*(more or before)), name


def test_an_option_of_a_launcher_is_declared_once(
    tiny: list[JobStatus | BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added = LauncherOption(("tiny", "local"), "mark jobs with N.", "N", int, least=1)
    monkeypatch.setitem(launcher_options.OPTIONS, "my-mark", added)
    monkeypatch.setattr(app, "_parser", app._parser.__wrapped__)  # built before
    monkeypatch.setattr(Tiny, "takes", launcher_options.options_of("tiny") | {"queue"})
    chosen: list[LauncherOptions] = []
    render = Tiny.render

    def recorded(self: Tiny, submission: Submission, given: LauncherOptions) -> Rendering:
        chosen.append(given)
        return render(self, submission, given)

    monkeypatch.setattr(Tiny, "render", recorded)
    assert run([*SUBMIT, "--my-mark", "7", "--dry-run"]) == 0
    submit_recipe("gpt-tiny", to="tiny", queue="q", my_mark=8, dry_run=True)
    assert [given["my-mark"] for given in chosen] == [7, 8]
    capsys.readouterr()
    assert run(["submit", "--help"]) == 0
    assert re.search(r"--my-mark N\s+mark jobs", capsys.readouterr().out)
    assert run([*SUBMIT, "--my-mark", "0"]) == 2, "below the least"
    assert "my_mark" in launcher_options.fields({"my-mark": 1}) and not launcher_options.fields({"my-mark": None})


def test_the_options_of_a_start_reach_the_ranks_of_every_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    words = RunOptions(**dict.fromkeys(JOB_FIELDS, True)).words()
    assert set(words) == {f"--{name}" for name in JOB_OPTIONS}
    parser = ArgumentParser()
    add_arguments(parser)
    assert RunOptions.parsed(parser.parse_args(words)).words() == words
    site = ["gpt-7b", "--cluster", "h100-ib"]
    image = f"example.com/x@sha256:{'0' * 64}"
    for to, asked in (("local", ["gpt-tiny"]), ("slurm", site), ("k8s", [*site, "--image", image])):
        for given in ((), words):
            assert run(["submit", *asked, "--to", to, *given, "--dry-run"]) == 0
            shown = capsys.readouterr().out
            assert all((word in shown) is bool(given) for word in words)
    options, rest = taken({"allow-socket": "yes", "time": "1:00:00"})
    assert options == RunOptions(sample=False, allow_socket=True) and rest == {"time": "1:00:00"}
    with refused("--allow-socket"):
        taken({"allow-socket": "maybe"})
