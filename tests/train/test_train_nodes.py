"""One run on two machines that are started by hand: the same training as on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrecipes.launch.local.processes import reserved_port
from tests.helpers import curve, finish, start_command, tiny_on, write_recipe

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
