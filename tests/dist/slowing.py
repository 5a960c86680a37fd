"""Ranks of a training of which one is slowed. Jobs of every rank of a joined world."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from llmrecipes.engine.base import Progress
from llmrecipes.faults.signals import StopRequest
from llmrecipes.tracking.events import Note
from llmrecipes.train.observers.telemetry import BAD_NODES, NODES_TO_SPARE, SETTLING_STEPS, Telemetry
from tests.dist.table import Row
from tests.dist.training import loaders, training
from tests.observing import observer

SLOWED = """
import os, signal, sys, time
process = int(sys.argv[1])
try:
    while os.getppid() in map(int, sys.argv[2:]):
        for number, seconds in ((signal.SIGSTOP, 0.012), (signal.SIGCONT, 0.004)):
            os.kill(process, number)
            time.sleep(seconds)
finally:
    os.kill(process, signal.SIGCONT)
"""
"""Stops a process three quarters of the time, for as long as the parent lives: four ranks share two cores, so that one
that is stopped half of the time hardly loses any."""


@contextmanager
def slowed(process: int, parent: int) -> Iterator[None]:
    """Slow a process down while the block runs, as a throttled processor does."""
    slowing = subprocess.Popen([sys.executable, "-S", "-c", SLOWED, str(process), str(parent)])
    try:
        yield
    finally:
        slowing.kill()
        slowing.wait()


@dataclass(frozen=True)
class Seen:
    """What the first rank reported."""

    reports: list[dict[str, Any]]
    seconds: list[float]
    """Mean of the steps of each report."""
    notes: list[Note]
    stopped: bool = False
    """Whether it asks all ranks to stop."""


STEPS = 20
"""Two reports."""


def measured(row: Row, slow: int | None, bad_nodes: Path | None = None, to_spare: int = 4) -> Seen:
    """Train, with one rank slowed down; with `bad_nodes` as a Slurm job of one rank a node, n0 to n3."""
    if bad_nodes is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(BAD_NODES, str(bad_nodes))
            patch.setenv(NODES_TO_SPARE, str(to_spare))
            patch.setenv("SLURMD_NODENAME", f"n{dist.get_rank()}")
            return measured(row, slow)
    stop = StopRequest()
    reports: list[dict[str, Any]] = []
    notes: list[Note] = []
    times: list[float] = []
    means: list[float] = []
    with training(row.recipe) as (engine, world):
        loop: dict[str, Any] = {"plan": engine.plan, "engine": engine, "world": world, "stop": stop}
        with observer(Telemetry, row.recipe, Path("/"), **loop) as telemetry:
            telemetry.begin()
            batches = loaders(row.recipe, world)

            def train() -> None:
                for step in range(1, STEPS + 1):
                    telemetry.beat("step", step)
                    started = time.perf_counter()
                    engine.train_step(batches)
                    seconds = time.perf_counter() - started
                    report = telemetry.fields(step, seconds)
                    if report:
                        reports.append(report["ranks"])
                        means.append(sum(times) / len(times))
                        times.clear()
                    if step > SETTLING_STEPS:
                        times.append(seconds)
                    notes.extend(telemetry.notes)
                telemetry.loop.progress = Progress(step=STEPS)
                telemetry.end()

            if world.rank == slow:
                with slowed(os.getpid(), os.getpid()):
                    train()
            else:
                train()
    return Seen(reports, means, notes, stop.requested)
