"""Ranks on this machine: their environment, and what the exit codes of several become."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrecipes.errors import ExitCode
from llmrecipes.launch.local import Grace, processes, rank_environment, run_ranks
from llmrecipes.launch.local.processes import reserved_port
from llmrecipes.launch.ranks import FIRST_PORT
from tests.refusals import refused

# Each rank does what the JSON in its argument says under its rank; `wait` lasts until a file is there.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

rank, folder = os.environ["RANK"], Path(sys.argv[1])
orders = json.loads(sys.argv[2]).get(rank, {})
if orders.get("code_on_signal") is not None:
    def leave(number, frame):
        (folder / f"signal-{rank}").write_text(str(int(number)))
        os._exit(orders["code_on_signal"])
    signal.signal(signal.SIGTERM, leave)
print(f"words of rank {rank}", flush=True)
(folder / f"environment-{rank}").write_text(json.dumps(dict(os.environ)))
(folder / f"pid-{rank}").write_text(str(os.getpid()))
deadline = time.monotonic() + 240
while orders.get("wait") and not (folder / orders["wait"]).exists() and time.monotonic() < deadline:
    time.sleep(0.01)
if orders.get("stop"):
    os.kill(os.getpid(), signal.SIGSTOP)
if orders.get("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
(folder / f"done-{rank}").touch()
sys.exit(orders.get("code", 0))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rank_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def run(folder: Path, orders: dict[str, dict[str, object]], ranks: int = 2, grace: Grace | None = None) -> int:
    arguments = [str(folder), json.dumps(orders)]
    return run_ranks("rank_program", arguments, world_size=ranks, threads=3, logs=folder, grace=grace)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_each_rank_has_its_environment_and_its_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, {}) == 0
    found = [json.loads((folder / f"environment-{rank}").read_text()) for rank in range(2)]
    port = int(found[0]["MASTER_PORT"])
    for rank in range(2):
        assert found[rank].items() >= rank_environment(rank, 2, port, 3).items()
        assert (found[rank]["RANK"], found[rank]["WORLD_SIZE"], found[rank]["OMP_NUM_THREADS"]) == (str(rank), "2", "3")
        assert found[rank]["MASTER_ADDR"] == "127.0.0.1"
    assert capfd.readouterr().out == "words of rank 0\n"
    assert (folder / "rank-1.log").read_text() == "words of rank 1\n"


@pytest.mark.parametrize("code", [1, 2, 93])
def test_a_rank_that_fails_ends_the_others_and_gives_its_code(folder: Path, code: int) -> None:
    started = time.monotonic()
    assert run(folder, {"0": {"wait": "never"}, "1": {"wait": "pid-0", "code": code}}) == code
    assert time.monotonic() - started < 30
    assert not (folder / "done-0").exists()
    assert not alive(int((folder / "pid-0").read_text()))


def test_a_killed_rank_gives_the_shells_code_and_names_its_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    orders: dict[str, dict[str, object]] = {"0": {"wait": "never"}, "1": {"wait": "pid-0", "kill": True}}
    assert run(folder, orders) == 128 + signal.SIGKILL
    assert re.search(r"rank 1 .*\b137\b.*rank-1\.log", caplog.text)


def test_a_killed_first_rank_is_reported_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    orders: dict[str, dict[str, object]] = {"0": {"wait": "pid-1", "kill": True}, "1": {"wait": "never"}}
    assert run(folder, orders) == 128 + signal.SIGKILL
    assert re.search(r"rank 0 .*\b9\b", caplog.text)


def test_ranks_that_stop_with_their_state_saved_are_all_waited_for(folder: Path) -> None:
    orders: dict[str, dict[str, object]] = {"0": {"code": 75}, "1": {"wait": "done-0", "code": 75}}
    assert run(folder, orders) == 75
    assert (folder / "done-1").exists()


@contextmanager
def signalled(folder: Path, number: signal.Signals, stopped: bool = False) -> Iterator[None]:
    """Send this process a signal once both ranks are there, and rank 1 is stopped if it is meant to be."""

    def ready() -> bool:
        pids = [(folder / f"pid-{rank}").read_text() for rank in range(2) if (folder / f"pid-{rank}").exists()]
        return len(pids) == 2 and all(pids) and (not stopped or psutil.Process(int(pids[1])).status() == "stopped")

    def send() -> None:
        deadline = time.monotonic() + 240
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])  # a second SIGINT would stop it without saving
def test_a_signal_reaches_every_rank_as_sigterm_and_handlers_are_restored(folder: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    orders: dict[str, object] = {"wait": "never", "code_on_signal": 75}
    with signalled(folder, number):
        assert run(folder, {"0": orders, "1": orders}) == 75
    assert [(folder / f"signal-{rank}").read_text() for rank in range(2)] == ["15", "15"]
    assert signal.getsignal(number) is before


def test_a_rank_that_a_signal_ends_before_training_began_has_lost_nothing(folder: Path) -> None:
    orders: dict[str, dict[str, object]] = {"0": {"wait": "never"}, "1": {"wait": "never"}}
    with signalled(folder, signal.SIGTERM):
        assert run(folder, orders, grace=Grace(60, lambda: None)) == ExitCode.REQUEUE
    assert not any(alive(int((folder / f"pid-{rank}").read_text())) for rank in range(2))


def test_a_signal_just_after_the_ranks_have_ended_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = processes._wait

    def late(processes: dict[str, subprocess.Popen[bytes]], *others: Any) -> int:
        for process in processes.values():
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        os.kill(os.getpid(), signal.SIGTERM)
        return wait(processes, *others)

    monkeypatch.setattr(processes, "_wait", late)
    assert run(folder, {}) == 0


@pytest.mark.parametrize("saved", [True, False])
def test_after_the_grace_period_ranks_are_killed_and_the_code_tells_whether_they_saved(
    folder: Path, caplog: pytest.LogCaptureFixture, saved: bool
) -> None:
    """SIGSTOP is what no handler sees: `kill -STOP`, a debugger, a suspended job."""

    newest = iter([folder / "step-1", folder / ("step-2" if saved else "step-1")])
    orders: dict[str, dict[str, object]] = {"0": {"wait": "never", "code_on_signal": 75}, "1": {"stop": True}}
    grace = Grace(1.0, lambda: next(newest))
    with signalled(folder, signal.SIGTERM, stopped=True):
        if saved:
            assert run(folder, orders, grace=grace) == ExitCode.REQUEUE
            told = caplog.text
        else:
            with refused("train.exit_grace_seconds", code=ExitCode.TERMINATED) as error:
                run(folder, orders, grace=grace)
            told = error.value.what
    assert "1 (stopped)" in told
    assert f"step-{2 if saved else 1}" in told
    assert not alive(int((folder / "pid-1").read_text()))


def test_a_rendezvous_port_is_held_for_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as one:
        drawn = (one - FIRST_PORT + number // 2 for number in range(100))
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))
        with reserved_port() as other:
            assert one < other
        with socket.create_server(("", one)), reserved_port() as other:  # as torch's store
            assert one < other


def test_variables_of_a_run_reach_every_rank_unless_the_user_has_set_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_BY_USER", "user")
    variables = {"SET_BY_USER": "run", "OF_THE_RUN": "1", "RANK": "9"}
    arguments = [str(folder), "{}"]
    assert run_ranks("rank_program", arguments, world_size=2, threads=3, logs=folder, environment=variables) == 0
    for rank in range(2):
        found = json.loads((folder / f"environment-{rank}").read_text())
        assert [found[name] for name in variables] == ["user", "1", str(rank)]
