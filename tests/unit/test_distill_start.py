"""`distill.teacher` from the command line: a run or a folder, the same tokens, and the same weights after a restart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.recipe.schema import Recipe
from tests.conftest import Command
from tests.helpers import tiny_on, train_lines, write_recipe
from tests.refusals import require_message

KEYS = {"train_iters": 4, "eval_interval": 4, "eval_iters": 1, "log_interval": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("taught")


def small(corpus: Path, name: str, **sections: dict[str, Any]) -> Recipe:
    return tiny_on(
        corpus, name, train=KEYS, checkpoint={"save_interval": 2},
        **{"model": {"hidden_size": 32, "vocab_size": 300, "seq_length": 32}, **sections},
    )  # fmt: skip


@pytest.fixture
def student(folder: Path, corpus: Path, command: Command) -> str:
    """Path of the recipe of a student, whose teacher is a run that was trained."""
    if not (folder / "student.yaml").exists():
        teacher = small(corpus, "teacher", model={"hidden_size": 64, "vocab_size": 300, "seq_length": 32})
        assert command("train", write_recipe(teacher, folder), "--run-id", "one")[0] == 0
        write_recipe(small(corpus, "student", distill={"teacher": "teacher", "model": {"hidden_size": 64}}), folder)
    return str(folder / "student.yaml")


def losses(folder: Path, run: str) -> list[float]:
    return [line["loss"] for line in train_lines(folder / "runs" / "student" / run)]


@pytest.mark.rotating
def test_a_run_learns_from_a_run_and_from_its_export_alike(student: str, folder: Path, command: Command) -> None:
    assert command("train", student, "--run-id", "of-run")[0] == 0
    record = json.loads((folder / "runs/student/of-run/teacher.json").read_text("utf-8"))
    assert Path(record["path"]).name == "step-00000004"
    exported = folder / "hf"
    assert command("export", "teacher", "--out", str(exported))[0] == 0
    assert command("train", student, f"distill.teacher={exported}", "--run-id", "of-folder")[0] == 0
    assert losses(folder, "of-folder") == pytest.approx(losses(folder, "of-run"), rel=1e-6)
    assert command("train", student, "distill=null", "--run-id", "alone")[0] == 0
    assert losses(folder, "alone")[0] != pytest.approx(losses(folder, "of-run")[0], rel=1e-3)


@pytest.mark.rotating
def test_a_restarted_run_keeps_its_teacher(student: str, folder: Path, corpus: Path, command: Command) -> None:
    assert command("train", student, "--run-id", "whole")[0] == 0
    shutil.copytree(folder / "runs/student/whole", folder / "runs/student/again")
    run = folder / "runs/student/again"
    shutil.rmtree(run / "checkpoints/step-00000004")
    # The teacher has trained on since.
    longer = ("train.train_iters=6", "checkpoint.most_recent_k=9", "--accept-changes")
    assert command("train", str(folder / "teacher.yaml"), "--run-id", "one", *longer)[0] == 0
    assert command("train", student, "--run-id", "again")[0] == 0
    assert losses(folder, "again")[-2:] == pytest.approx(losses(folder, "whole")[-2:], rel=1e-6)
    gone = Path(json.loads((run / "teacher.json").read_text("utf-8"))["path"])
    gone.rename(gone.with_name("elsewhere"))
    try:
        shutil.rmtree(run / "checkpoints/step-00000004")
        code, printed = command("train", student, "--run-id", "again")
        assert code == 2
        require_message(printed, str(gone))
    finally:
        gone.with_name("elsewhere").rename(gone)


def test_a_teacher_that_does_not_fit_starts_nothing(student: str, folder: Path, corpus: Path, command: Command) -> None:
    before = sorted((folder / "runs/student").glob("*")) if (folder / "runs/student").exists() else []
    code, printed = command("train", student, "distill.model={}", "model.init_method_std=0.5")  # which does not matter
    assert code == 2
    require_message(printed, "distill.teacher", rule='distill.model={"hidden_size": 64}')
    code, printed = command("train", student, "distill.teacher=nobody")
    assert code == 2
    require_message(printed, "distill.teacher")
    other = small(corpus, "stranger", data={"split": [50.0, 25.0, 25.0]})
    assert command("train", write_recipe(other, folder), "--run-id", "one")[0] == 0
    code, printed = command("train", student, "distill.teacher=stranger", "distill.model={}")
    assert code == 2
    require_message(printed, "distill.teacher", rule="data.tokenizer")
    assert (sorted((folder / "runs/student").glob("*")) if (folder / "runs/student").exists() else []) == before
