"""The command as schedulers and people treat it: asked to stop, interrupted, killed, and given again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrecipes.cli import app as cli
from tests.helpers import (
    curve,
    finish,
    lines,
    require_same_checkpoints,
    saved_steps,
    start_command,
    steps_done,
    tiny_on,
    train_lines,
    wait_for_step,
    write_recipe,
)

STEPS = 40
# Everything random is in it: dropout, bf16 rounding and a loader process.
RECIPE: dict[str, dict[str, Any]] = {
    "model": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "train": {"precision": "bf16", "train_iters": STEPS, "eval_interval": 10, "global_batch_size": 16},
    "optimizer": {"lr": 3e-3},
    "scheduler": {"lr_warmup_iters": 5},
    "checkpoint": {"save_interval": 15, "most_recent_k": 9},
}


class Runs:
    """Commands on one recipe."""

    def __init__(self, folder: Path, corpus: Path, data_dir: Path) -> None:
        self._recipe = write_recipe(tiny_on(corpus, "signals", **RECIPE), folder)
        self._runs_dir, self._data_dir = folder / "runs", data_dir
        self._whole: dict[int, str] = {}

    def directory(self, run_id: str) -> Path:
        return self._runs_dir / "signals" / run_id

    def command(self, run_id: str, ranks: int = 1, *options: str) -> list[str]:
        paths = ("--runs-dir", str(self._runs_dir), "--data-dir", str(self._data_dir))
        return ["train", self._recipe, "--run-id", run_id, "--nproc", str(ranks), "--no-sample", *paths, *options]

    def start(self, run_id: str, ranks: int = 1, *options: str) -> subprocess.Popen[str]:
        return start_command(*self.command(run_id, ranks, *options))

    def saved_steps(self, run_id: str) -> list[int]:
        return saved_steps(self.directory(run_id))

    def whole(self, ranks: int) -> str:
        """The uninterrupted run on so many ranks, trained when it is first asked for."""
        if ranks not in self._whole:
            run_id = f"whole-{ranks}"
            if ranks == 1:  # in this process, which has imported everything
                assert cli.run(self.command(run_id)) == 0
            else:
                finish(self.start(run_id, ranks), 0)
            losses = [line["loss"] for line in train_lines(self.directory(run_id))]
            assert losses[0] - losses[-1] > 1
            self._whole[ranks] = run_id
        return self._whole[ranks]

    def require_same(self, run_id: str, ranks: int = 1) -> None:
        """The run reads as the uninterrupted one, to the last bit of its checkpoint."""
        one, other = self.directory(run_id), self.directory(self.whole(ranks))
        assert curve(one) == curve(other)
        assert len(train_lines(one)) == STEPS
        last = f"checkpoints/step-{STEPS:08d}"
        require_same_checkpoints(one / last, other / last)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path, data_dir: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("signals"), corpus, data_dir)


def stopped(runs: Runs, process: subprocess.Popen[str], run_id: str, at: int, *numbers: signal.Signals) -> int:
    """The step at which a command that is sent signals at a step saves and ends; nothing else is saved for it."""
    before = runs.saved_steps(run_id)
    wait_for_step(process, runs.directory(run_id), at)
    for number in numbers:
        process.send_signal(number)
    assert "Traceback" not in finish(process, 75)
    last: int = train_lines(runs.directory(run_id))[-1]["step"]
    assert at <= last < STEPS
    regular = range(15, last, 15)
    assert runs.saved_steps(run_id) == sorted({*before, *regular, last})
    return last


def announced_steps(process: subprocess.Popen[str]) -> int:
    """The step from which a command says that it resumes."""
    assert process.stdout is not None
    return steps_done(next(line for line in process.stdout if " to go" in line))


def test_one_run_is_stopped_and_killed_and_the_same_command_resumes(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a terminal and by a scheduler that is impatient, then at once; three processes train what one does."""
    run_id = "stopped"
    process = runs.start(run_id)
    first = stopped(runs, process, run_id, 5, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)

    process = runs.start(run_id)
    assert announced_steps(process) == first
    wait_for_step(process, runs.directory(run_id), max(31, first + 1))
    process.kill()
    finish(process, -signal.SIGKILL)
    saved = runs.saved_steps(run_id)
    earlier = sorted({first, *range(15, first, 15)})
    assert saved in (earlier, sorted({*earlier, 15}), sorted({*earlier, 15, 30}))
    # The kill may also have come while bytes were on their way to the disk.
    newest = runs.directory(run_id) / "checkpoints" / f"step-{saved[-1]:08d}"
    damaged = saved[-1] == 30 > first
    if damaged:
        with next(newest.glob("*.distcp")).open("r+b") as stream:
            stream.seek(-100, os.SEEK_END)
            stream.write(b"\0" * 50)
    capfd.readouterr()
    assert cli.run(runs.command(run_id)) == 0  # the third is this one
    resumed = "".join(capfd.readouterr())
    # Between its manifest and its rename, a checkpoint is complete.
    finished = "finishing checkpoint" in resumed
    assert steps_done(resumed) == (30 if finished else saved[-2] if damaged else saved[-1])
    runs.require_same(run_id)


@pytest.mark.slow
def test_a_signal_to_several_ranks_saves_once_and_the_same_command_resumes(runs: Runs) -> None:
    run_id = "stopped-2"
    at = stopped(runs, runs.start(run_id, 2), run_id, 5, signal.SIGTERM)
    assert steps_done(finish(runs.start(run_id, 2), 0)) == at
    runs.require_same(run_id, 2)


