"""A run goes on with the other engine: recipe, checkpoint and metrics of the new run, refusals, and its loss curve."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli.app import run
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import load, recipe_hash, to_yaml
from llmrecipes.recipe.schema import Recipe
from tests.helpers import lines, tiny, tiny_on, train_lines, write_recipe
from tests.refusals import require_message

STEP = 4


def make_run(runs: Path, recipe: Recipe) -> Path:
    """A run of six steps with a checkpoint of the fourth, whose content is not that of an engine."""
    folder = runs / recipe.name / "old"
    store = CheckpointStore(folder / "checkpoints")
    temporary = store.temporary(STEP)
    (temporary / "__0_0.distcp").write_bytes(b"weights" * 1000)
    info = CheckpointInfo(
        step=STEP,
        consumed_samples=32,
        consumed_tokens=2048,
        layout={"tensor_model_parallel_size": 2, "world_size": 2},
        recipe_hash=recipe_hash(recipe),
        engine=engine_name(recipe),
        recipe=recipe.model_dump(mode="json"),
    )
    store.publish(temporary, info, versions={"torch": "2"})
    steps = [json.dumps({"step": step, "loss": 1.0, "grad_norm": 1.0}) for step in range(1, 7)]
    (folder / "metrics.jsonl").write_text("\n".join(steps) + "\n", "utf-8")
    (folder / "recipe.yaml").write_text(to_yaml(recipe), "utf-8")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def convert(old: Path, *arguments: str) -> int:
    return run(["convert", str(old), *arguments, "--run-id", "new", "--runs-dir", str(old.parents[1])])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs", tiny())


def test_the_new_run_has_the_checkpoint_under_its_own_manifest(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(old)
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=3", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    new = old.parent / "new"
    assert content(old) == before
    assert made["run_dir"] == str(new) and made["linked"]
    assert (made["step"], made["from_engine"], made["engine"], made["zero_stage"]) == (STEP, "megatron", "deepspeed", 3)
    assert json.loads((new / "converted.json").read_bytes()) == made
    recipe = load(str(new / "recipe.yaml")).recipe
    assert recipe.layout.zero is not None
    assert (recipe.layout.engine, recipe.layout.zero.stage) == ("deepspeed", 3)
    entry = CheckpointStore(new / "checkpoints").latest_valid()
    (source,) = CheckpointStore(old / "checkpoints").entries()
    assert entry is not None
    assert (entry.step, entry.manifest.engine, entry.manifest.recipe_hash) == (STEP, "deepspeed", recipe_hash(recipe))
    for name in ("files", "layout", "versions", "consumed_samples", "consumed_tokens"):
        assert getattr(entry.manifest, name) == getattr(source.manifest, name), name
    assert entry.manifest.recipe == recipe.model_dump(mode="json")
    assert (entry.path / "__0_0.distcp").samefile(source.path / "__0_0.distcp")
    # The curve up to the checkpoint, and where it is from.
    assert [line["step"] for line in train_lines(new)] == [1, 2, 3, 4]
    assert lines(new)[-1]["event"] == "converted"
    assert json.loads((new / "status.json").read_bytes())["checkpoint"] == STEP


def test_the_command_that_resumes_is_printed(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=2") == 0
    new = old.parent / "new"
    assert f"llmrecipes train {new}/recipe.yaml --run-id new --runs-dir {old.parents[1]}" in capsys.readouterr().out


def test_megatron_takes_no_section_zero_along(tmp_path: Path) -> None:
    recipe = tiny(layout={"zero": {"stage": 3, "sub_group_size": 1000, "offload_optimizer": "cpu"}})
    old = make_run(tmp_path / "runs", recipe)
    assert convert(old, "--to", "megatron") == 0
    made = load(str(old.parent / "new" / "recipe.yaml")).recipe
    assert made.layout.zero is None and engine_name(made) == "megatron"
    assert made.layout.use_distributed_optimizer


def test_the_same_engine_at_another_stage(tmp_path: Path) -> None:
    old = make_run(tmp_path / "runs", tiny(layout={"zero": {"stage": 2}}))
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=3") == 0
    zero = load(str(old.parent / "new" / "recipe.yaml")).recipe.layout.zero
    assert zero is not None and zero.stage == 3


def test_another_file_system_has_a_copy(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=2") == 0
    entry = CheckpointStore(old.parent / "new" / "checkpoints").latest_valid()
    assert entry is not None
    source = CheckpointStore(old / "checkpoints").path(STEP)
    assert not (entry.path / "__0_0.distcp").samefile(source / "__0_0.distcp")
    assert not json.loads((old.parent / "new" / "converted.json").read_bytes())["linked"]


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        (["--to", "apex"], "--to", ()),
        (["--to", "deepspeed"], "layout.zero", "layout.zero.stage=2"),
        (["--to", "megatron"], "old", "layout.zero.stage=3"),
        (["--to", "deepspeed", "layout.zero.stage=2", "layout.engine=megatron"], "layout.engine", ()),
        (["--to", "deepspeed", "layout.zero.stage=2", "optimizer.lr=1"], "old", "optimizer.lr"),
        (["--to", "deepspeed", "layout.zero.stage=2", "train.train_iters=99"], "old", "train.train_iters"),
        (["--to", "deepspeed", "layout.zero.stage=2", "layout.pipeline_model_parallel_size=2"], "layout.zero.stage",
         ()),
    ],
)  # fmt: skip
def test_a_refusal_leaves_nothing_behind(
    old: Path, arguments: list[str], where: str, rule: str | tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(old.parents[1])
    assert convert(old, *arguments) == 2
    require_message(capsys.readouterr().err, where, rule=rule)
    assert content(old.parents[1]) == before
    assert not (old.parent / "new").exists()


def test_a_run_id_in_use_is_refused(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=2") == 0
    before = content(old.parents[1])
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=3") == 2
    require_message(capsys.readouterr().err, old.parent / "new", rule="--run-id")
    assert content(old.parents[1]) == before


def test_a_run_without_a_valid_checkpoint_is_refused(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = CheckpointStore(old / "checkpoints").path(STEP) / "__0_0.distcp"
    file.write_bytes(b"changed" * 1000)
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=2") == 93
    require_message(capsys.readouterr().err, old, rule="step-00000004")
    file.parent.rename(old / "elsewhere")
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=2") == 2
    require_message(capsys.readouterr().err, old / "checkpoints")
    assert not (old.parent / "new").exists()


def test_a_full_disk_leaves_nothing_behind(
    old: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "publish", full)
    assert convert(old, "--to", "deepspeed", "layout.zero.stage=2") == 2
    require_message(capsys.readouterr().err, old.parent / "new")
    assert not (old.parent / "new").exists()


@pytest.mark.slow
@pytest.mark.deepspeed
def test_the_loss_curve_does_not_depend_on_conversions(
    corpus: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four steps by megatron, four by DeepSpeed, four by megatron again; against twelve by megatron."""
    runs = tmp_path / "runs"
    folders = ["--runs-dir", str(runs), "--data-dir", str(data_dir)]

    def train(recipe: str, run_id: str, steps: int, *more: str) -> None:
        length = [f"train.train_iters={steps}", "scheduler.lr_decay_iters=12"]
        assert run(["train", recipe, *length, *more, "--run-id", run_id, "--nproc", "1", "--no-sample", *folders]) == 0

    def converted(run_id: str, to: str, *overrides: str) -> str:
        command = ["convert", f"tiny/{run_id}", "--to", to, *overrides, "--run-id", to, "--runs-dir", str(runs)]
        assert run(command) == 0
        return str(runs / "tiny" / to / "recipe.yaml")

    recipe = write_recipe(tiny_on(corpus), tmp_path)
    train(recipe, "whole", 12)
    train(recipe, "first", 4)
    train(converted("first", "deepspeed", "layout.zero.stage=2"), "deepspeed", 8)
    train(converted("deepspeed", "megatron"), "megatron", 12)
    whole, parts = train_lines(runs / "tiny/whole"), train_lines(runs / "tiny/megatron")
    assert [line["step"] for line in parts] == list(range(1, 13))
    for key in ("loss", "grad_norm", "lr", "consumed_samples"):
        assert [line[key] for line in parts] == pytest.approx([line[key] for line in whole], rel=1e-5), key
    assert not [line for line in lines(runs / "tiny/megatron") if line.get("event") == "metrics_damaged"]
    # The same run may change its engine too; it is said once.
    capsys.readouterr()
    train(recipe, "first", 6, "layout.zero.stage=2")
    said = [line for line in "".join(capsys.readouterr()).splitlines() if "saved by engine megatron" in line]
    assert len(said) == 1 and "step-00000004" in said[0] and "deepspeed" in said[0]
