"""`plan` over machines and numbers of GPUs: what-if, scaling curves, and a search whose winner was dry run."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from llmrecipes.cli.app import run
from llmrecipes.hardware.load import load_profile
from llmrecipes.plan.speed.curve import curve
from llmrecipes.recipe.load import load
from llmrecipes.workflow.whatif import CHINCHILLA
from tests.refusals import require_message


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert run(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.rotating
def test_what_if_compares_machines_and_names_the_cheapest_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["gpt-7b", "--what-if", "--clusters", "h100-ib,a100-roce", "--gpus", "32,64"]
    asked += ["--usd-per-gpu-hour", "h100-ib=3,a100-roce=1", "--tokens", "1e11"]
    made = shown(capsys, *asked)
    assert len(made["options"]) == 4 and made["tokens"] == 1e11
    for row in made["options"]:
        hours = 1e11 / row["tokens_per_second_per_gpu"] / 3600
        assert row["gpu_hours"] >= hours * 0.999 and row["gpu_hours"] == pytest.approx(hours, rel=0.02)
        assert row["days"] == pytest.approx(row["gpu_hours"] / 24 / row["gpus"])
        assert row["cost_usd"] == pytest.approx(row["gpu_hours"] * {"h100-ib": 3, "a100-roce": 1}[row["cluster"]])
    costs = {row["cost_usd"]: row for row in made["options"]}
    assert made["best"] == costs[min(costs)] and made["best"]["in_time"] is None

    days = sorted(row["days"] for row in made["options"])
    date = datetime.now(UTC) + timedelta(days=days[0] + 1)
    hurried = shown(capsys, *asked, "--by", date.date().isoformat())
    assert hurried["best"]["days"] <= days[0] + 1
    assert [row["in_time"] for row in hurried["options"]].count(True) < 4
    assert run(["plan", *asked, "--by", "2020-01-01"]) == 2
    require_message(capsys.readouterr().err, "--by", rule="2020-01-01")


def test_a_loss_is_reached_by_the_law_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["gpt-7b", "--what-if", "--clusters", "h100-ib", "--gpus", "32"]
    made = shown(capsys, *asked, "--loss", "2.1")
    size = shown(capsys, "gpt-7b", "--cluster", "h100-ib", "--gpus", "32")["num_parameters"]
    assert made["loss"] == pytest.approx(2.1) and CHINCHILLA.loss(size, made["tokens"]) == pytest.approx(2.1)
    assert "Hoffmann" in made["law"]["source"] and made["law"]["alpha"] == 0.34
    assert run(["plan", *asked, "--loss", "1.7"]) == 2
    require_message(capsys.readouterr().err, "--loss", rule=f"{CHINCHILLA.loss(size, float('inf')):.4g}")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("--loss", "2"), "--loss"),
        (("--what-if", "--search"), "--search"),
        (("--what-if", "--loss", "2", "--tokens", "1e9"), "--loss"),
        (("--what-if", "--usd-per-gpu-hour", "elsewhere=2"), "--usd-per-gpu-hour"),
        (("--what-if", "--usd-per-gpu-hour", ""), "--usd-per-gpu-hour"),
        (("--what-if", "--clusters", "laptop"), "--clusters"),
        (("--what-if", "--clusters", ""), "''"),
        (("--what-if", "--clusters", "h100-ib", "--cluster", "h200-ib"), "--clusters"),
        (("--what-if", "--nodes", "4"), "--nodes"),
        (("--what-if", "--loss", "1e9"), "--loss"),
        (("--cluster", "h100-ib", "--search", "--plot", "plan.svg"), "--plot"),
        (("--cluster", "h100-ib", "--scaling-curve", "curve.svg", "--write", "x.yaml"), "--write"),
        (("--calibration", "--gpus", "8"), "--gpus"),
        (("--what-if", "--gpus", "8,many"), "--gpus"),
        (("--cluster", "h100-ib", "--gpus", "8,16"), "--gpus"),
        (("--cluster", "h100-ib", "--gpus", "9" * 5000), "--gpus"),
        (("--cluster", "h100-ib", "--dryrun"), "--dryrun"),
        (("--cluster", "h100-ib", "--scaling-curve", "curve.pdf"), "--scaling-curve"),
        (("--scaling-curve", "curve.svg"), "--cluster"),
    ],
)
def test_what_goes_together(arguments: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "gpt-7b", *arguments]) == 2
    require_message(capsys.readouterr().err, where)


def test_weak_scaling_keeps_the_work_of_a_gpu() -> None:
    points = curve(load("gpt-7b", []).recipe, load_profile("h100-ib"), 32, (16, 32, 64))
    batches = {(point.kind, point.gpus): point.global_batch_size for point in points}
    batch = load("gpt-7b", []).recipe.train.global_batch_size
    assert {batches["strong", gpus] for gpus in (16, 32, 64)} == {batch}
    assert [batches["weak", gpus] for gpus in (16, 32, 64)] == [batch // 2, batch, batch * 2]
    speeds = {(point.kind, point.gpus): point.as_dict()["tokens_per_second_per_gpu"] for point in points}
    assert speeds["strong", 32] == speeds["weak", 32]
    assert speeds["strong", 64] <= speeds["weak", 64]


def test_a_curve_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrecipes.plan.speed.curve.COUNTS", (8, 16))
    path = tmp_path / "curve.svg"
    rows = shown(capsys, "gpt-7b", "--cluster", "h100-ib", "--scaling-curve", str(path))
    assert [(row["kind"], row["gpus"]) for row in rows] == [(k, n) for k in ("strong", "weak") for n in (8, 16)]
    root = ElementTree.fromstring(path.read_text("utf-8"))  # noqa: S314 - our own text
    texts = {"".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"GPUs", "strong scaling", "weak scaling"} <= texts


@pytest.mark.slow
def test_the_winner_of_a_search_was_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.num_layers=4", "train.global_batch_size=32"]
    rows = shown(capsys, "gpt-1b", *small, "--cluster", "h100-ib", "--nodes", "1", "--search", "--dryrun")
    winner = rows[0]["dryrun"]
    assert winner["fits"] and winner["peak_gib"] == pytest.approx(rows[0]["memory_gib"]["max"], rel=0.1)
    assert winner["seconds"] > 0 and all(row["dryrun"] is None for row in rows[1:])
