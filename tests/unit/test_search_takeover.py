"""Who continues a trial: leases of jobs elsewhere, heartbeats, jobs that are dropped, and what they have used."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from llmrecipes.errors import ExitCode
from llmrecipes.hardware import process as processes
from llmrecipes.launch import lease, record
from llmrecipes.launch.base import JobRef, JobState, JobStatus
from llmrecipes.launch.job import handle
from llmrecipes.launch.programs import SchedulerUnavailable
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles
from llmrecipes.search import storage, trials
from llmrecipes.search.budget import ENDED, RANK_SECONDS, RANKS, RUN_ID, used
from llmrecipes.search.command import quiet
from llmrecipes.search.starting import MACHINE, NotStarted
from llmrecipes.search.trials import RETURNED, WORKER, own_trials
from llmrecipes.search.worker import Stop, Worker
from tests.unit.search_lab import Curves, bowl, curves, ran, searched, states, worker

__all__ = ["curves"]

pytestmark = pytest.mark.usefixtures("curves")
ELSEWHERE = {"host": "elsewhere", "boot_id": "another boot", "pid_namespace": "pid:[1]"}
# A job that trains when it reads a line, of a machine that is not this one.
JOB = """
import json, os, sys, threading
from pathlib import Path
from llmrecipes.launch import lease
from llmrecipes.runfiles import RunFiles

run_dir, token, boot = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
lease.RENEW_SECONDS = 0.02
if boot:
    lease.this_machine = lambda: lease.MachineIdentity("elsewhere", boot, "pid:[1]")

def end(code):
    RunFiles(run_dir).exit_code.write_text(f"{token} {code}")
    os._exit(code)

lease.take(run_dir, token)
with lease.held(run_dir, token, lambda: end(75), lambda: os._exit(137)):
    print("holds", flush=True)
    sys.stdin.readline()
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in (3, 6, 9, 12):
            trained = {"step": step, "loss": 1.0, "step_seconds": 0.25, "consumed_tokens": step * 512}
            print(json.dumps(trained), json.dumps({"step": step, "valid_loss": 3.5}), sep="\\n", file=file)
    end(0)
