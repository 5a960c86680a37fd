"""A run that goes on with fewer ranks and with more, as `train.elastic` allows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import finish, lines, saved_steps, start_command, tiny_on, train_lines, wait_until, write_recipe

STEPS = 160
ROUNDING = 1e-3
"""Largest relative difference of a loss or gradient norm after 160 steps that other ranks have summed."""


def resized(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir) if line.get("event") == "resized"]


def last_step(run_dir: Path) -> int:
    steps: list[int] = [line["step"] for line in train_lines(run_dir)]
    return steps[-1] if steps else 0


@pytest.mark.slow
def test_a_run_on_4_2_1_and_4_ranks_trains_what_one_rank_does(corpus: Path, data_dir: Path, tmp_path: Path) -> None:
    train = {"train_iters": STEPS, "elastic": [1, 4]}
    sections: dict[str, dict[str, Any]] = {"train": train, "checkpoint": {"save_interval": 30}}
    recipe = write_recipe(tiny_on(corpus, "elastic", **sections), tmp_path)
    paths = ("--no-sample", "--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir))
    one, changing = (tmp_path / "runs" / "elastic" / name for name in ("one", "changing"))

    def start(run_id: str, ranks: int, *options: str) -> subprocess.Popen[str]:
        return start_command("train", recipe, "--run-id", run_id, "--nproc", str(ranks), *options, *paths)

    def ranks_now() -> dict[str, int]:
        path = changing / "logs" / "processes.json"
        pids: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        return pids

    finish(start("one", 1), 0)
    # Two ends of four ranks, the second before the next checkpoint, which is thirty steps away.
    process = start("changing", 4, "--max-restarts", "3")
    # A checkpoint is written beside the steps that follow it.
    wait_until(process, lambda: last_step(changing) >= 32 and saved_steps(changing) == [30])
    first = ranks_now()
    psutil.Process(first["1"]).kill()
    wait_until(process, lambda: ranks_now() != first)
    second = ranks_now()
    assert len(second) == 4
    psutil.Process(second["1"]).kill()
    wait_until(process, lambda: len(ranks_now()) == 2 and len(resized(changing)) == 1)
    step = resized(changing)[0]["step"]
    wait_until(process, lambda: last_step(changing) == step or last_step(changing) > step + 2)
    process.terminate()
    finish(process, 75)
    process = start("changing", 1)
    wait_until(process, lambda: len(resized(changing)) == 2)
    process.terminate()
    finish(process, 75)
    finish(start("changing", 4), 0)

    sizes = [
        (note["details"]["before"]["world_size"], note["details"]["now"]["world_size"]) for note in resized(changing)
    ]
    assert sizes == [(4, 2), (2, 1), (1, 4)]
    steps, expected = train_lines(changing), train_lines(one)
    for name in ("step", "consumed_samples", "lr"):
        assert [line[name] for line in steps] == [line[name] for line in expected]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in steps] == pytest.approx([line[name] for line in expected], rel=ROUNDING)