@pytest.mark.slow
def test_when_one_rank_is_killed_the_command_ends_and_leaves_no_process(runs: Runs) -> None:
    process = runs.start("rank-killed", ranks=2)
    wait_for_step(process, runs.directory("rank-killed"), 3)
    ranks = {p.environ().get("RANK"): p for p in psutil.Process(process.pid).children()}
    everyone = psutil.Process(process.pid).children(recursive=True)
    ranks["1"].kill()
    killed = time.monotonic()
    printed = finish(process, 128 + signal.SIGKILL)
    assert time.monotonic() - killed < 60  # gloo alone would wait for half an hour
    assert "rank 1" in printed
    _, alive = psutil.wait_procs(everyone, timeout=20)
    assert alive == []


@pytest.mark.slow
def test_a_run_restarts_automatically_after_a_killed_rank(runs: Runs) -> None:
    process = runs.start("restarted", 2, "--max-restarts", "2")
    wait_for_step(process, runs.directory("restarted"), 18)
    children = psutil.Process(process.pid).children()
    ranks = {p.environ().get("RANK"): p for p in children}
    ranks["1"].kill()
    finish(process, 0)
    processes = json.loads((runs.directory("restarted") / "logs/processes.json").read_text())
    assert set(processes) == {"0", "1"}
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == [], "also of the spares, whether they became ranks or not"
    (restarted,) = [line for line in lines(runs.directory("restarted")) if line.get("event") == "restarted"]
    assert restarted["details"]["restart"] == 1
    runs.require_same("restarted", ranks=2)


@pytest.mark.slow
def test_when_the_command_is_killed_nothing_of_it_stays(runs: Runs) -> None:
    """Ranks, their readers and watchdogs, and the mirror, which may first send its last points to MLflow."""
    options = ("tracking.mlflow=true", "tracking.system_metrics_interval=null")
    process = runs.start("launcher-killed", 2, *options)
    wait_for_step(process, runs.directory("launcher-killed"), 3)
    everyone = psutil.Process(process.pid).children(recursive=True)
    mirror = [one for one in everyone if "llmrecipes.tracking.mlflow.sender" in one.cmdline()]
    assert (len(everyone), len(mirror)) == (7, 1)
    process.kill()
    finish(process, -signal.SIGKILL)
    _, alive = psutil.wait_procs([one for one in everyone if one not in mirror], timeout=60)
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in alive)
    _, alive = psutil.wait_procs(mirror, timeout=60)
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in alive)
    finish(runs.start("launcher-killed", 2, *options), 0)
    runs.require_same("launcher-killed", ranks=2)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_killed_after_the_grace(runs: Runs) -> None:
    process = runs.start("stopped-rank", 2, "train.exit_grace_seconds=2")
    wait_for_step(process, runs.directory("stopped-rank"), 3)
    ranks = {p.environ().get("RANK"): p for p in psutil.Process(process.pid).children()}
    while runs.saved_steps("stopped-rank") != [15]:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    ranks["1"].suspend()
    process.send_signal(signal.SIGTERM)
    printed = finish(process, 143)
    assert "1 (stopped)" in printed
    assert "step-00000015" in printed
    assert "Traceback" not in printed
    finish(runs.start("stopped-rank", 2), 0)
    runs.require_same("stopped-rank", ranks=2)


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 2), (signal.SIGINT, 2)])
def test_a_signal_before_the_first_step_ends_with_75_and_without_a_traceback(
    runs: Runs, number: signal.Signals, ranks: int
) -> None:
    """While torch is imported, or the model built: it comes once the data is there."""
    run_id = f"early-{number.name}-{ranks}"
    process = runs.start(run_id, ranks)
    assert process.stdout is not None
    assert any("data is prepared" in line for line in process.stdout)  # libraries may warn before
    if number == signal.SIGINT:  # to a rank alone
        while not (children := psutil.Process(process.pid).children()):
            time.sleep(0.01)
        children[-1].send_signal(number)
    else:
        process.send_signal(number)
    assert "Traceback" not in finish(process, 75)
    logs = runs.directory(run_id) / "logs"
    assert not any("Traceback" in log.read_text() for log in logs.glob("rank-*.log"))
    assert len(train_lines(runs.directory(run_id))) <= 1


@pytest.mark.slow
def test_two_commands_cannot_train_one_run(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    """The second is this process: while another one starts, the watchdog may kill the first, which is stopped."""
    first = runs.start("twice")
    wait_for_step(first, runs.directory("twice"), 2)
    capfd.readouterr()
    first.send_signal(signal.SIGSTOP)
    try:
        assert cli.run(runs.command("twice")) == 2
    finally:
        first.send_signal(signal.SIGCONT)
    second = "".join(capfd.readouterr())
    assert "another process is training this run" in second
    assert "Traceback" not in second
    finish(first, 0)
    runs.require_same("twice")


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_reported_killed_and_all_start_again(runs: Runs) -> None:
    """No rank answers: one does not run, and the other waits for it."""
    run_id = "hung"
    process = runs.start(run_id, 2, "--max-restarts", "1")
    wait_for_step(process, runs.directory(run_id), 17)
    second = next(
        child
        for child in psutil.Process(process.pid).children()
        if child.environ().get("RANK") == "1" and "llmrecipes.train.worker" in child.cmdline()
    )
    began = time.monotonic()
    second.suspend()
    second.wait(60)
    assert 30.0 <= time.monotonic() - began < 60.0, "the learned limit, and what its report takes"
    finish(process, 0)
    (note,) = [line for line in lines(runs.directory(run_id)) if line.get("event") == "hang"]
    assert note["alarm"] is True
    assert "(stopped)" in note["details"]["text"]
    assert "1 on " in note["details"]["text"]
    runs.require_same(run_id, 2)
