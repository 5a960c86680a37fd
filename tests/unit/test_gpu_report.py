"""`python -m lab gpu-report` with tiny models on a CPU, and its pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lab.__main__ import run
from lab.gpu_report import parity, right
from lab.gpu_report.items import ITEMS, Planned, gpu_report
from lab.gpu_report.parity import recipe_of
from lab.gpu_report.report import ROWS, Row, append, page, read
from lab.gpu_report.worker import BIG, DEPTHS, FOLDER, STEPS, WARMUP, Item, cut, offloaded, whole
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOMY


@pytest.mark.rotating
def test_what_does_not_fit_the_budget_is_skipped_and_measured_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.gpu_report.items.ITEMS", ITEMS[:1])
    command = ["gpu-report", "right", "--device", "cpu", "--out", str(tmp_path)]
    assert run([*command, "--budget", "60"]) == 0
    (skipped,) = read(tmp_path)
    assert (skipped.status, skipped.item) == ("skipped", "parity")
    assert run([*command, "--budget", "500"]) == 0
    rows = read(tmp_path)
    assert [row.quantity for row in rows] == [*parity.MODELS, "time"]
    assert not any(row.off for row in rows)
    lines = (tmp_path / ROWS).read_text("utf-8").splitlines()
    assert len(lines) == 1 + len(rows)
    for name in ("report.md", "report.html"):
        assert all(model in (tmp_path / name).read_text("utf-8") for model in parity.MODELS)
    assert run([*command, "--budget", "500"]) == 0  # nothing is left to measure
    assert (tmp_path / ROWS).read_text("utf-8").splitlines() == lines
    capsys.readouterr()


def test_a_result_that_is_off_is_flagged_and_a_cut_line_is_ignored(tmp_path: Path) -> None:
    near = Row(stage="fast", item="model", quantity="memory", value=1.09, unit="GiB", expected=1.0)
    far = near.model_copy(update={"quantity": "speed", "value": 0.89})
    wrong = Row(stage="right", item="parity", quantity="gpt", value=float("nan"), limit=1e-4, note="<b>")
    for row in (near, far, wrong):
        append(tmp_path, row, ["an H200"])
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"stage": "fa')
    assert [row.off for row in read(tmp_path)] == [False, True, True]
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "OFF -11%" in text and "an H200" in text
    assert "&lt;b&gt;" in page([wrong], []) and "<b>" not in page([wrong], []).partition("right:")[2]


def test_a_gradient_that_differs_is_seen() -> None:
    golden = parity.goldens()["llama"]
    assert parity.difference(golden, golden)[0] == 0
    wrong = json.loads(json.dumps(golden))
    name = next(iter(wrong["gradients"]))
    wrong["gradients"][name][1] += 0.01 * wrong["gradients"][name][0]  # the same norm, another direction
    apart, where = parity.difference(wrong, golden)
    assert apart > parity.LIMITS["fp32"] and name in where


@pytest.mark.parametrize("gpu", ["h100-ib", "h200-ib"])
@pytest.mark.parametrize("name", BIG)
def test_large_models_fit_on_one_gpu_at_both_depths(name: str, gpu: str) -> None:
    site = machine(load_profile(gpu), 1)
    plans = [derive(cut(name, depth, "cuda"), 1, site) for depth in DEPTHS]
    assert plans[0].num_parameters.total < plans[1].num_parameters.total
    for plan in (*plans, derive(whole("gpt-1b", "cuda"), 1, site)):
        assert plan.memory.total < 0.95 * plan.memory_capacity_bytes


def test_items_run_as_ranks_do_on_one_gpu_and_in_the_order_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, dict[str, str]]] = []

    def measured(
        item: Planned, _folder: Path, _device: str, environment: dict[str, str], _left: float
    ) -> Iterator[Row]:
        started.append((item.name, environment))
        yield Row(stage=item.stage, item=item.name, quantity="time", value=1.0, unit="s")

    monkeypatch.setattr("lab.gpu_report.items.detect", lambda: machine(load_profile("h100-ib"), 1))
    monkeypatch.setattr("lab.gpu_report.items.find_spec", lambda _name: None)
    monkeypatch.setattr("lab.gpu_report.items.compiler_obstacle", lambda _device: None)
    monkeypatch.setattr("lab.gpu_report.items._measured", measured)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    rows = gpu_report(["compiled gpt-1b", "breaks", "saves", "fp8"], tmp_path, 900, "cuda", lambda _line: None)
    assert [name for name, _ in started] == ["compiled gpt-1b", "breaks", "saves gpt-125m", "saves gpt-1b"]
    assert {environment["CUDA_VISIBLE_DEVICES"] for _, environment in started} == {"3"}
    assert {environment["PYTORCH_ALLOC_CONF"] for _, environment in started} == {"expandable_segments:True"}
    assert rows[-1].item == "scalings llama3-8b" and "transformer_engine" in rows[-1].note


def test_what_a_rank_lacks_of_the_plan_is_not_measured_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TransformerEngine some fusions that the plan of a GPU has are off, so there is nothing to switch."""
    measured: list[Recipe] = []

    def speed(item: Item, recipe: Recipe, _suffix: str, median: list[float]) -> Iterator[Row]:
        measured.append(recipe)
        if recipe.layout.bias_activation_fusion is False:
            raise UserError("no", where="layout.bias_activation_fusion", rule="not here")
        median.append(1.0)
        yield item.row("step", 1e3, "ms")

    monkeypatch.setattr("lab.gpu_report.worker.detect", lambda: machine(load_profile("h100-ib"), 1))
    monkeypatch.setattr("llmrecipes.engine.core.model.gpt.compiler_obstacle", lambda _device: None)
    monkeypatch.setattr(Item, "_speed", speed)
    rows = {row.quantity: row for row in Item("big", "fusions mixtral-8x7b", "cuda").rows()}
    assert len(measured) < 6
    for fusion in ("gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion"):
        assert "TransformerEngine" in rows[f"step without {fusion}"].note
        assert f"what {fusion} gives" not in rows
    assert all(row.value is None or row.value == row.value for row in rows.values())


