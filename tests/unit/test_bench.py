"""`llmrecipes bench` on real ranks over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrecipes.bench.collectives import OPERATIONS, bus_factor
from llmrecipes.cli import run
from llmrecipes.clusters.load import load_profile
from llmrecipes.data.prepare import prepare
from llmrecipes.workflow.bench import sizes
from tests.helpers import tiny_on, write_recipe


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(operation, 8) for operation in ("all_reduce", "all_gather", "send_recv")] == [1.75, 0.875, 1.0]
    assert bus_factor("all_to_all", 2) == bus_factor("reduce_scatter", 2) == 0.5


@pytest.mark.slow
def test_collectives_of_every_group_go_into_a_profile(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensor = {"tensor_model_parallel_size": 2}
    recipe = write_recipe(tiny_on(corpus, parallelism=tensor), tmp_path)
    measured = ["bench", "collectives", recipe, "--nproc", "4", "--sizes", "1KiB,64KiB", "--repeats", "2", "--json"]
    assert run([*measured, "--cluster", "laptop", "--write", "mine.yaml"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["backend"], answer["world_size"]) == ("gloo", 4)
    found = {(row["operation"], row["group"], row["ranks"], row["bytes"]) for row in answer["rows"]}
    groups = (("tensor", 2), ("data", 2), ("world", 4))
    assert found == {(op, *group, size) for op in OPERATIONS for group in groups for size in (1024, 65536)}
    for row in answer["rows"]:
        speed = row["bytes"] / row["seconds"] / 1e9 * bus_factor(row["operation"], row["ranks"])
        assert row["bus_gb_per_s"] == pytest.approx(speed)
    profile = load_profile("mine.yaml")
    assert (profile.name, profile.cpu_cores) == ("mine", load_profile("laptop").cpu_cores)
    assert len(profile.measured) == len(answer["rows"])


@pytest.mark.slow
def test_steps_and_reading(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_on(corpus)
    name, data_dir = write_recipe(recipe, tmp_path), tmp_path / "data"
    assert run(["bench", "step", name, "--nproc", "2", "--repeats", "3", "--json"]) == 0
    step = json.loads(capfd.readouterr().out)
    assert (step["world_size"], step["layout"]["data_parallel_size"], len(step["seconds"])) == (2, 2, 3)
    assert step["tokens_per_second"] > 0
    assert step["mfu"] is None
    assert run(["bench", "data", name, "--data-dir", str(data_dir)]) == 2
    assert "not prepared" in capfd.readouterr().err
    prepare(recipe, data_dir)
    assert run(["bench", "data", name, "--data-dir", str(data_dir), "--repeats", "4", "--json"]) == 0
    reading = json.loads(capfd.readouterr().out)
    assert len(reading["seconds"]) == 4
    assert reading["tokens_per_batch"] == recipe.train.global_batch_size * recipe.model.seq_length


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["collectives", "--sizes", "3 apples"], "--sizes"),
        (["collectives", "--write", "x.yaml"], "--write"),
        (["step", "gpt-tiny-3d", "--nproc", "6"], "6 ranks"),
        (["step", "no-such"], "no-such"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    printed = capsys.readouterr().err
    assert named in printed
    assert "Traceback" not in printed


def test_sizes() -> None:
    assert sizes("512,4KiB, 2MiB,1gib") == (512, 4096, 2 << 20, 1 << 30)
