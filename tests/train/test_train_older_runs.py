"""Runs, prepared data and an exported folder that llmrecipes made with Python 3.11 and megatron-core 0.16.1.

tests/golden/runs-of-megatron-core-0.16.tar.xz has runs of six steps without their second half: a mixture over two
expert-parallel ranks, a dense model over two data-parallel ranks with either engine, and an adapter; beside each, the
metrics of the whole run.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli.app import run

ARCHIVE = Path(__file__).parents[1] / "golden" / "runs-of-megatron-core-0.16.tar.xz"
ZERO = pytest.param(
    "dense",
    "zero",
    "2",
    ["layout.engine=deepspeed", "layout.zero={stage: 2}"],
    marks=[pytest.mark.deepspeed, pytest.mark.slow],
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (made,) = tmp_path.iterdir()
    # The adapter's run names its base by the path that it had.
    place = made / "runs" / "tuned" / "lora" / "pretrained.json"
    base = {**json.loads(place.read_text("utf-8")), "pinned": str(made / "dense-hf")}
    place.write_text(json.dumps(base), "utf-8")
    monkeypatch.chdir(made)
    return made


def curve(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    names = ("step", "loss", "grad_norm", "lr", "consumed_samples", "valid_loss")
    return [{name: row[name] for name in names if name in row} for row in rows if "event" not in row]


@pytest.mark.parametrize(
    ("recipe", "run_id", "ranks", "changes"),
    [
        pytest.param("stored", "moe", "2", ["layout.expert_model_parallel_size=2"], marks=pytest.mark.rotating),
        ("dense", "dense", "2", []),
        ("tuned", "lora", "1", []),
        ZERO,
    ],
    ids=["experts", "dense", "adapter", "ZeRO"],
)
def test_it_goes_on_as_if_never_interrupted(
    folder: Path, recipe: str, run_id: str, ranks: str, changes: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    prepared = {path: path.stat().st_mtime_ns for path in (folder / "data").rglob("[!.]*") if path.is_file()}
    command = ["train", f"{recipe}.yaml", "--run-id", run_id, "--nproc", ranks, "--no-sample", *changes]
    assert run(command) == 0, capfd.readouterr().err
    got, whole = (
        curve(folder / name) for name in (f"runs/{recipe}/{run_id}/metrics.jsonl", f"uninterrupted-{run_id}.jsonl")
    )
    assert got == [pytest.approx(row, rel=1e-6) for row in whole], "what 0.16.1 computed"
    assert {path: path.stat().st_mtime_ns for path in prepared} == prepared, "the data was not prepared again"


def test_its_exported_folder_is_still_a_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "one.jsonl").write_text(json.dumps({"text": "w1 w2 w3 w4"}) + "\n")
    assert run(["eval", "dense-hf", "--data", "jsonl:one.jsonl", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)["results"][0]["metrics"]
    assert 0 < result["loss"] < 8
