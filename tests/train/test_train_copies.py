"""Runs whose checkpoints are copied to S3 of moto's server: continued elsewhere, and through a store that is away."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from llmrecipes.cli import app as cli
from llmrecipes.errors import ExitCode
from tests.helpers import (
    curve,
    finish,
    lines,
    require_same_checkpoints,
    saved_steps,
    start_command,
    tiny_on,
    train_lines,
    wait_for_step,
    wait_until,
    write_recipe,
)
from tests.object_store import Proxy, credentials, give_up_after, s3_server
from tests.refusals import require_message

STEPS = 12
RECIPE: dict[str, dict[str, Any]] = {
    "model": {"hidden_dropout": 0.1},
    "train": {"train_iters": STEPS, "eval_interval": 6, "global_batch_size": 8},
    "checkpoint": {"save_interval": 4, "most_recent_k": 2, "copy_to": "s3://runs"},
}


class Elsewhere:
    """Machines that share nothing but the store: each has its own runs directory."""

    def __init__(self, folder: Path, corpus: Path, data_dir: Path) -> None:
        self._recipe = write_recipe(tiny_on(corpus, "copied", **RECIPE), folder)
        self._folder, self._data_dir = folder, data_dir

    def directory(self, machine: str, run_id: str) -> Path:
        return self._folder / machine / "copied" / run_id

    def command(self, machine: str, run_id: str, *options: str) -> list[str]:
        paths = ("--runs-dir", str(self._folder / machine), "--data-dir", str(self._data_dir))
        return ["train", self._recipe, "--run-id", run_id, "--no-sample", *paths, *options]

    def train(self, machine: str, run_id: str, *options: str) -> int:
        return cli.run(self.command(machine, run_id, *options))


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """Port of a server with a bucket for runs."""
    with pytest.MonkeyPatch.context() as patch, s3_server(patch, "runs") as port:
        yield port


@pytest.fixture
def proxy(store: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before the server, for the runs of a test."""
    proxy = Proxy(store)
    credentials(monkeypatch, proxy.port)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, corpus: Path, data_dir: Path, store: int) -> Elsewhere:
    return Elsewhere(tmp_path_factory.mktemp("copied"), corpus, data_dir)


@pytest.fixture(scope="module")
def whole(machines: Elsewhere) -> Path:
    """An uninterrupted run, without copies."""
    assert machines.train("one", "whole", "checkpoint.copy_to=null") == 0
    return machines.directory("one", "whole")


def copies(run_id: str) -> list[int]:
    """Steps of the complete copies of a run."""
    s3 = fsspec.filesystem("s3", skip_instance_cache=True)
    manifests = s3.glob(f"runs/copied/{run_id}/*/manifest.json")
    return sorted(int(path.split("/")[-2].split("-")[1]) for path in manifests)


def steps(run_dir: Path) -> int:
    """Steps that are recorded, each once."""
    recorded = [line["step"] for line in train_lines(run_dir)]
    assert recorded == list(range(1, len(recorded) + 1))
    return len(recorded)


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir) if line.get("event") == event]


def require_same(one: Path, other: Path) -> None:
    """They read as the same run, to the last bit of the checkpoint."""
    assert curve(one) == curve(other) and steps(one) == STEPS
    last = f"checkpoints/step-{STEPS:08d}"
    require_same_checkpoints(one / last, other / last)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.rotating)])
def test_a_run_goes_on_elsewhere_from_its_copies(ranks: int, machines: Elsewhere, whole: Path, proxy: Proxy) -> None:
    """Killed with its machine when a copy is there; the other one has the recipe, and no file of the run."""
    run_id = f"moved-{ranks}"
    proxy.fault = lambda method, path: 503 if method == "PUT" and "step-" in path and "00000004" not in path else None
    options = ("--nproc", str(ranks))
    process = start_command(*machines.command("one", run_id, *options))
    wait_until(process, lambda: bool(copies(run_id)))
    process.kill()
    process.communicate()
    shutil.rmtree(machines.directory("one", run_id))
    proxy.fault = lambda method, path: None
    assert copies(run_id) == [4]
    finish(start_command(*machines.command("two", run_id, *options)), 0)
    there = machines.directory("two", run_id)
    assert copies(run_id)[-1] == STEPS and saved_steps(there) == [8, STEPS]
    assert [line["step"] for line in events(there, "started")] == [0, 4]
    if ranks == 1:
        require_same(there, whole)
    assert steps(there) == STEPS


