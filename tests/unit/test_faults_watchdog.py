"""A rank that hangs is noticed within twice its limit, reported and ended; a slow one is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.faults import watchdog
from llmrecipes.faults.collectives import waits
from llmrecipes.faults.watchdog import FACTOR, LEAST, Hang, HangLimits, RankHeartbeat, report
from llmrecipes.launch.local.processes import reserved_port

LIMIT = 1.0
RANK = """
import ctypes, json, os, sys, threading, time
from pathlib import Path
from llmrecipes.faults.watchdog import HangLimits, watched

def hold_the_lock():
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(600)  # does not release Python's lock

def leave_out():
    threading.Event().wait()

def stop():
    os.kill(os.getpid(), 19)  # continued, it would end as if nothing had been

def slow_evaluation():
    for _ in range(4):
        beat("evaluate")
        time.sleep(0.6)

def thread_that_holds_the_lock():
    threading.Thread(target=hold_the_lock).start()
    time.sleep(600)

def written():
    opened = list(Path("/proc/self/fd").iterdir())  # and what it was listed through, which is closed
    (stacks,) = [path for path in opened if path.is_symlink() and "memfd:stacks" in os.readlink(path)]
    return json.dumps({"0 (world)": {"number": os.stat(stacks).st_size, "ended": True, "what": "stacks"}})

limit, what, folder, rank, world = float(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:])
with watched(HangLimits(limit, limit), folder, rank=rank, world_size=world, collectives=written) as beat:
    for step in (6, 7):
        beat("step", step)
    print(time.monotonic(), flush=True)
    globals()[what]()
"""


def start(what: str, folder: Path, rank: int = 0, world: int = 1, limit: float = LIMIT) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RANK, str(limit), what, str(folder), str(rank), str(world)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("what", ["hold_the_lock", "thread_that_holds_the_lock", "leave_out", "stop"])
def test_a_hang_is_reported_with_stacks_and_ended(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "hang"
    process = start(what, folder)
    assert process.stdout is not None
    began = float(process.stdout.readline())
    _, errors = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL
    assert "rank 0 hangs" in errors
    assert what in errors, "the stacks"
    (rank,) = json.loads((folder / "report.json").read_text())["ranks"]
    assert (rank["rank"], rank["step"], rank["phase"]) == (0, 7, "step")
    assert LIMIT <= rank["seconds"] <= 2 * LIMIT + 0.5, "a poll is a second"
    assert rank["node"]
    assert rank["state"] == ("T" if what == "stop" else rank["state"])
    assert time.monotonic() - began < 30


def test_a_slow_evaluation_with_signs_of_progress_is_left_alone(tmp_path: Path) -> None:
    process = start("slow_evaluation", tmp_path / "hang")
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert not (tmp_path / "hang").exists()


def test_the_rank_that_is_not_where_the_others_wait_is_named(tmp_path: Path) -> None:
    """Two wait for the third, which left out what they wait for."""
    doing = ("leave_out", "hold_the_lock", "leave_out")
    # Half of the limit is how long they wait for each other's reports.
    processes = [start(what, tmp_path, rank, 3, limit=4 * LIMIT) for rank, what in enumerate(doing)]
    for process in processes:
        process.communicate(timeout=240)
    found = json.loads((tmp_path / "report.json").read_text())
    assert {rank["rank"] for rank in found["ranks"]} == {0, 1, 2}
    assert "not where most ranks wait: 1\n" in found["text"] + "\n"
    # Asked while faulthandler reads the frames of all threads, the thread that answers could crash it.
    asked = [rank["collectives"] for rank in found["ranks"] if rank["rank"] != 1]
    assert all(each["0 (world)"]["number"] > 0 for each in asked), "the stacks come before the question"


def test_the_collective_that_ranks_wait_in_and_who_has_not_called_it_are_named() -> None:
    def last(number: int, ended: bool) -> dict[str, Any]:
        return {"number": number, "ended": ended, "what": "gloo:all_reduce of [[3]]"}

    of_ranks: dict[int, dict[str, dict[str, Any]]] = {
        0: {"0 (world)": last(4, True), "5 (tp)": last(9, False)},
        1: {"0 (world)": last(4, True), "5 (tp)": last(8, True)},
        2: {"0 (world)": last(4, True), "6 (tp)": last(8, True)},
    }
    (line,) = waits(of_ranks)
    assert "9 of group 5 (tp)" in line
    assert line.index("0 wait") < line.index("not called by 1")
    hangs = {
        rank: Hang(rank, "a", 7, "step", 2.0, 1.0, "S", "wait (x.py:1)", collectives=each)
        for rank, each in of_ranks.items()
    }
    assert line in report(hangs, 3)


GLOO = """
import os, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from llmrecipes.faults.collectives import last_collectives, record_collectives
from llmrecipes.faults.watchdog import HangLimits, watched

