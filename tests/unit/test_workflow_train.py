"""What users can get wrong around the commands that run something: one message, exit code 2, nothing lost or begun."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.cli import app as cli
from llmrecipes.hardware.cluster import Cluster, DetectedGpu, detect
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.profile import COSTS, Costs
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.runfiles import checked_run_id, new_run_id
from llmrecipes.train import worker
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow import run
from llmrecipes.workflow import train as workflow
from llmrecipes.workflow.start import Machine, PreparedStart, costs
from llmrecipes.workflow.train import one_batch_recipe
from tests.helpers import checkpoint_values, lines, tiny, tiny_on, train_lines, write_recipe
from tests.refusals import refused, require_message

GIB = 1 << 30
LAPTOP = Cluster(gpus=(), cpu_cores=4, memory_bytes=8 * GIB, memory_available_bytes=5 * GIB, disk_free_bytes=100 * GIB)

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `llmrecipes …` with runs/ in this test's folder; exit code and what was printed."""

    def run(*arguments: str, runs_dir: Path = tmp_path / "runs") -> tuple[int, str]:
        code = cli.run([*arguments, "--runs-dir", str(runs_dir), "--data-dir", str(data_dir)])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return run


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- refused before anything is begun ----------------------------------------------------------------------------------


def test_a_recipe_that_cannot_fit_starts_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "detect", lambda: LAPTOP)
    code, printed = command("train", "gpt-1b")
    assert code == 2
    require_message(printed, "recipe gpt-1b", rule=("5.0 GiB", "RECIPE=gpt-1b"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        (["train", "gpt-tinny"], "gpt-tinny", "gpt-tiny"),
        (["train", "gpt-tiny", "layout.micro_batch_size=3"], "train.global_batch_size", "micro_batch_size 3"),
        (["train", "gpt-tiny", "--nproc", "3"], "train.global_batch_size", "3"),
        (["train", "gpt-tiny", "--nproc", "0"], "--nproc", "0"),
        (["train", "gpt-tiny", "--run-id", "../escape"], "--run-id", "'../escape'"),
        (["train", "gpt-tiny", "--run-id", ""], "--run-id", "''"),
        (["train", "gpt-tiny", "--profile", "-1"], "--profile", ()),
        (["smoke", "no-such-recipe"], "no-such-recipe", ()),
        (["generate", "no-such-run"], "runs", "no-such-run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_user_error_is_reported_and_nothing_is_started(
    command: Command, tmp_path: Path, arguments: list[str], where: str, rule: str | tuple[str, ...]
) -> None:
    code, printed = command(*arguments)
    assert code == 2
    require_message(printed, where, rule=rule)
    assert not list(tmp_path.rglob("*"))


def test_a_missing_source_is_named(command: Command, tmp_path: Path) -> None:
    code, printed = command("train", write_recipe(tiny_on(tmp_path / "nothing-here"), tmp_path))
    assert code == 2
    require_message(printed, "data.sources", rule="nothing-here")
    assert not train_lines(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.name in ("recipe.yaml", "metrics.jsonl", "checkpoints")]
    assert not (tmp_path / "runs").exists()


def test_a_runs_directory_that_is_a_file_is_refused(command: Command, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, printed = command("train", write_recipe(tiny_on(corpus), tmp_path), runs_dir=tmp_path / "file")
    assert code == 2
    require_message(printed, tmp_path / "file", rule="--runs-dir")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]  # rights do not bind root
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"root needs mount(8) for a read-only directory: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_directory_that_cannot_be_written_is_refused(
    command: Command, corpus: Path, tmp_path: Path, read_only: Path
) -> None:
    code, printed = command("train", write_recipe(tiny_on(corpus), tmp_path), runs_dir=read_only / "runs")
    assert code == 2
    require_message(printed, read_only, rule="--runs-dir")


# -- around a run that is there ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, data_dir: Path) -> Path:
    """A folder with a recipe and its run `runs/tiny/first`."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(tiny_on(corpus), folder)
    paths = ["--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir)]
    assert cli.run(["train", recipe, "--run-id", "first", "--no-sample", *paths]) == 0
    return folder


def test_the_plan_knows_the_bytes_of_a_checkpoint(trained: Path) -> None:
    run_dir = trained / "runs" / "tiny" / "first"
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    planned = json.loads((run_dir / "plan.json").read_text())["checkpoint_bytes"]
    tensors = {name: value for name, value in checkpoint_values(checkpoint).items() if isinstance(value, torch.Tensor)}
    held = sum(value.nbytes for name, value in tensors.items() if not name.startswith("random."))
    assert held == pytest.approx(planned, rel=0.001)


def test_the_run_of_another_recipe_is_refused_with_a_diff(command: Command, trained: Path) -> None:
    before = everything_in(trained / "runs")
    code, printed = command(
        "train", str(trained / "tiny.yaml"), "model.hidden_size=128", "optimizer.lr=2e-3", "train.eval_iters=3",
        "--run-id", "first", runs_dir=trained / "runs",
    )  # fmt: skip
    assert code == 2
    run_dir = trained / "runs" / "tiny" / "first"
    require_message(printed, run_dir, rule=("model.hidden_size:", "64", "128", "optimizer.lr:", "0.001", "0.002"))
    assert "eval_iters" not in printed
    assert everything_in(trained / "runs") == before


def test_a_run_whose_recipe_is_gone_is_still_protected_by_its_checkpoint(
    command: Command, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["cp", "-r", str(trained / "runs"), str(tmp_path / "runs")], check=True)
    copy = tmp_path / "runs" / "tiny" / "first"
    (copy / "recipe.yaml").unlink()
    checkpoints = everything_in(copy / "checkpoints")
    code, printed = command("train", str(trained / "tiny.yaml"), "model.hidden_size=128", "--run-id", "first")
    assert code == 2
    require_message(printed, copy, rule=("model.hidden_size:", "64", "128"))
    # Checkpoints of older versions do not know their recipe, only their tensors.
    monkeypatch.setattr(run, "require_same_recipe", lambda *_, **__: None)
    code, printed = command("train", str(trained / "tiny.yaml"), "model.hidden_size=128", "--run-id", "first")
    assert code == 2
    require_message(printed, "step-00000012", rule="recipe.yaml")
    assert everything_in(copy / "checkpoints") == checkpoints


def test_truncated_tokens_are_reported_before_the_first_step(
    command: Command, corpus: Path, tmp_path: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tiny_on(corpus), tmp_path)
    own = tmp_path / "data"
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(own)]
    assert cli.run(["prepare", recipe, "--data-dir", str(own)]) == 0
    tokens = next(own.rglob("*train*.bin"))
    tokens.write_bytes(tokens.read_bytes()[:-100])
    assert cli.run(["train", recipe, "--run-id", "r", *paths]) == 2
    require_message(capfd.readouterr().err, tokens)
    assert not lines(tmp_path / "runs" / "tiny" / "r")


def test_generate_continues_a_prompt_num_samples_times(
    trained: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def texts(*more: str) -> list[str]:
        arguments = ["generate", "first", "--prompt", "word", "--max-new-tokens", "12", "--num-samples", "2", *more]
        assert cli.run([*arguments, "--json", "--runs-dir", str(trained / "runs"), "--data-dir", str(data_dir)]) == 0
        captured = capfd.readouterr()
        assert not captured.err
        samples = [json.loads(line) for line in captured.out.splitlines()]
        assert all(sample["prompt"] == "word" and sample["tokens"] <= 12 for sample in samples)
        return [sample["text"] for sample in samples]

    assert len({*texts(), *texts(), *texts("--seed", "5")}) == 4


def test_generate_reads_a_run_with_zero_where_deepspeed_is_missing(
    trained: Path, data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "llmrecipes.engine.requirements.find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    first, runs = trained / "runs/tiny/first", ["--runs-dir", str(tmp_path)]
    sharded = [
        "layout.zero.stage=3",
        "layout.zero.zero_hpz_partition_size=8",
        "layout.zero.offload_optimizer=nvme",
        "layout.zero.nvme_path=/not/here",
    ]
    assert cli.run(["convert", str(first), "--to", "deepspeed", *sharded, "--run-id", "zero", *runs]) == 0
    capfd.readouterr()
    texts = []
    for folder in (first, tmp_path / "tiny/zero"):
        arguments = ["--prompt", "word", "--max-new-tokens", "12", "--json", "--data-dir", str(data_dir)]
        assert cli.run(["generate", str(folder), *arguments]) == 0
        texts.append(json.loads(capfd.readouterr().out)["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "where", "rule"),
    [
        (["--prompt", ""], "--prompt", "0"),
        (["--prompt", "word " * 500], "--prompt", "64"),
        (["--temperature", "-1"], "--temperature", "-1.0"),
        (["--top-p", "0"], "--top-p", "0.0"),
    ],
    ids=["empty", "too long", "temperature", "top-p"],
)
def test_generate_refuses_what_it_cannot_continue(
    command: Command, trained: Path, options: list[str], where: str, rule: str
) -> None:
    code, printed = command("generate", "first", *options, runs_dir=trained / "runs")
    assert code == 2
    require_message(printed, where, rule=rule)


def test_generate_without_a_checkpoint_explains_how_to_get_one(command: Command, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny" / "empty"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_bytes((trained / "runs/tiny/first/recipe.yaml").read_bytes())
    code, printed = command("generate", "tiny/empty")
    assert code == 2
    require_message(printed, run / "checkpoints", rule="--run-id empty")


def test_generate_refuses_a_model_that_is_larger_than_the_memory_here(
    command: Command, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 20, memory_available_bytes=1000, disk_free_bytes=1 << 30)
    monkeypatch.setattr("llmrecipes.workflow.generate.detect", lambda: small)
    code, printed = command("generate", str(trained / "runs/tiny/first"))
    assert code == 2
    require_message(printed, "recipe tiny", rule="MiB")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_id", ["", ".hidden", "-x", "a/b", "..", "a b", "ü", "x" * 65, "a\n"])
def test_run_ids_that_are_no_safe_directory_are_refused(run_id: str) -> None:
    with refused("--run-id"):
        checked_run_id(run_id)


def test_new_run_ids_are_safe_and_do_not_meet() -> None:
    ids = [new_run_id() for _ in range(20)]
    assert len(set(ids)) == 20
    assert [checked_run_id(run_id) for run_id in ids] == ids


def test_a_run_is_found_by_all_its_names(tmp_path: Path) -> None:
    for age, name in enumerate(("one/a", "one/b", "two/b", "two/c")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.yaml").touch()
        os.utime(tmp_path / name / "recipe.yaml", (1000 + age, 1000 + age))
    assert Run.find(str(tmp_path / "two/c"), tmp_path).path == tmp_path / "two/c"
    assert Run.find("two/b", tmp_path).path == tmp_path / "two/b"
    assert Run.find("a", tmp_path).path == tmp_path / "one/a"
    assert Run.find("one", tmp_path).path == tmp_path / "one/b"
    with refused("b", rule=("one/b", "two/b")):
        Run.find("b", tmp_path)
    with refused(tmp_path, rule=("two/d", "two/c")):
        Run.find("two/d", tmp_path)


def test_the_overfitting_recipe_is_short_constant_and_has_its_own_name() -> None:
    recipe = one_batch_recipe(tiny(train={"train_iters": 5000}, scheduler={"lr_warmup_iters": 700}))
    assert (recipe.name, recipe.train.train_iters) == ("tiny.overfit", 200)
    assert (recipe.scheduler.lr_decay_style, recipe.scheduler.lr_warmup_iters) == ("constant", 10)
    assert recipe.optimizer.weight_decay == 0


# -- GPUs --------------------------------------------------------------------------------------------------------------

NODE = Cluster(
    (DetectedGpu("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, None),) * 8, 96, 999 * GIB, 999 * GIB, 999 * GIB
)


def spec_of(recipe: Recipe, folder: Path, **changes: Any) -> RunSpec:
    spec = RunSpec(recipe=recipe, data_dir=folder / "data", run_dir=folder / "r", runs_dir=folder, **changes)
    (spec.run_dir / "logs").mkdir(parents=True)
    return spec


def test_a_rank_refuses_another_plan_than_the_one_that_was_checked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, here = tiny(), detect()
    plan = derive_run(recipe, 1, here)
    ready = PreparedStart.of(spec_of(recipe, tmp_path), plan, Machine(here, 1))
    planned = json.loads(ready.spec.model_dump_json())["planned"]
    # It trains with its own plan: what travels has to survive JSON. Specs of earlier versions have no plan.
    assert worker._as_planned(RunSpec.model_validate_json(ready.spec.model_dump_json()), here) == plan
    older = RunSpec.model_validate_json(ready.spec.model_dump_json(exclude={"planned", "accept_changes"}))
    assert worker._as_planned(older, here) == plan
    for name, value in (("num_microbatches", 99), ("world_size", 4), ("layers_per_stage", [[1], [1]])):
        other = ready.spec.model_copy(update={"planned": {**planned, name: value}})
        assert workflow.start(replace(ready, spec=other)) == 2
        said = "WORLD_SIZE" if name == "world_size" else name
        require_message(capfd.readouterr().err, f"rank 0 on {socket.gethostname()}", rule=(said, str(value)))
    assert not ready.spec.run.exists()


def test_carbon_is_by_the_profile_then_by_the_site_of_a_pod_then_by_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    named = tiny(tracking={"kg_co2_per_kwh": 0.1})
    laptop = load_profile("laptop")
    priced = laptop.model_copy(update={"costs": Costs(pue=1.2, kg_co2_per_kwh=0.4)})
    assert costs(tiny(), laptop) is None
    assert costs(named, laptop) == costs(named, None) == Costs(kg_co2_per_kwh=0.1)
    assert costs(named, priced) == priced.costs
    assert costs(named, laptop.model_copy(update={"costs": Costs(pue=1.2)})) == Costs(pue=1.2, kg_co2_per_kwh=0.1)
    monkeypatch.setenv(COSTS, '{"pue": 1.3, "kg_co2_per_kwh": 0.2}')
    assert costs(named, None) == Costs(pue=1.3, kg_co2_per_kwh=0.2)
    assert costs(named, priced) == priced.costs
    for text in ("{", '{"pue": 0.5}', '{"watts": 3}', "3"):
        monkeypatch.setenv(COSTS, text)
        with refused(COSTS, rule="kg_co2_per_kwh"):
            costs(named, None)


def test_ranks_know_the_nvlink_domain_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks on two nodes: no rank detects that NVLink joins them."""
    recipe = tiny(layout={"tensor_model_parallel_size": 4})
    monkeypatch.setenv("WORLD_SIZE", "4")
    detected = replace(NODE, gpus=NODE.gpus[:2]).times(2)
    site = replace(detected, nvlink_domain=72)
    ready = PreparedStart.of(spec_of(recipe, tmp_path), derive_run(recipe, 4, site), Machine(site, 4, 2))
    assert worker._as_planned(RunSpec.model_validate_json(ready.spec.model_dump_json()), detected) == ready.plan


def test_ranks_on_detected_gpus_know_it_and_get_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(workflow, "run_ranks", lambda _module, arguments, **options: told.update(options) or 0)
    monkeypatch.delenv("OMP_NUM_THREADS")
    recipe = tiny(layout={"tensor_model_parallel_size": 2})
    spec = spec_of(recipe, tmp_path)
    for cluster, on_gpus in ((NODE, True), (LAPTOP, False)):
        assert workflow.start(PreparedStart.of(spec, derive_run(recipe, 2, cluster), Machine(cluster, 2))) == 0
        written = RunSpec.model_validate_json((spec.run_dir / "logs" / "spec.json").read_text("utf-8"))
        assert written.on_gpus is on_gpus
        assert bool(told["environment"]) is on_gpus
        assert told["threads"] == (16 if on_gpus else 2)
        if on_gpus:
            assert told["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
            assert told["environment"]["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(spec.run_dir / "logs"))


def test_a_run_that_is_planned_for_gpus_does_not_train_on_a_cpu(tmp_path: Path) -> None:
    with refused("torch.cuda", rule="--nv"):
        worker.run(spec_of(tiny(), tmp_path, on_gpus=True))