@pytest.mark.rotating
def test_a_run_that_is_stopped_leaves_a_copy_of_its_last_step(machines: Elsewhere) -> None:
    process = start_command(
        *machines.command("one", "stopped", "train.train_iters=4000", "checkpoint.save_interval=4000")
    )
    wait_for_step(process, machines.directory("one", "stopped"), 5)
    process.terminate()
    finish(process, ExitCode.REQUEUE)
    assert copies("stopped") == saved_steps(machines.directory("one", "stopped")) != []


def test_a_store_that_is_away_does_not_stop_a_run(
    machines: Elsewhere, whole: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_after(monkeypatch, 1)
    proxy.fault = lambda method, path: 507 if "step-" in path and method in ("PUT", "POST") else None
    assert machines.train("one", "away") == 0
    run_dir = machines.directory("one", "away")
    failed = events(run_dir, "copy_failed")
    assert failed and all(line["alarm"] for line in failed) and not events(run_dir, "checkpoint_copied")
    assert copies("away") == []
    require_same(run_dir, whole)
    proxy.fault = lambda method, path: None
    assert machines.train("one", "away") == 0  # which has nothing left to train
    assert copies("away") == [STEPS]


def test_a_run_that_cannot_ask_for_its_copies_does_not_start_anew(
    machines: Elsewhere, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machines.train("one", "alone") == 0
    capfd.readouterr()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    give_up_after(monkeypatch, 1)
    assert machines.train("two", "alone") == 2
    require_message(capfd.readouterr().err, "s3://runs/copied/alone", rule="checkpoint.copy_to=null")
    assert machines.train("one", "alone", "train.train_iters=14", "--accept-changes") == 0  # from its own step 12
    assert steps(machines.directory("one", "alone")) == 14


def test_a_run_of_another_recipe_is_not_continued(machines: Elsewhere, capfd: pytest.CaptureFixture[str]) -> None:
    assert machines.train("one", "other") == 0
    capfd.readouterr()
    assert machines.train("two", "other", "optimizer.lr=0.5") == 2
    require_message(capfd.readouterr().err, "s3://runs/copied/other", rule="optimizer.lr")
    assert machines.train("two", "other", "train.train_iters=20") == 2
    require_message(
        capfd.readouterr().err, "s3://runs/copied/other", rule=("scheduler.lr_decay_iters", "--accept-changes")
    )
    assert machines.train("two", "other", "train.train_iters=20", "--accept-changes") == 0
    assert steps(machines.directory("two", "other")) == 20


@pytest.mark.rotating
def test_a_damaged_copy_is_passed_over(machines: Elsewhere, capfd: pytest.CaptureFixture[str]) -> None:
    assert machines.train("one", "damaged") == 0
    *_, before, _ = copies("damaged")  # a checkpoint may have been left out
    s3 = fsspec.filesystem("s3", skip_instance_cache=True)
    (file,) = s3.glob(f"runs/copied/damaged/step-{STEPS:08d}-*/__0_0.distcp")
    content = bytearray(s3.cat_file(file))
    content[len(content) // 2] ^= 0x80
    s3.pipe_file(file, bytes(content))
    capfd.readouterr()
    assert machines.train("two", "damaged") == 0
    assert "ALARM" in capfd.readouterr().err
    there = machines.directory("two", "damaged")
    assert [line["step"] for line in events(there, "started")] == [0, before]
    require_same(there, machines.directory("one", "damaged"))


@pytest.mark.rotating
def test_a_history_that_is_moved_aside_has_no_copies(machines: Elsewhere) -> None:
    assert machines.train("one", "again") == 0
    assert copies("again")[-1] == STEPS
    assert machines.train("one", "again", "--from-scratch", "train.train_iters=4") == 0
    assert copies("again") == [4]
    assert saved_steps(machines.directory("one", "again")) == [4]


@pytest.mark.rotating
def test_a_checkpoint_is_left_out_while_one_is_copied(machines: Elsewhere, proxy: Proxy) -> None:
    """The last one never is."""
    proxy.fault = slow_until_saved(machines.directory("one", "slow"))
    assert machines.train("one", "slow") == 0
    copied = events(machines.directory("one", "slow"), "checkpoint_copied")
    assert [line["step"] for line in copied] == [4, STEPS]
    assert copied[0]["details"]["left_out"] == [8] and copies("slow") == [4, STEPS]


def slow_until_saved(run_dir: Path) -> Callable[[str, str], int | str | None]:
    """A store that takes the first copy only when the last checkpoint is saved."""

    def fault(method: str, path: str) -> int | str | None:
        if method == "PUT" and "step-00000004" in path and STEPS not in saved_steps(run_dir):
            return 503
        return None

    return fault
