"""A run that goes on in one named layout after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.recipe.sections.layout_section import NamedLayout
from tests.helpers import finish, start_command, tiny_on, train_lines, write_recipe

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2, "micro_batch_size": 4},
    "stages": {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
}


@pytest.mark.slow
def test_layouts_one_after_another_train_as_one_process(corpus: Path, data_dir: Path, tmp_path: Path) -> None:
    """`layout` and `layouts` change how steps are executed, not what is learned."""
    train = {"precision": "fp32", "train_iters": 12, "global_batch_size": 8}
    recipe = tiny_on(corpus, "layouts", train=train, layout={"micro_batch_size": 8}, checkpoint={"save_interval": 4})
    path = write_recipe(
        recipe.model_copy(update={"layouts": {name: NamedLayout(**keys) for name, keys in LAYOUTS.items()}}), tmp_path
    )
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]

    def command(run_id: str, *overrides: str) -> list[str]:
        return ["train", path, *overrides, "--run-id", run_id, "--no-sample", *paths]

    assert cli.run(command("whole")) == 0
    for layout, steps in (("tensor", 4), ("stages", 8), ("auto", 12)):
        length = [f"train.train_iters={steps}", "scheduler.lr_decay_iters=12"]
        finish(start_command(*command("cut", f"layout={layout}", *length)), 0)
    whole, cut = (train_lines(tmp_path / "runs/layouts" / run_id) for run_id in ("whole", "cut"))
    assert [line["step"] for line in cut] == [line["step"] for line in whole] == [*range(1, 13)]
    for value in ("loss", "grad_norm"):
        assert [line[value] for line in cut] == pytest.approx([line[value] for line in whole], rel=1e-5)