def test_a_save_that_fails_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ends no training, but a report would take the time to the error for that of writing."""

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr("llmrecipes.engine.core.checkpoint.format.write_file", full)
    with pytest.raises(RuntimeError, match="No space left"):
        list(Item("state", "saves gpt-125m", "cpu").rows())


def test_a_checkpoint_is_deleted_before_the_next_because_a_small_disk_has_no_room_for_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    publish = CheckpointStore.publish

    def counted(store: CheckpointStore, *args: Any, **options: Any) -> Any:
        seen.append(len(store.entries()))
        return publish(store, *args, **options)

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(CheckpointStore, "publish", counted)
    rows = {row.quantity: row for row in Item("state", "saves gpt-125m", "cpu").rows()}
    assert rows["load"].value and seen == [0, 0, 0]


def test_a_stage_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu-report", "slow", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "STAGE" in capsys.readouterr().err


def test_another_loop_is_measured_beside_the_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda module, **_options: module)
    append(tmp_path, Row(stage="fast", item="gemm", quantity="products", value=0.1, unit="TFLOP/s"), [])
    rows = {row.quantity: row for row in Item("fast", "plain gpt-125m", "cpu").rows()}
    step, speed, share = (rows[name] for name in ("step", "speed", "share of measured products"))
    assert step.value and speed.value and share.value
    tokens = step.value * speed.value / 1e3
    recipe = whole("gpt-125m", "cpu")
    assert tokens == pytest.approx(recipe.train.global_batch_size * recipe.model.seq_length)
    flops = derive(recipe, 1, ROOMY).flops_per_token_causal
    assert share.value == pytest.approx(100 * speed.value * flops / 0.1e12)
    assert speed.expected is None  # the aim is this project's
    assert WARMUP + STEPS < 20


def test_a_loop_that_is_not_installed_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.gpu_report.items.find_spec", lambda _name: None)
    assert run(["gpu-report", "fast", "--device", "cpu", "--out", str(tmp_path), "--budget", "20"]) == 0
    notes = {row.item: row.note for row in read(tmp_path)}
    assert "transformers" in notes["hf-trainer gpt-125m"] and "torchtitan" in notes["torchtitan gpt-1b"]
    assert "s left" in notes["model gpt-125m"]
    capsys.readouterr()


def test_the_optimizer_of_the_measured_offload_is_in_the_hosts_memory() -> None:
    h200 = machine(load_profile("h200-ib"), 1)
    recipes = [offloaded("gpt-125m", "cuda", where) for where in ("none", "cpu")]
    assert not [problem for recipe in recipes for problem in check(recipe)]
    there, here = (derive(recipe, 1, h200).memory for recipe in recipes)
    assert here.host > 0 == there.host and here.optimizer < there.optimizer


@pytest.mark.slow
def test_a_killed_run_goes_on_and_checkpoints_cross(tmp_path: Path) -> None:
    rows = {row.quantity: row for row in right.resume(Item("right", "resume", "cpu").row, "cpu")}
    assert len(rows) == 4 and not any(row.off for row in rows.values())
    assert "resumed at 2" in rows["loss after a kill"].note


def test_a_checkpoint_with_other_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(folder: Path, _steps: int, place: str, kill_after: int | None = None) -> dict[str, Any]:
        losses = [1.0] * (right.STEPS if folder.name == "whole" else 2)
        loaded = {"a": (1.0, 2.0 if place == "cpu" else 2.1)}
        return {"losses": losses, "weights": {"a": (1.0, 2.0)}, "loaded": loaded}

    monkeypatch.setattr(right, "_said", said)
    rows = {row.quantity: row for row in right.resume(Item("right", "resume", "cuda").row, "cuda")}
    assert rows["weights, CPU to cuda"].off and not rows["weights, cuda to CPU"].off


@pytest.mark.slow
def test_compiled_layers_are_whole_graphs_and_a_dry_run_says_how_often_the_host_waits() -> None:
    item = Item("right", "breaks", "cpu")
    with patch("torch._inductor.compile_fx.compile_fx", side_effect=AssertionError):  # a CPU only traces
        rows = {row.quantity: row for row in right.breaks(item.row, "cpu")}
    assert rows["graph breaks"].value == 0 and rows["graphs"].value
    (waits,) = right.waits(item.row, recipe_of("llama"), "cpu")
    assert waits.status == "skipped" and waits.note.endswith("1 in a dry run")


def test_a_compiled_model_is_measured_with_its_graph_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    def speed(item: Item, recipe: Recipe, suffix: str) -> Iterator[Row]:
        assert recipe.layout.torch_compile
        counters["graph_break"]["a reason\n  with an explanation"] += 2
        yield item.row(f"step{suffix}", 1.0, "ms")

    monkeypatch.setattr(Item, "_speed", speed)
    counters["graph_break"]["of another model"] += 1
    try:
        step, breaks = Item("fast", "compiled gpt-1b", "cuda").rows()
    finally:
        counters.clear()
    assert step.value and (breaks.value, breaks.off, breaks.note) == (2, True, "a reason")


def test_a_fusion_is_measured_the_other_way_and_one_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Recipe] = []

    def speed(_item: Item, recipe: Recipe, _suffix: str, median: list[float]) -> Iterator[Row]:
        measured.append(recipe)
        median.append(1.0 if recipe.layout.bias_activation_fusion is None else 0.8)
        yield Row(stage="big", item="fusions llama3-8b", quantity="step", value=1e3 * median[0], unit="ms")

    monkeypatch.setattr(Item, "_speed", speed)
    rows = {row.quantity: row for row in Item("big", "fusions llama3-8b", "cpu").rows()}
    assert [each.layout.bias_activation_fusion for each in measured] == [None, True, None, None, None]
    assert rows["what bias_activation_fusion gives"].value == pytest.approx(20)
    assert "TransformerEngine" in rows["step without gradient_accumulation_fusion"].note


@pytest.mark.slow
def test_scalings_of_fp8_say_what_they_lack_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu-report", "fp8", "--device", "cpu", "--out", str(tmp_path), "--budget", "500"]) == 0
    rows = {row.quantity: row for row in read(tmp_path)}
    assert rows["step (bf16)"].status == "measured"
    for scaling in ("blockwise", "tensorwise", "mxfp8"):
        row = rows[f"step ({scaling})"]
        assert row.status == "skipped" and "TransformerEngine" in row.note
    capsys.readouterr()