record_collectives()
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(3))
limits = HangLimits(4.0, 4.0)
with watched(limits, Path(sys.argv[1]), rank=rank, world_size=2, collectives=last_collectives) as beat:
    for step in (6, 7):
        beat("step", step)
    if rank == 0:
        dist.all_reduce(torch.ones(5))
    threading.Event().wait()
"""


@pytest.mark.slow
def test_gloo_knows_which_rank_has_left_out_a_collective(tmp_path: Path) -> None:
    with reserved_port() as port:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", GLOO, str(tmp_path / "hang")],
                env={**os.environ, **address, "RANK": str(rank)}, stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]  # fmt: skip
        for process in ranks:
            process.communicate(timeout=240)
    text = json.loads((tmp_path / "hang/report.json").read_text())["text"]
    (line,) = [line for line in text.splitlines() if "wait in it" in line]
    assert "gloo:all_reduce of [[5]]: 0 wait in it; not called by 1" in line


@pytest.mark.rotating
def test_a_rank_is_ended_although_its_report_is_held_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 65536)
    os.set_blocking(writer, True)
    words = [sys.executable, "-c", RANK, str(LIMIT), "leave_out", str(tmp_path), "0", "1"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=writer)
    os.close(writer)
    assert process.wait(timeout=240) == -signal.SIGKILL
    os.close(reader)


def test_only_the_first_rank_that_hangs_reads_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GATHER_SECONDS", 0.01)
    hangs = [Hang(rank, "a", 7, "step", 2.0, 1.0, "S", "wait (x.py:1)", "stacks") for rank in (3, 5)]
    for hang in hangs:
        (tmp_path / f"rank-{hang.rank}.json").write_text(json.dumps(asdict(hang)))
    found = watchdog._others(tmp_path, hangs[0], 8)
    assert found is not None
    assert sorted(found) == [3, 5]
    assert watchdog._others(tmp_path, hangs[1], 8) is None


def test_a_rank_that_reports_no_hang_is_named() -> None:
    hang = Hang(0, "a", 7, "step", 2.0, 1.0, "S", "wait (x.py:1)")
    assert "did not report a hang: 1" in report({0: hang}, 2)


def test_limits_follow_the_longest_time_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beat = RankHeartbeat(HangLimits(30.0, 3600.0), mmap.mmap(-1, 64))
    assert beat.limit("step") == 3600.0
    for step, seconds in ((1, 900.0), (2, 2.0)):  # the first compiles
        assert beat.limit("step") == 3600.0
        beat("step", step)
        now[0] += seconds
    beat("evaluate")
    assert beat.limit("step") == 30.0
    now[0] += 9.0
    beat("save")
    assert beat.limit("evaluate") == FACTOR * 9.0
    assert beat.limit("save") == LEAST["save"]
    beat("tasks", 2)
    now[0] += 1.0
    beat("tasks", 2)
    assert beat.limit("tasks") == LEAST["tasks"]


def test_learned_limits_begin_when_the_first_of_a_kind_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beat = RankHeartbeat(HangLimits(30.0, 3600.0, learned=True), mmap.mmap(-1, 64))

    def last(phase: str, seconds: float, step: int | None = None) -> None:
        beat(phase, step)
        now[0] += seconds

    last("step", 40.0, 1)
    last("step", 0.2, 2)
    last("evaluate", 4.0)
    last("save", 0.5)  # its snapshot; it is written in the background, and the next one waits for that
    beat("step", 3)
    assert [beat.limit(phase) for phase in ("step", "evaluate", "save")] == [30.0, FACTOR * 4.0, LEAST["save"]]
    beat.written(0.6)
    assert beat.limit("save") == 30.0
    beat.written(300.0)
    assert beat.limit("save") == FACTOR * 300.0
    assert beat.limit("tasks") == LEAST["tasks"]


def test_a_rank_that_ends_takes_its_watchdog_with_it(tmp_path: Path) -> None:
    process = start("leave_out", tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.kill()
    process.communicate(timeout=240)
    end = time.monotonic() + 240
    while Path(f"/proc/{children[0]}").exists() and time.monotonic() < end:
        os.sched_yield()
    assert not Path(f"/proc/{children[0]}").exists()
