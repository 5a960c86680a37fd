"""Real launchers that are killed: what they leave is ended before the next start of their run, and nothing else."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from llmrecipes.hardware.process import STARTED_BY, STARTED_FOR
from llmrecipes.launch.local import run_ranks
from llmrecipes.launch.local.leftover import end_leftover, marks
from llmrecipes.tracking import alarms
from tests.helpers import ROOT

RANK = "tests.leftover_rank"
START = f"""
import sys
from pathlib import Path
from llmrecipes.launch.local import run_ranks
run_ranks({RANK!r}, [sys.argv[2]], world_size=2, threads=1, logs=Path(sys.argv[1]))
"""


def logs_of(tmp_path: Path, run: str) -> Path:
    logs = tmp_path / run / "logs"
    logs.mkdir(parents=True)
    return logs


@contextmanager
def started(logs: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A launcher of two ranks, and the ids of those and of their helpers."""
    fifo = logs / "said"
    os.mkfifo(fifo)
    said = os.open(fifo, os.O_RDWR)
    poll = select.poll()
    poll.register(said, select.POLLIN)
    launcher = subprocess.Popen([sys.executable, "-c", START, str(logs), str(fifo)], cwd=ROOT)
    try:
        text = b""
        while text.count(b"\n") < 4:
            assert poll.poll(60_000), "the ranks did not start"
            text += os.read(said, 4096)
        pids = list(map(int, text.split()))
        yield launcher, pids
    finally:
        launcher.kill()
        launcher.wait()
        os.close(said)
        end_leftover(logs)


def alive(pids: list[int]) -> list[int]:
    """Those that have not ended; killed ones may still be waited for by somebody."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def test_no_handle_of_another_process_is_kept(tmp_path: Path) -> None:
    """Each restart of a run looks at all processes; the variables of some, here one that has ended, cannot be read."""
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        before = sorted(Path("/proc/self/fd").iterdir())
        assert end_leftover(logs_of(tmp_path, "run")) == []
        assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_what_a_killed_launcher_left_ends_before_the_next_start_of_its_run_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, others = logs_of(tmp_path, "ours"), logs_of(tmp_path, "ours-2")
    with started(ours) as (launcher, left), started(others) as (other, running):
        assert end_leftover(ours) == []  # its launcher runs
        os.kill(left[0], signal.SIGSTOP)
        launcher.kill()
        launcher.wait()
        assert alive(left) == left, "they do not end by themselves"
        (tmp_path / "link").symlink_to(tmp_path / "ours")  # the same folder by another name
        assert run_ranks(RANK, ["end at once"], world_size=1, threads=1, logs=tmp_path / "link/logs") == 0
        assert alive(left) == [] and all(str(pid) in caplog.text for pid in left)
        assert alive(running) == running and other.poll() is None
        assert end_leftover(ours) == []


def test_a_launcher_is_known_by_its_start_too(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, "ours")
    kinds = {
        "reused id": {**marks(logs), STARTED_BY: f"{os.getpid()}:1"},
        "earlier start of this launcher": marks(logs),
        "spare of this launcher": marks(logs),
        "other run": {**marks(logs), STARTED_FOR: str(logs) + "2"},
        "no start": {},
    }
    processes = {
        name: subprocess.Popen(["sleep", "600"], env={**os.environ, **variables}) for name, variables in kinds.items()
    }
    try:
        killed = end_leftover(logs, [processes["spare of this launcher"].pid])
        assert killed == [processes[name].pid for name in ("reused id", "earlier start of this launcher")]
        assert [name for name, process in processes.items() if process.poll() is None] == list(kinds)[2:]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_a_command_of_alarms_outlives_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED_FOR, "here")
    alarms._run(["sh", "-c", f"env > {tmp_path}/env"], "")
    assert STARTED_FOR not in (tmp_path / "env").read_text() and "PATH=" in (tmp_path / "env").read_text()
