"""One run on two machines that are started by hand: the same training as on one."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.launch.local.processes import reserved_port
from tests.helpers import (
    curve,
    finish,
    lines,
    require_same_checkpoints,
    start_command,
    steps_done,
    tiny_on,
    train_lines,
    wait_for_step,
    write_recipe,
)

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def test_two_nodes_train_as_one(corpus: Path, data_dir: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tiny_on(corpus), tmp_path)
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir), "--no-sample"]
    finish(start_command("train", recipe, *paths, "--run-id", "one", "--nproc", "2"), 0)
    command = ["train", recipe, *paths, "--run-id", "two", "--nnodes", "2"]
    with reserved_port() as port:
        command += ["--rdzv", f"127.0.0.1:{port}", "--node-rank"]
        nodes = [start_command(*command, str(number)) for number in range(2)]
        printed = [finish(process, 0) for process in nodes]
    runs = tmp_path / "runs" / "tiny"
    assert curve(runs / "two") == curve(runs / "one")
    assert "step 12/12" in printed[0]
    assert "step" not in printed[1]
    # A node that is started again after the end does not wait for the others.
    assert str(runs / "two") in finish(start_command(*command, "1"), 0)


def test_a_node_that_is_lost_goes_on_from_the_copy_on_its_neighbour(
    corpus: Path, data_dir: Path, tmp_path: Path
) -> None:
    """Killed without a checkpoint on the shared disk: at most the step that was being saved is lost."""
    local = {"non_persistent_save_interval": 1, "non_persistent_local_ckpt_dir": str(tmp_path / "disk-{node}")}
    random: dict[str, Any] = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}, "train": {"train_iters": 60}}
    recipe = write_recipe(tiny_on(corpus, "local", **random, checkpoint={"save_interval": 1000, **local}), tmp_path)
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir), "--no-sample"]
    runs = tmp_path / "runs" / "local"
    with reserved_port() as port:
        options = ["--nnodes", "2", "--rdzv", f"127.0.0.1:{port}", "--node-rank"]
        command = ["train", recipe, *paths, "--run-id", "two", *options]
        nodes = [start_command(*command, str(number)) for number in range(2)]
        wait_for_step(nodes[0], runs / "two", 10)
        for process in nodes:
            process.kill()
        for process in nodes:
            finish(process, -signal.SIGKILL)
        last = train_lines(runs / "two")[-1]["step"]
        shutil.rmtree(tmp_path / "disk-1")
        nodes = [start_command(*command, str(number)) for number in range(2)]
        printed = [finish(process, 0) for process in nodes]
    assert last - steps_done(printed[0]) in (1, 2)
    (note,) = [line for line in lines(runs / "two") if line.get("event") == "resumed_locally"]
    assert note["details"] == {"from_copies": [1]}
    assert not any(path.is_file() for disk in tmp_path.glob("disk-*") for path in disk.rglob("*")), "it has ended"
    finish(start_command("train", recipe, *paths, "--run-id", "one", "--nproc", "2"), 0)
    assert curve(runs / "two") == curve(runs / "one")
    require_same_checkpoints(*(runs / run / "checkpoints/step-00000060" for run in ("two", "one")))
