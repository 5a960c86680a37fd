"""The command of an elastic run's pods, as local processes with the variables that a JobSet's controller sets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrecipes.launch.local.processes import reserved_port
from tests.helpers import (
    environment,
    finish,
    lines,
    saved_steps,
    start_command,
    tiny_on,
    train_lines,
    wait_until,
    write_recipe,
)

pytestmark = [pytest.mark.slow, pytest.mark.dist]

STEPS = 60
ROUNDING = 1e-3
"""As in test_train_elastic.py: other ranks have summed."""
Pod = subprocess.Popen[str]


@contextmanager
def job(*command: str) -> Iterator[Callable[[int], Pod]]:
    """A Job of the JobSet: what starts its pods, by index; none is left."""
    started: list[Pod] = []
    with reserved_port() as port:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LLMRECIPES_RENDEZVOUS_TOKEN": f"{port}" * 8}

        def pod(index: int) -> Pod:
            process = subprocess.Popen(
                [sys.executable, "-m", "llmrecipes.cli", *command], text=True, errors="replace",
                env={**environment(), **variables, "JOB_COMPLETION_INDEX": str(index)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            started.append(process)
            return process

        try:
            yield pod
        finally:
            for process in started:
                process.kill()


def sizes(run_dir: Path) -> list[tuple[int, int]]:
    notes = [line["details"] for line in lines(run_dir) if line.get("event") == "resized"]
    return [(note["before"]["world_size"], note["now"]["world_size"]) for note in notes]


def test_pods_that_are_left_go_on_and_one_that_comes_later_waits(corpus: Path, data_dir: Path, tmp_path: Path) -> None:
    train: dict[str, Any] = {"train_iters": STEPS, "elastic": [1, 2]}
    recipe = write_recipe(tiny_on(corpus, "pods", train=train, checkpoint={"save_interval": 10}), tmp_path)
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir), "--no-sample"]
    runs = tmp_path / "runs" / "pods"
    finish(start_command("train", recipe, *paths, "--run-id", "one", "--nproc", "1"), 0)
    command = ["train", recipe, *paths, "--run-id", "pods", "--nproc", "2", "--nnodes", "2", "--min-nodes", "1"]
    with job(*command) as pod:
        first, second = pod(0), pod(1)
        wait_until(first, lambda: saved_steps(runs / "pods") != [])
        for child in psutil.Process(second.pid).children(recursive=True):
            child.kill()
        second.kill()
        finish(second, -9)
        first.wait(240)
        assert first.returncode not in (0, 2, 75, 93), "a failure, which the JobSet restarts"
    # Of the pods that it creates again, one has no node.
    with job(*command, "--join-seconds", "1") as pod:
        first = pod(0)
        assert first.stdout is not None
        assert any("1 of 2 nodes train" in line for line in first.stdout)
        late = pod(1)  # before the ranks of the first one have imported torch
        finish(first, 0)
        printed = finish(late, 0)
        assert "step" not in printed
    assert sizes(runs / "pods") == [(2, 1)]
    steps, expected = train_lines(runs / "pods"), train_lines(runs / "one")
    for name in ("step", "consumed_samples", "lr"):
        assert [line[name] for line in steps] == [line[name] for line in expected]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in steps] == pytest.approx([line[name] for line in expected], rel=ROUNDING)
