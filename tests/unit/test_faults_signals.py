"""Signals in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.errors import ExitCode
from llmrecipes.faults.signals import INTERRUPTED, PRESS_INTERVAL, StoppedEarly, catch_signals, early_signals

PROGRAM = """
import sys, time
from llmrecipes.faults import signals
{setup}
with signals.catch_signals(lambda: "step-00000100") as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print(stop.signal.name, flush=True)
    {then}
sys.exit(75)
"""


def start(setup: str = "", then: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(setup=setup, then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_to_stop_and_ends_with_75(number: signal.Signals) -> None:
    process = start()
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert (out, err) == (f"{number.name}\n", "")
    assert process.returncode == 75


def test_second_ctrl_c_leaves_at_once_and_names_the_newest_checkpoint() -> None:
    process = start(setup="signals.PRESS_INTERVAL = 0.0", then="time.sleep(60)")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == INTERRUPTED
    assert "step-00000100" in err
    assert "Traceback" not in err


def test_second_ctrl_c_within_a_print_leaves_too() -> None:
    within = (
        "import io, os, signal",
        "class Raw(io.RawIOBase):",
        "    def writable(self): return True",
        "    def write(self, data): os.kill(os.getpid(), signal.SIGINT); return len(data)",
        "sys.stdout = io.TextIOWrapper(io.BufferedWriter(Raw()))",
        "print('interrupted', flush=True)",
    )
    process = start(setup="signals.PRESS_INTERVAL = 0.0", then="\n    ".join(within))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == INTERRUPTED
    assert "step-00000100" in err
    assert "Traceback" not in err


def test_the_copy_a_launcher_passes_on_is_the_same_press() -> None:
    with catch_signals(lambda: "none") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal is signal.SIGINT
    assert PRESS_INTERVAL > 0


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with pytest.raises(ValueError, match="out"), catch_signals(lambda: "none"):
        raise ValueError("out")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_forked_workers_survive_the_jobs_signals() -> None:
    """A data loader's process inherits the handlers by fork; a signal to the whole job must not end it."""
    with catch_signals(lambda: "none"):
        ready, release = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"r")
            os.read(release[0], 1)
            os._exit(7)
        os.read(ready[0], 1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(child, number)
        os.write(release[1], b"g")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        for descriptor in (*ready, *release):
            os.close(descriptor)


def test_a_signal_that_was_blocked_until_now_counts() -> None:
    """Launchers block warnings until a rank has a handler for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.raise_signal(signal.SIGUSR1)
    with catch_signals(lambda: "none") as request:
        assert request.requested
        assert request.signal == signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_training_exits_with_75(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr("llmrecipes.recipe.load.load", lambda *_: os.kill(os.getpid(), number))
    for command in ("train", "prepare", "smoke", "verify"):
        assert cli.run([command, "gpt-tiny"]) == ExitCode.REQUEUE
        told = capsys.readouterr().err
        assert number.name in told
        assert "Traceback" not in told
    assert signal.getsignal(number) is before


class Deleted:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_where_python_drops_exceptions_is_kept() -> None:
    with early_signals():
        Deleted()
        with catch_signals(lambda: "none") as stop:
            assert stop.signal is signal.SIGTERM


def test_early_signals_leave_forked_processes_alone() -> None:
    with early_signals(), pytest.raises(StoppedEarly):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        os.kill(os.getpid(), signal.SIGTERM)