"""


@contextmanager
def job_elsewhere(run_dir: Path, boot: str = "another boot") -> Iterator[tuple[subprocess.Popen[str], JobRef]]:
    """A job of another machine, which holds the lease of its run; empty `boot`: of this machine."""
    (run_dir / "logs").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", JOB, str(run_dir), "abcd", boot],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        ref = JobRef("local", f"elsewhere:{process.pid}:abcd", run_dir)
        record.write(ref)
        try:
            yield process, ref
        finally:
            process.kill()


def begun(made: Worker, **attributes: Any) -> optuna.Trial:
    """A trial that a search process of another machine has begun."""
    trial = made.study.ask()
    trials.beat(made.study, trial)
    trial.suggest_float("optimizer.lr", 1e-4, 1.0, log=True)
    values = {WORKER: {**ELSEWHERE, "pid": 1, "started": 1}, RUN_ID: made.place.run_id(trial.number), **attributes}
    for name, value in values.items():
        trial.set_user_attr(name, value)
    return trial


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of whatever is watched."""
    clock = [1000.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    return clock


def take_back(made: Worker) -> None:
    trials.take_back(made.study, 100, made._watch, made._starter)


def lose(made: Worker, now: list[float]) -> None:
    """The grace period passes without a heartbeat."""
    take_back(made)
    now[0] += 101
    take_back(made)


def test_a_job_of_another_machine_is_followed_and_not_started_a_second_time(tmp_path: Path) -> None:
    """The search process that started it there has died; its training has not."""
    made = worker(searched(n_trials=1), tmp_path)
    trial = begun(made, **{MACHINE: ELSEWHERE})
    with job_elsewhere(made.place.run_dir("lab-0000")) as (process, _):
        trials.return_to_queue(made.study, trial.number)
        said: list[str] = []

        def log(line: str) -> None:
            said.append(line)
            if "continues trial 0" in line:  # it is followed
                process.communicate("train\n")

        made.log = log
        assert made.run() == ExitCode.DONE
    assert Curves.submitted == []
    [done] = own_trials(made.study)
    assert (done.state, done.value) == (TrialState.COMPLETE, 3.5)
    assert said[0].startswith("trial 1 continues trial 0 ")


def test_a_job_whose_machine_is_gone_is_started_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(searched(n_trials=1), tmp_path)
    trial = begun(made, **{MACHINE: ELSEWHERE})
    with job_elsewhere(made.place.run_dir("lab-0000")) as (process, ref):
        with monkeypatch.context() as patch:
            patch.setattr(lease, "LEASE_SECONDS", 0.5)
            assert handle(ref).wait(timeout=1.0) == JobState.RUNNING  # it renews its lease
        process.kill()
        process.wait()
        assert handle(ref).state == JobState.RUNNING  # nothing is known yet
        monkeypatch.setattr(lease, "LEASE_SECONDS", 0.05)
        trials.return_to_queue(made.study, trial.number)
        assert made.run() == ExitCode.DONE
    assert Curves.submitted == ["lab-0000"]
    assert [trial.state for trial in own_trials(made.study)] == [TrialState.COMPLETE]


@pytest.mark.parametrize("boot", ["another boot", ""])
def test_a_job_ends_when_its_run_is_given_to_another(boot: str, tmp_path: Path) -> None:
    """It was believed to be lost, and was only stopped for a while."""
    with job_elsewhere(tmp_path / "run", boot) as (process, _):
        process.send_signal(signal.SIGSTOP)
        lease.take(tmp_path / "run", "newer")
        process.send_signal(signal.SIGCONT)
        assert process.wait(240) == 137


def test_a_job_of_another_machine_is_cancelled(tmp_path: Path) -> None:
    with job_elsewhere(tmp_path / "run") as (process, ref):
        handle(ref).cancel()
        assert process.wait(240) == ExitCode.REQUEUE
        assert handle(ref).state == JobState.CANCELLED


@pytest.mark.parametrize("where", [{"boot_id": "another boot"}, {"pid_namespace": "pid:[1]"}])
def test_a_process_id_is_asked_for_only_where_it_means_something(where: dict[str, str], tmp_path: Path) -> None:
    """Containers have process ids of their own, and so has each boot; the host may have the same name."""
    here = trials.this_worker()
    assert trials.is_alive(here)
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as ended:
        other = {**here, "pid": ended.pid, "started": processes.start_ticks(ended.pid)}
        assert trials.is_alive(other)
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert trials.is_alive(other) is False  # also while nobody has waited for it
    assert trials.is_alive({**here, "started": 1}) is False
    assert trials.is_alive({**here, "pid": ended.pid, **where}) is None
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/local-abcd.out").touch()
    lease.take(tmp_path, "abcd")
    ref = JobRef("local", f"{here['host']}:{ended.pid}:abcd", tmp_path)
    assert handle(ref).state == JobState.FAILED
    path = RunFiles(tmp_path).lease
    for name, value in where.items():
        path.write_text(path.read_text().replace(here[name], value))
    assert handle(ref).state == JobState.RUNNING


def test_a_job_that_cannot_be_seen_from_here_is_left_to_its_machine(
    tmp_path: Path, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL is shared, the disk is not: whether it still trains there is not known here."""
    made = worker(searched(n_trials=1, grace_period=100), tmp_path)
    begun(made, **{MACHINE: ELSEWHERE})
    lose(made, now)
    assert states(made.study) == ["RUNNING"]
    assert [line for line in caplog.messages if "elsewhere" in line and "trial 0" in line]
    trials.return_to_queue(made.study, 0)  # by its own machine, but this one asks first
    started = made._starter.start(0)
    assert isinstance(started, NotStarted) and started.is_elsewhere
    assert states(made.study) == ["FAIL", "FAIL", "WAITING"]
    assert Curves.submitted == []


def test_the_job_of_a_trial_that_is_given_up_is_cancelled_first(tmp_path: Path, now: list[float]) -> None:
    made = worker(searched(n_trials=1, grace_period=100, max_retry=0), tmp_path)
    begun(made, **{MACHINE: ELSEWHERE})
    with job_elsewhere(made.place.run_dir("lab-0000")) as (process, _):
        lose(made, now)
        assert states(made.study) == ["FAIL"]
        assert process.wait(240) == ExitCode.REQUEUE


@pytest.mark.parametrize("max_retry", [0, 1])
def test_a_process_whose_trial_was_given_up_cancels_its_job(
    max_retry: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop that slept: nobody follows the job any more, unless the trial is tried again."""
    made = worker(searched(n_trials=1, max_retry=max_retry, pruner={"type": "NopPruner"}), tmp_path)

    def taken(recipe: Recipe, evaluation: int) -> float:
        if len(Curves.submitted) == 1 and evaluation == 2:
            [job] = Curves.jobs.values()
            record.write(JobRef("curves", "curve-0", job.run_dir))
            made.study.tell(0, state=TrialState.FAIL)
        return bowl(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(taken))
    assert made.run() == ExitCode.DONE
    assert Curves.submitted == ["lab-0000"]
    assert [trial.state.name for trial in own_trials(made.study)] == ["COMPLETE" if max_retry else "FAIL"]
    assert Curves.jobs["curve-0"].status.state == (JobState.COMPLETED if max_retry else JobState.SAVED)


def test_a_clock_that_is_set_takes_no_trial_away(tmp_path: Path, now: list[float], monkeypatch: Any) -> None:
    made = worker(searched(n_trials=1, grace_period=100), tmp_path)
    made.study.ask()
    begun(made)
    take_back(made)
    for step in (86400.0, -86400.0):
        today = storage.time.time() + step
        monkeypatch.setattr(storage.time, "time", lambda today=today: today)
        take_back(made)
        assert states(made.study) == ["RUNNING", "RUNNING"]


def test_heartbeats_go_on_while_the_scheduler_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(searched(n_trials=1, heartbeat_interval=1, pruner={"type": "NopPruner"}), tmp_path)
    statuses, seen = Curves.statuses, threading.Event()
    record_heartbeat = storage.HeartbeatJournal.record_heartbeat
    asked: list[bool] = []
    answers: list[bool] = []

    def records(self: storage.HeartbeatJournal, trial_id: int) -> None:
        record_heartbeat(self, trial_id)
        if asked:
            seen.set()

    def silent(self: Curves, refs: Any) -> Any:
        if not asked:
            asked.append(True)
            answers.append(seen.wait(20))
            raise SchedulerUnavailable("no answer within 120 s", where="squeue")
        return statuses(self, refs)

    monkeypatch.setattr(storage.HeartbeatJournal, "record_heartbeat", records)
    monkeypatch.setattr(Curves, "statuses", silent)
    assert made.run() == ExitCode.DONE
    assert answers == [True]


# -- what has been used ----------------------------------------------------------------------------------------------


def ran_for(run_dir: Path, seconds: float) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    RunFiles(run_dir).status_file.write_text(f'{{"state": "running", "seconds": {seconds}}}')


def test_gpu_hours_count_while_no_process_looks(tmp_path: Path) -> None:
    """A search on a login node was stopped for the night; its job was not."""
    made = worker(searched(n_trials=9, max_gpu_hours=11.0), tmp_path)
    trial = begun(made, **{RANK_SECONDS: 3600.0, RANKS: 2})
    assert made._used().gpu_hours == 1
    ran_for(made.place.run_dir("lab-0000"), 5.5 * 3600)
    assert made._used().gpu_hours == 11
    trials.return_to_queue(made.study, trial.number)  # it waits, and its job runs
    assert made._used().gpu_hours == 11
    assert made.run() == ExitCode.DONE
    assert Curves.submitted == []


def test_what_a_trial_has_used_is_carried_over_when_it_is_resumed(tmp_path: Path) -> None:
    made = worker(searched(n_trials=1, pruner={"type": "NopPruner"}), tmp_path)
    trial = begun(made, **{RANK_SECONDS: 7200.0})
    trials.return_to_queue(made.study, trial.number)
    assert made.run() == ExitCode.DONE
    [done] = own_trials(made.study)
    assert 7200 < done.user_attrs[RANK_SECONDS] < 7300


@pytest.mark.parametrize("watched", [False, True])
def test_a_trial_has_used_what_its_run_has_recorded(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(recipe: Recipe, evaluation: int) -> float | JobStatus:
        if evaluation == 3:
            ran_for(tmp_path / "runs/lab-search/lab-0000", 1800.0)
        return bowl(recipe, evaluation) if watched or evaluation < 4 else JobStatus(JobState.FAILED, 1)

    monkeypatch.setattr(Curves, "loss", staticmethod(loss))
    study = ran(searched(n_trials=1), tmp_path)
    assert study.trials[0].user_attrs[RANK_SECONDS] == 1800


def test_patience_counts_in_the_order_in_which_trials_ended_not_by_clocks(tmp_path: Path) -> None:
    """Trial 0 ended last, on a machine whose clock is slow."""
    made = worker(searched(n_trials=3), tmp_path)
    for number, (value, ended) in enumerate(((1.0, 2), (3.0, 0), (2.0, 1))):
        trial = begun(made, **{ENDED: ended})
        assert trial.number == number
        made.study.tell(trial, value)
    assert used(own_trials(made.study), 1).without_improvement == 0


# -- what is said ----------------------------------------------------------------------------------------------------


def test_a_resumed_trial_warns_of_nothing_and_has_the_constraints_of_its_own_plan(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recipe: Recipe, evaluation: int) -> float:
        if evaluation == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return bowl(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(stopped))
    assert worker(searched(n_trials=1), tmp_path).run() == ExitCode.REQUEUE
    monkeypatch.setattr(Curves, "loss", staticmethod(bowl))
    study = ran(searched(n_trials=1), tmp_path, resume=True)
    [done] = own_trials(study)
    assert done.user_attrs[RETURNED] == [0]
    assert done.constraints["fits"] < 0
    assert [str(each.message) for each in recwarn if "constraint" in str(each.message)] == []


def test_a_signal_ends_a_wait_where_many_files_are_open() -> None:
    many = [
        os.open(os.devnull, os.O_RDONLY) for _ in range(min(1100, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100))
    ]
    try:
        stop = Stop()
        stop.receive(signal.SIGTERM, None)
        began = time.monotonic()
        stop.wait(60.0)
        assert time.monotonic() - began < 30
    finally:
        for each in many:
            os.close(each)


def test_what_optuna_warns_of_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A command of an earlier test has left a handler with that test's stream.
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        quiet()
        for _ in range(2):
            optuna.distributions.FloatDistribution(0.0, 1.0, step=0.3)  # not divisible
    assert sum("not divisible" in line for line in caplog.messages) == 1
    assert "Warning" not in capsys.readouterr().err


# -- one too many ----------------------------------------------------------------------------------------------------


def test_a_trial_that_others_have_begun_meanwhile_is_not_started(tmp_path: Path) -> None:
    """Two processes saw that one trial was left, and both asked for it."""
    made = worker(searched(n_trials=1, enqueue_recipe=False), tmp_path)
    begun(made)
    started = made._starter.start(0)
    assert isinstance(started, NotStarted)
    assert Curves.submitted == []
    assert [trial.number for trial in own_trials(made.study)] == [0]
