"""Runs whose files are lost or damaged: what is refused, what is set aside, and what goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli import app as cli
from llmrecipes.engine.core.update import learning_rate
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.errors import ExitCode
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.tracking import status
from llmrecipes.train.completeness import require_complete
from llmrecipes.train.observers import folder
from llmrecipes.workflow import slurm
from llmrecipes.workflow.run import require_same_recipe
from tests.helpers import curve, lines, steps_done, tiny_on, train_lines, write_recipe
from tests.refusals import refused, require_message

CHECKPOINTS = {"save_interval": 4, "most_recent_k": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, data_dir: Path) -> Path:
    """A folder with a recipe and its run `runs/lost/r`: 12 steps, checkpoints at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("lost")
    recipe = write_recipe(tiny_on(corpus, "lost", checkpoint=CHECKPOINTS), folder)
    paths = ["--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir)]
    assert cli.run(["train", recipe, "--run-id", "r", "--no-sample", *paths]) == 0
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return tmp_path / "runs" / "lost" / "r"


@pytest.fixture
def train(trained: Path, tmp_path: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`llmrecipes train` of the copy with more arguments; exit code and what was printed."""

    def run(*more: str) -> tuple[int, str]:
        paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
        code = cli.run(["train", str(trained / "lost.yaml"), "--run-id", "r", *more, "--no-sample", *paths])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return run


def recorded(run_dir: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.parent.name != "logs"]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths if path.name != ".writer.lock"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)


def flip_tensors(run_dir: Path) -> None:
    for path in run_dir.glob("checkpoints/step-*/__0_0.distcp"):
        flip(path)


def break_manifests(run_dir: Path) -> None:
    for path in run_dir.glob("checkpoints/step-*/manifest.json"):
        path.write_text("{")


def lose_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")


def lose_checkpoints_and_metrics(run_dir: Path) -> None:
    lose_checkpoints(run_dir)
    (run_dir / "metrics.jsonl").unlink()


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [line["details"] for line in lines(run_dir) if line.get("event") == event]


# -- no checkpoint can be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_tensors, ["step-00000012: __0_0.distcp: SHA-256", "step-00000008: ", "step-00000004: "]),
        (break_manifests, ["step-00000012: manifest.json: ", "step-00000008: ", "step-00000004: "]),
        (lose_checkpoints, ["lost/r/checkpoints"]),
        (lose_checkpoints_and_metrics, ["lost/r/checkpoints"]),
    ],
)
@pytest.mark.rotating
def test_a_run_that_has_lost_all_its_checkpoints_is_refused(
    train: Callable[..., Any], run_dir: Path, damage: Callable[[Path], None], said: list[str]
) -> None:
    damage(run_dir)
    before = recorded(run_dir)
    code, printed = train()
    assert code == ExitCode.STOP
    require_message(printed, run_dir, rule=("--run-id", "--from-scratch", "step 12"))
    assert all(text in printed for text in said)
    assert recorded(run_dir) == before


def test_from_scratch_moves_the_history_where_it_is_a_run_of_its_own(train: Callable[..., Any], run_dir: Path) -> None:
    flip_tensors(run_dir)
    before = recorded(run_dir)
    code, printed = train("--from-scratch", "optimizer.lr=2e-3")
    assert code == 0, printed
    (aside,) = run_dir.glob("before-*")
    assert str(aside) in printed
    assert recorded(aside) == before
    assert [line["step"] for line in train_lines(run_dir)] == list(range(1, 13))
    assert [entry.step for entry in CheckpointStore(run_dir / "checkpoints").entries()] == [4, 8, 12]
    assert events(run_dir, "history_moved") == [{"path": str(aside)}]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(run_dir: Path) -> None:
    lose_checkpoints(run_dir)
    steps = [line for line in lines(run_dir) if line.get("event") != "checkpoint_saved"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps({**status, "state": "running", "checkpoint": None}))
    require_complete(run_dir)
    for evidence in ({**status, "checkpoint": 12}, {"state": "saved", "step": 7}):
        (run_dir / "status.json").write_text(json.dumps(evidence))
        with refused(run_dir, rule="--from-scratch", code=ExitCode.STOP):
            require_complete(run_dir)
    (run_dir / "status.json").unlink()
    require_complete(run_dir)
    (run_dir / "checkpoints" / "damaged-step-00000004-ab").mkdir(parents=True)
    with refused(run_dir, rule="step 4", code=ExitCode.STOP):
        require_complete(run_dir)


def test_local_checkpoints_alone_are_continued_by_a_second_command(
    tmp_path: Path, corpus: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    local = {"non_persistent_save_interval": 2, "non_persistent_local_ckpt_dir": str(tmp_path / "disk-{node}")}
    recipe = write_recipe(tiny_on(corpus, "local", checkpoint={"save_interval": 100, **local}), tmp_path)
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    command = ["train", recipe, "--run-id", "r", "--no-sample", *paths]
    run, real, calls = tmp_path / "runs/local/r", MegatronEngine.train_step, count(1)

    class Killed(BaseException):
        pass

    def killed(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        if next(calls) % 6 == 0:
            raise Killed
        return real(engine, *arguments, **options)

    monkeypatch.setattr(MegatronEngine, "train_step", killed)
    for _ in range(2):
        with pytest.raises(Killed):
            cli.run(command)
    monkeypatch.undo()
    # Its steps are evidence of no checkpoint, whoever looks: this command, or a program that reads the status.
    assert json.loads((run / "status.json").read_text())["checkpoint"] is None
    require_complete(run)
    older = {**json.loads((run / "status.json").read_text()), "checkpoint": status.local_step(run)}
    (run / "status.json").write_text(json.dumps(older))
    assert cli.run(command) == 0, capfd.readouterr().err
    assert [line["step"] for line in train_lines(run)] == list(range(1, 13))
    resumed = [line["step"] for line in lines(run) if line.get("event") == "resumed_locally"]
    assert len(resumed) == 2 and resumed == sorted(set(resumed))
    assert json.loads((run / "status.json").read_text())["checkpoint"] == 12


def test_from_scratch_belongs_to_a_run_that_is_named(trained: Path, tmp_path: Path) -> None:
    arguments = ["train", str(trained / "lost.yaml"), "--from-scratch", "--runs-dir", str(tmp_path / "none")]
    assert cli.run(arguments) == ExitCode.BAD_INPUT
    assert not (tmp_path / "none").exists()


def test_a_slurm_job_of_such_a_run_ends_with_93(
    trained: Path, run_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "SLURM_JOB_ID": "7"})
    break_manifests(run_dir)
    paths = ["--runs-dir", str(run_dir.parents[1]), "--data-dir", str(data_dir)]
    job = ["begin", "--nodes", "1", "--ranks-per-node", "1", "--run-id", "r", *paths, str(trained / "lost.yaml")]
    assert slurm.main(job) == ExitCode.STOP


# -- some can ----------------------------------------------------------------------------------------------------------


def test_damaged_checkpoints_are_set_aside_and_their_steps_written_again(
    train: Callable[..., Any], trained: Path, run_dir: Path
) -> None:
    flip(run_dir / "checkpoints/step-00000012/__0_0.distcp")
    damaged = (run_dir / "checkpoints/step-00000012/__0_0.distcp").read_bytes()
    (run_dir / "checkpoints/step-00000004/manifest.json").write_text("{")
    for name in ("env.json", "plan.json"):
        flip(run_dir / name)
    (run_dir / "status.json").write_bytes(b"\xff{")
    assert CheckpointStore(run_dir / "checkpoints").latest_valid() is not None
    assert len(list(run_dir.glob("checkpoints/step-*"))) == 3, "reading renames nothing"
    code, printed = train()
    assert code == 0, printed
    assert steps_done(printed) == 8
    store = CheckpointStore(run_dir / "checkpoints")
    assert [entry.step for entry in store.entries()] == [8, 12]
    (aside,) = run_dir.glob("checkpoints/damaged-step-00000012-*")
    assert (aside / "__0_0.distcp").read_bytes() == damaged
    assert len(list(run_dir.glob("checkpoints/damaged-step-00000004-*"))) == 1
    assert [note["checkpoint"] for note in events(run_dir, "checkpoint_damaged")] == ["step-00000012", "step-00000004"]
    assert [note["file"] for note in events(run_dir, "document_damaged")] == ["plan.json", "env.json"]
    assert curve(run_dir) == curve(trained / "runs/lost/r")


def test_a_directory_that_is_deleted_ends_the_run_with_its_state_saved(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done, run_dir = MegatronEngine.train_step, [0], tmp_path / "runs/lost/r"

    def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        done[0] += 1
        if done[0] == 6:
            shutil.rmtree(run_dir)
        return real(engine, *arguments, **options)

    monkeypatch.setattr(MegatronEngine, "train_step", step)
    monkeypatch.setattr(folder, "SECONDS_BETWEEN_CHECKS", 0.0)
    code, printed = train("checkpoint.save_interval=100")
    assert code == ExitCode.STOP
    require_message(printed, run_dir)
    assert done[0] < 12, "it stops at once, not at its last step"
    (entry,) = CheckpointStore(run_dir / "checkpoints").entries()
    assert str(entry.path) in printed
    code, printed = train("optimizer.lr=2e-3")
    assert code == ExitCode.BAD_INPUT, "the checkpoint knows its recipe"
    require_message(printed, run_dir, rule="optimizer.lr:")


def test_a_directory_that_is_renamed_has_its_state_under_its_new_name(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done, run_dir = MegatronEngine.train_step, [0], tmp_path / "runs/lost/r"

    def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        done[0] += 1
        if done[0] == 6:
            run_dir.rename(run_dir.with_name("kept"))
        return real(engine, *arguments, **options)

    monkeypatch.setattr(MegatronEngine, "train_step", step)
    monkeypatch.setattr(folder, "SECONDS_BETWEEN_CHECKS", 0.0)
    code, printed = train("checkpoint.save_interval=100")
    assert code == ExitCode.STOP
    require_message(printed, run_dir, rule="--run-id kept")
    assert done[0] < 12, "it stops at once, not at its last step"
    assert not run_dir.exists(), "nothing is left under the old name"
    kept = run_dir.with_name("kept")
    (entry,) = CheckpointStore(kept / "checkpoints").entries()
    assert entry.step == done[0] and (kept / "recipe.yaml").exists()
    monkeypatch.setattr(MegatronEngine, "train_step", real)
    code, printed = train("checkpoint.save_interval=100", "--run-id", "kept")
    assert code == 0, printed
    assert [line["step"] for line in train_lines(kept)] == list(range(1, 13)), "and goes on from there"


# -- the recipe --------------------------------------------------------------------------------------------------------


def recipe_of(trained: Path, *overrides: str) -> Recipe:
    return load(str(trained / "lost.yaml"), overrides).recipe


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"name: [", b"train: 1\n"])
def test_the_fix_for_a_damaged_recipe_works(trained: Path, run_dir: Path, data_dir: Path, damage: bytes) -> None:
    path = run_dir / "recipe.yaml"
    path.write_bytes(damage)
    recipe = recipe_of(trained)
    with refused(path) as caught:
        require_same_recipe(recipe, Run(run_dir), data_dir, accept=False)
    command = caught.value.fix[caught.value.fix.index("python3") : caught.value.fix.rindex(";")]
    subprocess.run(["bash", "-c", command], check=True)
    assert load(str(path)).recipe == recipe
    require_same_recipe(recipe, Run(run_dir), data_dir, accept=False)


def test_more_steps_that_change_the_learning_rate_have_to_be_accepted(
    train: Callable[..., Any], trained: Path, run_dir: Path
) -> None:
    before = recorded(run_dir)
    code, printed = train("train.train_iters=20")
    assert code == ExitCode.BAD_INPUT
    then, now = recipe_of(trained), recipe_of(trained, "train.train_iters=20")
    rates = [f"{learning_rate(recipe, 13):.1e}" for recipe in (now, then)]
    assert rates[0] != rates[1]
    require_message(
        printed, run_dir, rule=("train.train_iters", "13", *rates, "scheduler.lr_decay_iters=12", "--accept-changes")
    )
    assert recorded(run_dir) == before


def test_an_explicit_or_accepted_learning_rate_change_is_allowed(
    trained: Path, run_dir: Path, data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resume(*overrides: str, accept: bool = False) -> None:
        require_same_recipe(recipe_of(trained, *overrides), Run(run_dir), data_dir, accept=accept)

    resume("train.train_iters=20", "scheduler.lr_decay_iters=12")
    resume("train.train_iters=20", "scheduler.lr_decay_iters=20")  # asked for by name
    assert not caplog.records
    resume("train.train_iters=20", accept=True)
    assert "learning rate" in caplog.text


def test_more_passes_over_the_data_change_nothing(trained: Path, run_dir: Path, data_dir: Path) -> None:
    longer = recipe_of(trained, "train.train_iters=4000", "scheduler.lr_decay_iters=12")
    require_same_recipe(longer, Run(run_dir), data_dir, accept=False)


def test_the_learning_rate_that_is_named_is_the_one_that_is_used(trained: Path) -> None:
    recipe = recipe_of(trained)
    used = {line["step"]: line["lr"] for line in train_lines(trained / "runs/lost/r")}
    assert used == {step: learning_rate(recipe, step) for step in range(1, 13)}
