"""What a run does when something goes wrong inside it, or when it is looked into: the command, in this process."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli import app as cli
from llmrecipes.console import setup_logging
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.start import Machine, PreparedStart
from llmrecipes.workflow.train import start
from tests.helpers import (
    curve,
    lines,
    no_file_above,
    require_same_checkpoints,
    steps_done,
    tiny_on,
    train_lines,
    write_recipe,
)
from tests.refusals import require_message

BAD = "decoder.layers.1.mlp.linear_fc1.weight"

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def train(tmp_path: Path, corpus: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `llmrecipes train` on a small recipe: sections and command-line options to exit code and printed text."""

    def run(*options: str, **sections: dict[str, Any]) -> tuple[int, str]:
        recipe = tiny_on(corpus, "faults", **sections)
        paths = ("--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir))
        code = cli.run(["train", write_recipe(recipe, tmp_path), *options, "--run-id", "r", "--no-sample", *paths])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "faults" / "r"


def poison(monkeypatch: pytest.MonkeyPatch, at: int, name: str = BAD) -> None:
    """Make one weight NaN before a step."""
    real, calls = MegatronEngine.train_step, [0]

    def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            with torch.no_grad():
                engine.modules[0].get_parameter(name)[1, 2] = math.nan
        return real(engine, *arguments, **options)

    monkeypatch.setattr(MegatronEngine, "train_step", step)


def saved(run_dir: Path) -> list[int]:
    return [entry.step for entry in CheckpointStore(run_dir / "checkpoints").entries()]


def notes(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir) if line.get("event") == event]


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_a_nan_stops_the_run_and_leaves_the_checkpoint_of_before(
    train: Command, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, at=6)
    code, printed = train(checkpoint={"save_interval": 4})
    assert code == 93
    require_message(printed, "step 6, rank 0", rule=BAD)
    assert saved(run_dir) == [4]
    assert [line["step"] for line in train_lines(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert train_lines(run_dir)[-1]["non_finite"] == ["loss", "grad_norm"]
    assert not notes(run_dir, "loss_spike")
    monkeypatch.undo()
    code, printed = train(checkpoint={"save_interval": 4})
    assert code == 0
    assert steps_done(printed) == 4


def test_a_loss_that_explodes_and_stays_finite_raises_one_alarm(train: Command, run_dir: Path) -> None:
    code, printed = train(optimizer={"lr": 1.0})
    assert code == 0
    losses = [line["loss"] for line in train_lines(run_dir)]
    (note,) = notes(run_dir, "loss_spike")
    assert note["alarm"] is True
    assert note["details"]["loss"] == losses[note["step"] - 1] > note["details"]["limit"] > losses[0]
    assert printed.count("ALARM: loss ") == 1


def test_anomaly_mode_names_the_module(train: Command, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, at=2)
    code, printed = train("--anomaly")
    assert code == 93
    require_message(printed, "decoder.layers.1.mlp.linear_fc1")
    assert [line["step"] for line in train_lines(run_dir)] == [1]


def test_overflows_are_skipped_counted_and_end_at_the_smallest_loss_scale(train: Command, run_dir: Path) -> None:
    scale = {"precision": "fp16", "hysteresis": 1, "initial_loss_scale": 2.0**40, "min_loss_scale": 2.0**38}
    code, printed = train(train=scale)
    assert code == 93
    require_message(printed, "train.min_loss_scale", rule=("fp16", "3"))
    skipped = train_lines(run_dir)
    assert [line["skipped"] for line in skipped] == [True] * 3
    assert [line["loss_scale"] for line in skipped] == [2.0**40, 2.0**39, 2.0**38]
    assert [note["details"]["skipped_steps"] for note in notes(run_dir, "overflow_skipped")] == [1, 2, 3]


# -- disk ------------------------------------------------------------------------------------------------------------


def test_failed_saves_are_alarms_and_only_the_last_one_ends_the_run(
    train: Command, run_dir: Path, data_dir: Path, corpus: Path
) -> None:
    assert cli.run(["prepare", write_recipe(tiny_on(corpus, "faults"), data_dir), "--data-dir", str(data_dir)]) == 0
    with no_file_above(300_000):
        code, printed = train(checkpoint={"save_interval": 4})
    assert code == 93
    require_message(printed, "12")
    assert os.strerror(errno.EFBIG) in printed
    assert [line["step"] for line in train_lines(run_dir)] == list(range(1, 13))
    assert [(note["step"], note["alarm"]) for note in notes(run_dir, "save_failed")] == [
        (4, True),
        (8, True),
        (12, True),
        (12, True),  # once more, before the state is lost
    ]
    assert not list((run_dir / "checkpoints").glob("*step*"))
    assert not list((run_dir / "checkpoints").glob(".tmp*"))


@pytest.fixture
def small_disk(run_dir: Path) -> Iterator[Path]:
    """The checkpoint directory as a file system of 8 MiB."""
    directory = run_dir / "checkpoints"
    directory.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root and mount(8): {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_training_survives_a_full_disk_and_saves_once_there_is_space(
    train: Command, run_dir: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(7 * 1024 * 1024))
    real = MegatronEngine.train_step

    def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        if engine.scheduler.num_steps == 6:
            assert not list(small_disk.glob(".tmp*"))  # the save of step 4 was synchronous
            filler.unlink()
        return real(engine, *arguments, **options)

    monkeypatch.setattr(MegatronEngine, "train_step", step)
    code, printed = train(checkpoint={"save_interval": 4, "async_save": False, "most_recent_k": 1})
    assert code == 0, printed
    assert "ALARM" in printed
    assert os.strerror(errno.ENOSPC) in printed
    assert [(note["step"], note["alarm"]) for note in notes(run_dir, "save_failed")] == [(4, True)]
    assert [note["step"] for note in notes(run_dir, "checkpoint_saved")] == [8, 12]
    assert CheckpointStore(small_disk).valid(12, full=True)


def test_a_disk_that_stays_full_ends_the_run(train: Command, run_dir: Path, small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(7 * 1024 * 1024))
    code, printed = train(checkpoint={"save_interval": 2, "max_failed_saves": 2})
    assert code == 93
    require_message(printed, "checkpoint.max_failed_saves", rule="4")
    assert [line["step"] for line in train_lines(run_dir)] == [1, 2, 3, 4]
    assert [(note["step"], note["alarm"]) for note in notes(run_dir, "save_failed")] == [
        (2, True),
        (4, True),
        (4, True),
    ]


def test_the_last_attempt_is_repeated_and_failures_before_it_are_forgotten(
    train: Command, run_dir: Path, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(7 * 1024 * 1024))

    class Cleaner(logging.Handler):
        """Frees the disk after the second failed save, before it is repeated."""

        failed = 0

        def emit(self, record: logging.LogRecord) -> None:
            if "ALARM" in record.msg:
                self.failed += 1
                if self.failed == 2:
                    filler.unlink()

    cleaner, log = Cleaner(), logging.getLogger("llmrecipes.checkpoint.saver")
    log.addHandler(cleaner)
    try:
        code, printed = train(checkpoint={"save_interval": 4, "max_failed_saves": 2, "most_recent_k": 1})
    finally:
        log.removeHandler(cleaner)
    assert code == 0, printed
    assert [note["step"] for note in notes(run_dir, "save_failed")] == [4, 8]
    assert [note["step"] for note in notes(run_dir, "checkpoint_saved")] == [8, 12]


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something before a step, once."""

    def arrange(number: int, what: Callable[[], None]) -> None:
        real = MegatronEngine.train_step

        def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
            if engine.scheduler.num_steps == number - 1:
                monkeypatch.setattr(MegatronEngine, "train_step", real)
                what()
            return real(engine, *arguments, **options)

        monkeypatch.setattr(MegatronEngine, "train_step", step)

    return arrange


def test_a_killed_process_that_reads_is_saved_and_started_again(
    train: Command, run_dir: Path, at_step: Callable[[int, Callable[[], None]], None]
) -> None:
    others = set(active_children())

    def kill() -> None:
        for child in set(active_children()) - others:
            child.kill()

    at_step(5, kill)
    sections: dict[str, Any] = {"data": {"num_workers": 1, "prefetch_factor": 1}, "model": {"hidden_dropout": 0.1}}
    code, printed = train(**sections)
    assert code == 75
    require_message(printed, "data.num_workers", rule="SIGKILL")
    last = train_lines(run_dir)[-1]["step"]
    assert saved(run_dir) == [last]
    assert last >= 5, "the step that was read ahead is done"
    assert [note["alarm"] for note in notes(run_dir, "unreadable")] == [True]
    code, printed = train(**sections)
    assert code == 0, printed
    assert steps_done(printed) == last
    interrupted = run_dir.rename(run_dir.with_name("interrupted"))
    assert train(**sections)[0] == 0
    assert curve(interrupted) == curve(run_dir)


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.rotating
def test_tokens_that_are_cut_off_under_a_run_end_it_with_the_last_step_saved(
    tmp_path: Path,
    corpus: Path,
    data_dir: Path,
    at_step: Callable[[int, Callable[[], None]], None],
    capfd: pytest.CaptureFixture[str],
    split: str,
) -> None:
    from llmrecipes.data.prepare import prepare

    recipe = tiny_on(corpus)
    shutil.copytree(prepare(recipe, data_dir).path, tmp_path / "data" / prepare(recipe, data_dir).path.name)
    file = prepare(recipe, tmp_path / "data").path / f"00-{split}.bin"
    whole = file.read_bytes()
    at_step(4, lambda: os.truncate(file, 100))
    assert run_spec(recipe, tmp_path, tmp_path / "data") == 93
    require_message(capfd.readouterr().err, file, rule="100")
    run_dir = tmp_path / "runs" / "tiny" / "r"
    last = train_lines(run_dir)[-1]["step"]
    assert saved(run_dir) == [last]
    # Every fifth is followed by an evaluation; of training, some batches were read before they are used.
    assert last in (range(4, 12) if split == "train" else [5])
    file.write_bytes(whole)
    assert run_spec(recipe, tmp_path, tmp_path / "data") == 0
    assert [line["step"] for line in train_lines(run_dir)] == list(range(1, 13))


# -- looking into it -------------------------------------------------------------------------------------------------

ONE_BATCH: dict[str, dict[str, Any]] = {"train": {"global_batch_size": 2, "train_iters": 200}}


@pytest.mark.rotating
def test_one_batch_is_overfitted(train: Command, tmp_path: Path) -> None:
    code, printed = train("--overfit-batch", optimizer={"lr": 1e-2}, **ONE_BATCH)
    assert code == 0, printed
    assert "loss 6." in printed
    losses = [line["loss"] for line in train_lines(tmp_path / "runs" / "faults.overfit" / "r")]
    assert len(losses) == 200
    assert losses[-1] < 0.05


@pytest.mark.parametrize(
    ("sections", "diagnosis"),
    [
        ({"optimizer": {"lr": 1e-9}}, ("optimizer.lr", "--anomaly")),
        ({"optimizer": {"lr": 30.0}}, "optimizer.lr"),
        ({"optimizer": {"lr": 1e-3}}, "train.train_iters"),
        ({"optimizer": {"lr": 1e-3}, "model": {"hidden_dropout": 0.5}}, ("0.5", "model.hidden_dropout=0")),
    ],
    ids=["too low", "too high", "too short", "dropout"],
)
@pytest.mark.rotating
def test_one_batch_that_is_not_learnt_gets_a_diagnosis(
    train: Command, sections: dict[str, dict[str, Any]], diagnosis: str | tuple[str, ...]
) -> None:
    code, printed = train("--overfit-batch", **{**sections, "train": {"global_batch_size": 2, "train_iters": 20}})
    assert code == 93
    require_message(printed, "--overfit-batch", rule=diagnosis)
    assert "loss 6." in printed


@pytest.mark.rotating
def test_a_profile_is_a_table_of_kernels_and_a_trace_where_asked_for(train: Command, run_dir: Path) -> None:
    code, printed = train("--profile", "2", "--profile-trace")
    assert code == 0, printed
    path = run_dir / "logs" / "kernels-rank-0.json"
    assert str(path) in printed
    profile = json.loads(path.read_text())
    assert profile["steps"] == 2
    assert {"gemm", "attention", "loss", "elementwise", "copy", "idle"} <= profile["kinds"].keys()
    assert sum(profile["kinds"].values()) == pytest.approx(profile["seconds"], rel=0.3)
    names = [event.get("name") for event in json.loads((path.parent / "trace-rank-0.json").read_text())["traceEvents"]]
    assert any(name == "aten::addmm" or name == "aten::mm" for name in names)
    assert len([name for name in names if str(name).startswith("ProfilerStep#")]) == 2


@pytest.mark.rotating
def test_routers_are_measured_in_some_steps_only(train: Command, run_dir: Path) -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
    code, printed = train(model=experts, train={"log_interval": 1})
    assert code == 0, printed
    assert [line["step"] for line in train_lines(run_dir) if "experts" in line] == [1, 10, 12]


# -- resuming --------------------------------------------------------------------------------------------------------


def run_spec(recipe: Recipe, folder: Path, data_dir: Path, **changes: Any) -> int:
    run_dir = folder / "runs" / recipe.name / "r"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    spec = RunSpec(recipe=recipe, run_dir=run_dir, runs_dir=folder / "runs", data_dir=data_dir, sample=False, **changes)
    setup_logging()  # to the standard error of this test, not to that of an earlier one
    return start(PreparedStart.of(spec, derive_run(recipe, 1, detect()), Machine(detect(), 1)))


def test_a_run_that_breaks_leaves_no_process_that_reads(
    tmp_path: Path, corpus: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmrecipes.data.prepare import prepare

    others = set(active_children())

    def broken(_engine: MegatronEngine, batches: Iterator[Any], **_options: Any) -> None:
        next(batches)
        assert set(active_children()) > others
        raise RuntimeError("a broken step")

    monkeypatch.setattr(MegatronEngine, "train_step", broken)
    recipe = tiny_on(corpus, data={"num_workers": 1})
    prepare(recipe, data_dir)
    with pytest.raises(RuntimeError, match="a broken step") as error:
        run_spec(recipe, tmp_path, data_dir)
    assert set(active_children()) == others, "only the traceback keeps it"
    assert error.traceback


@pytest.mark.slow
def test_two_starts_are_one_run_in_the_files_and_in_mlflow(
    tmp_path: Path, corpus: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    from llmrecipes.data.prepare import prepare

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = {"mlflow": True, "system_metrics_interval": None}
    recipe = tiny_on(corpus, model={"hidden_dropout": 0.1}, tracking=tracking)
    prepare(recipe, data_dir)
    assert run_spec(recipe, tmp_path / "cut", data_dir, stop_after=5) == 75
    assert run_spec(recipe, tmp_path / "cut", data_dir) == 0
    quiet = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"mlflow": False})})
    assert run_spec(quiet, tmp_path / "whole", data_dir) == 0
    cut, whole = (tmp_path / name / "runs" / "tiny" / "r" for name in ("cut", "whole"))
    assert curve(cut) == curve(whole)
    require_same_checkpoints(cut / "checkpoints/step-00000012", whole / "checkpoints/step-00000012")
    uri = json.loads((cut / "mlflow.json").read_text())["tracking_uri"]
    assert uri.startswith("sqlite:///")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == list(range(1, 13))
    assert [metric.value for metric in history] == [line["loss"] for line in train_lines(whole)]


@pytest.mark.rotating
def test_an_evaluation_that_is_interrupted_is_done_first_when_the_run_is_resumed(
    tmp_path: Path, corpus: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmrecipes.data.prepare import prepare

    recipe = tiny_on(corpus, model={"hidden_dropout": 0.1}, train={"eval_iters": 3, "eval_interval": 6})
    prepare(recipe, data_dir)
    assert run_spec(recipe, tmp_path / "whole", data_dir) == 0
    cut, whole = (tmp_path / name / "runs" / "tiny" / "r" for name in ("cut", "whole"))
    real, calls = MegatronEngine.evaluate, [0]

    def interrupted(engine: MegatronEngine, *arguments: Any) -> float | None:
        calls[0] += 1
        if calls[0] != 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(engine, *arguments)

    # The evaluation of step 6 is interrupted, then interrupted again, then done; the next one is that of the last step.
    monkeypatch.setattr(MegatronEngine, "evaluate", interrupted)
    for step in (6, 6, 12):
        assert run_spec(recipe, tmp_path / "cut", data_dir) == 75
        assert saved(cut)[-1] == len(train_lines(cut)) == step
        assert [line["step"] for line in lines(cut) if "valid_loss" in line] == ([] if step == 6 else [6])
    monkeypatch.setattr(MegatronEngine, "evaluate", real)
    assert run_spec(recipe, tmp_path / "cut", data_dir) == 0
    assert curve(cut) == curve(whole)
    require_same_checkpoints(cut / "checkpoints/step-00000012", whole / "checkpoints/step-00000012")
    before = (cut / "metrics.jsonl").read_bytes()
    assert run_spec(recipe, tmp_path / "cut", data_dir) == 0
    assert (cut / "metrics.jsonl").read_bytes() == before


@pytest.mark.rotating
def test_a_finished_run_has_nothing_to_do_and_may_be_made_longer(train: Command, run_dir: Path) -> None:
    assert train()[0] == 0
    before = (run_dir / "metrics.jsonl").read_bytes()
    code, printed = train()
    assert code == 0
    assert steps_done(printed) == 12
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert train(train={"train_iters": 15}, scheduler={"lr_decay_iters": 12})[0] == 0
    assert [line["step"] for line in train_lines(run_dir)] == list(range(1, 16))
    code, printed = train(train={"train_iters": 10}, scheduler={"lr_decay_iters": 12})
    assert code == 2
    require_message(printed, "train.train_iters", rule=("train.train_iters=15", "10"))


def test_what_a_run_leaves_behind(train: Command, run_dir: Path) -> None:
    code, printed = train()
    assert code == 0
    assert "bits" in printed
    assert {path.name for path in run_dir.iterdir()} >= {
        "recipe.yaml", "plan.json", "env.json", "metrics.jsonl", "checkpoints", "logs",
    }  # fmt: skip
    plan = json.loads((run_dir / "plan.json").read_text())
    assert (plan["transformer_impl"], plan["transformer_impl_reason"]) == ("local", "no GPU")
    keys = {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "consumed_samples",
        "consumed_tokens",
        "step_seconds",
        "tokens_per_second",
    }
    assert all(line.keys() >= keys for line in train_lines(run_dir))
    assert [line["step"] for line in lines(run_dir) if "valid_loss" in line] == [5, 10, 12]
    assert saved(run_dir) == [12]
    assert os.access(run_dir / "checkpoints" / "step-00000012" / "manifest.json", os.R_OK)
