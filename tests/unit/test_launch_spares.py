"""Warm spares: processes that become the ranks of the next start, and whose own faults change nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from llmrecipes.launch.local import Spares, run_ranks, spares

# The first rank waits until each rank has a spare, does to them what its orders say, and fails until the last start.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

import psutil

from llmrecipes.launch.ranks import FIRST_STEP
from llmrecipes.train.rank import wait_as_spare

folder, orders = Path(sys.argv[1]), json.loads(sys.argv[2])


def starts(rank):
    path = folder / f"starts-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def import_all():
    if orders[len(starts(0)) - 1].get(os.environ["LLMRECIPES_SPARE"]) == "IMPORTS":
        (folder / f"imports-{os.getpid()}").touch()
        time.sleep(60)


if sys.argv[-1] == "--spare":
    wait_as_spare(import_all)
rank = os.environ["RANK"]
with (folder / f"starts-{rank}").open("a") as stream:
    stream.write(json.dumps([os.getpid(), os.environ["MASTER_PORT"], os.getpriority(os.PRIO_PROCESS, 0)]) + "\\n")
if rank != "0":
    time.sleep(60)
start = len(starts(0)) - 1
while start and len(starts(1)) <= start:
    time.sleep(0.01)
os.write(int(os.environ[FIRST_STEP]), b"1")
if start == len(orders):
    os.kill(starts(1)[-1][0], signal.SIGKILL)
    time.sleep(60)
waiting = {}
while len(waiting) < 2:
    time.sleep(0.05)
    if len([*folder.glob("ready-*"), *folder.glob("imports-*")]) < 2 * (start + 1):
        continue
    for process in psutil.Process(os.getppid()).children():
        environment = process.environ() if process.status() != "zombie" else {}
        if "LLMRECIPES_SPARE" in environment and process.pid not in (os.getpid(), os.getppid()):
            spare = environment["LLMRECIPES_SPARE"]
            done = "imports" if orders[start].get(spare) == "IMPORTS" else "ready"
            if process.pid not in [line[0] for line in starts(spare)] and (folder / f"{done}-{process.pid}").exists():
                waiting[spare] = process
(folder / f"spares-{start}").write_text(json.dumps({rank: process.pid for rank, process in waiting.items()}))
for spare, name in orders[start].items():
    if name != "IMPORTS":
        waiting[spare].send_signal(getattr(signal, name))
sys.exit(1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spare_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def test_spares_become_ranks_and_those_that_fail_are_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = spares.Spare.look

    def announced(spare: spares.Spare) -> bool:
        if look(spare):
            (folder / f"ready-{spare.process.pid}").touch()
        return spare.ready

    monkeypatch.setattr(spares.Spare, "look", announced)
    orders = [{}, {"1": "IMPORTS"}, {"0": "SIGKILL", "1": "SIGSTOP"}]
    with Spares() as warm:
        for start, code in enumerate([1, 1, 1, 137]):
            if start == 3:
                monkeypatch.setattr(spares, "ANSWER_SECONDS", 0.5)
                warm.last = True
            arguments = [str(folder), json.dumps(orders)]
            assert run_ranks("spare_program", arguments, world_size=2, threads=1, logs=folder, spares=warm) == code
        children = psutil.Process().children()
        assert not any("spare_program" in child.cmdline() for child in children), "the last start needs none"
    starts = {
        rank: [json.loads(line) for line in (folder / f"starts-{rank}").read_text().splitlines()] for rank in "01"
    }
    waited = [json.loads((folder / f"spares-{start}").read_text()) for start in range(3)]
    became = [[rank for rank in "01" if starts[rank][start + 1][0] == waited[start][rank]] for start in range(3)]
    assert became == [["0", "1"], ["0"], []], "one that still imports is replaced, as those that ended or were stopped"
    for one, other in zip(starts["0"], starts["1"], strict=True):
        assert one[1] == other[1], "the port of this start, not of the one that the spare was made for"
        assert one[2] == other[2] == os.getpriority(os.PRIO_PROCESS, 0)
    assert json.loads((folder / "processes.json").read_text()) == {rank: starts[rank][3][0] for rank in "01"}
    assert not any(psutil.pid_exists(pid) for pids in waited for pid in pids.values())
