"""The time model: pipeline schedules, predictions beside measured runs, and the command that shows them."""

from __future__ import annotations

import csv
import json
import random
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from benchmarks import fit_planner, planner
from llmrecipes.cli.app import run
from llmrecipes.hardware.load import clusters_dir, load_profile
from llmrecipes.hardware.machine import machine as machine_of
from llmrecipes.plan.check import check, check_run
from llmrecipes.plan.derive import LEAST_HEADROOM
from llmrecipes.plan.muon import collectives
from llmrecipes.plan.speed.choice import ALIKE
from llmrecipes.plan.speed.device import device, kernels_on, stack
from llmrecipes.plan.speed.forecast import ERROR, _orthogonalizing, forecast, software
from llmrecipes.plan.speed.network import exchange
from llmrecipes.plan.speed.saving import Saving
from llmrecipes.plan.speed.schedule import order, shortest, simulate
from llmrecipes.plan.speed.schedule import run as run_passes
from llmrecipes.plan.speed.search import _may_fit, candidates, nearest, plan_of
from llmrecipes.plan.speed.step import linked
from llmrecipes.plan.speed.work import product
from llmrecipes.recipe.derived.stage_layout import parse
from llmrecipes.recipe.load import load
from llmrecipes.workflow.plan import plan_on
from llmrecipes.workflow.speed_forecast import of_recipe
from tests.refusals import refused, require_message

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks/data/planner"


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(2, 4, 1), (4, 8, 1), (8, 64, 1), (4, 8, 2), (4, 32, 5)]
)
def test_the_bubble_is_that_of_the_published_formula(stages: int, microbatches: int, chunks: int) -> None:
    """(p - 1)/v forward and backward passes are added to m of them (arXiv 2104.04473, section 2.2)."""
    seconds = simulate(
        [[1.0 / chunks] * chunks] * stages, [[2.0 / chunks] * chunks] * stages, microbatches, 0.0, blocking=False
    )
    assert seconds == pytest.approx(3 * (microbatches + (stages - 1) / chunks))


def test_the_slowest_stage_leads() -> None:
    assert simulate([[1.0], [1.0], [3.0]], [[2.0], [2.0], [6.0]], 40, 0.0, blocking=False) == pytest.approx(9 * 40 + 6)


def test_every_pass_is_made_once() -> None:
    passes = order(4, 2, 8, 1)
    assert len(passes) == len(set(passes)) == 2 * 2 * 8
    ahead, back = [[0.5, 0.5]] * 4, [[1.0, 1.0]] * 4
    even = simulate(ahead, back, 8, 0.0, blocking=False)
    assert simulate(ahead, back, 10, 0.0, blocking=False) == pytest.approx(even + 2 * 3)


def test_uneven_chunks_are_simulated_one_by_one() -> None:
    """The middle of a long step is not simulated: what a further group of micro-batches adds says how long it is."""
    draw = random.Random(0)
    for stages, chunks in ((8, 4), (4, 3), (4, 1)):
        forward = [[draw.uniform(0.5, 1.5) for _ in range(chunks)] for _ in range(stages)]
        backward = [[2 * each for each in of_stage] for of_stage in forward]
        seconds = simulate(forward, backward, 16 * stages, 0.05, blocking=False)
        ends = run_passes(forward, backward, 16 * stages, 0.05, blocking=False)
        assert seconds == pytest.approx(max(ends.values()), rel=1e-6)
        assert shortest(forward, backward, 16 * stages) <= seconds
        (at,) = {round(ends[True, 0, 0, 0], 9)}
        assert at == pytest.approx(forward[0][0])


def test_a_stage_that_catches_up_slowly_is_simulated_until_it_has() -> None:
    """Chunks of 8, 9, 9 and 6 layers: a group first adds less than the slowest stage's passes."""
    forward = [[8.0, 9.0], [9.0, 7.7]]
    backward = [[2 * each for each in of_stage] for of_stage in forward]
    seconds = simulate(forward, backward, 256, 0.0, blocking=False)
    exact = max(run_passes(forward, backward, 256, 0.0, blocking=False).values())
    assert seconds == pytest.approx(exact, rel=1e-6)
    assert shortest(forward, backward, 256) <= seconds
    ahead, back = [[0.0303, 0.0693], [0.0340, 0.0299]], [[0.0340, 0.0771], [0.0765, 0.0652]]
    assert simulate(ahead, back, 256, 0.0, blocking=False) >= shortest(ahead, back, 256)


def test_the_chunk_of_the_loss_may_have_no_layer() -> None:
    """One chunk of layers in 32 less on the last stage: the loss takes its time."""
    ahead, back = [[2.0] * 4 for _ in range(8)], [[4.0] * 4 for _ in range(8)]
    full = simulate(ahead, back, 64, 0.0, blocking=False)
    ahead[-1][-1], back[-1][-1] = 2.0 + 1.6, 4.0 + 3.2
    behind = simulate(ahead, back, 64, 0.0, blocking=False)
    ahead[-1][-1], back[-1][-1] = 1.6, 3.2
    assert simulate(ahead, back, 64, 0.0, blocking=False) == pytest.approx(full, rel=0.01)
    assert behind > full + 64 * 4.8 * 0.95


def test_small_products_are_slower() -> None:
    gpu = device("H100")
    rates = [2 * n**3 / product(gpu, n, n, n, "bf16") / gpu.peak_of("bf16") for n in (256, 1024, 8192)]
    assert rates[0] < 0.05 and rates[1] < 0.6 < rates[2] < gpu.gemm


@pytest.fixture(scope="module")
def sweeps() -> list[planner.Result]:
    return planner.replay(planner.load(ROWS / "layout_sweeps.csv"))


def test_layouts_are_ranked_as_measured(sweeps: list[planner.Result]) -> None:
    figures = planner.summary(sweeps)
    assert all(result.tokens for result in sweeps)
    assert figures["rank_correlation_median"] >= 0.9
    assert figures["regret_median"] <= 0.01
    assert figures["auto_regret_mean"] <= figures["regret_mean"] + ALIKE < figures["blind_regret_mean"] / 4
    assert figures["mfu25_median_error"] <= 0.06 and figures["mfu25_p90_error"] <= 0.15
    assert figures["memory_median_error"] <= 0.07
    assert figures["ran_but_called_impossible"] == 0


def test_configurations_that_failed_are_flagged() -> None:
    results = planner.replay(planner.load(ROWS / "layout_sweeps_failed.csv"))
    assert sum(not result.fits for result in results) >= 0.8 * len(results)


def test_stages_are_cut_by_parameters_as_in_nanotron(sweeps: list[planner.Result]) -> None:
    """An output layer as large as four layers is a stage's work; its measured memory and time follow the cut."""
    rows = planner.load(ROWS / "layout_sweeps.csv")
    small = next(planner.read(row).work for row in rows if "Llama-1B" in row["model"])
    cuts = {stages: planner.by_cost(replace(small, pp=stages)) for stages in (2, 4, 16)}
    assert cuts[2] == ((10, 6), 1) and cuts[4] == ((5, 5, 5, 1), 3)
    assert cuts[16][1] == 12  # three stages after it are empty: such runs failed
    one_node = [
        result for row, result in zip(rows, sweeps, strict=True)
        if "Llama-1B" in row["model"] and row["gpus"] == "8" and int(row["pp"]) > 1
    ]  # fmt: skip
    assert sorted(map(planner.error, one_node))[len(one_node) // 2] <= 0.06


def test_a_token_that_goes_once_to_a_node_takes_less_time() -> None:
    gpu = device("H100")
    often, once = exchange(gpu, 1e9, 32, 8), exchange(gpu, 1e9, 32, 8, copies=8)
    assert once < 0.6 * often
    assert exchange(gpu, 1e9, 8, 8, copies=8) == exchange(gpu, 1e9, 8, 8)


def test_a_fit_predicts_as_the_replay_and_an_unknown_program_as_the_default() -> None:
    rows = [row for row in planner.load(ROWS / "published_runs.csv") if "dgxc" in row["source"]][::8]
    fit = fit_planner.Fit(rows)
    known = fit.predictions(fit.present(), range(len(fit.rows)))
    replayed = [result.tokens for result in planner.replay(fit.rows)]
    assert np.exp(known) == pytest.approx(replayed, rel=1e-6)
    unknown = fit.predictions(fit.present(), range(len(fit.rows)), frozenset({"megatron"}))
    assert np.median(unknown) < np.median(known)
    begun = np.abs(known - fit.measured).mean()
    moved = fit.predictions(fit.run(range(len(fit.rows)), 3), range(len(fit.rows)))
    assert np.abs(moved - fit.measured).mean() < 2 * begun  # from neutral values


def test_published_runs_are_predicted() -> None:
    rows = planner.load(ROWS / "published_runs.csv")
    results = planner.replay(rows)
    figures = planner.summary(results)
    assert figures["median_error"] <= 0.05
    assert figures["spearman"] >= 0.95
    assert figures["ran_but_called_impossible"] == 0
    # What was measured is not read.
    blind = [{**row, "tokens_per_s_per_gpu": "", "tflops_per_gpu": "", "mfu": "", "mem_gb_per_gpu": ""} for row in rows]
    assert [each.tokens for each in planner.replay(blind)] == [each.tokens for each in results]


def test_replay_refuses_a_file_without_a_column(tmp_path: Path) -> None:
    rows = planner.load(ROWS / "layout_sweeps_failed.csv")
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name != "gpus"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/planner.py", tmp_path / "rows.csv"], capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "gpus" in done.stderr


def test_a_row_of_an_unknown_gpu_borrows_coefficients() -> None:
    for other in ("TPU v5p", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GH200 480GB"):
        with refused("gpu", rule="H100"):
            device(other)
    for name, stem in (("h100", "H100"), ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA_GB200", "GB200")):
        assert device(name).name == stem
    rows = [{"model": "x-7b", "gpus": "8", "mbs": "1", "gpu": "TPU v5p"}]
    (result,) = planner.replay(rows)
    assert result.tokens and {"coefficients of H100", "software"} <= set(result.assumed)


def test_every_row_has_a_prediction() -> None:
    """Also one whose entries are no numbers, fractions, or absurd."""
    names = ("gpus", "tp", "pp", "cp", "dp", "ep", "vpp", "mbs", "gbs", "seq", "layers", "hidden", "ffn", "heads",
             "kv_heads", "vocab", "experts", "topk", "moe_ffn")  # fmt: skip
    usual = {"model": "llama-8b", "gpu": "H100", "gpus": "64", "tp": "8", "pp": "1", "mbs": "1"}
    rows = [dict.fromkeys(usual, ""), {**usual, "mbs": "0.5"}, {**usual, "tp": "999999"}, {**usual, "pp": "99999999"},
            *({**usual, "model": name} for name in ("gpt-..b", "gpt-1.2.3b", "gpt-0b", f"gpt-{'9' * 400}t")),
            *({**usual, **dict.fromkeys(names, each)} for each in ("x", "-1", "nan", "inf", "1e308", "9" * 8, "0.5")),
            {**usual, "layers": "768", "pp": "768", "vpp": "99999999"}]  # fmt: skip
    results = planner.replay(rows)
    assert [each.index for each in results] == list(range(len(rows)))
    assert all(each.tokens and each.bytes and each.assumed for each in results)
    json.dumps(planner.summary(results), allow_nan=False)


def test_async_tensor_parallelism_is_a_switch_of_its_stack() -> None:
    vanilla, overlapped = stack("pytorch/torchtitan vanilla TP"), stack("pytorch/torchtitan async TP")
    assert vanilla.name == overlapped.name == "torchtitan"
    assert overlapped.overlap_tensor > vanilla.overlap_tensor


def test_plan_predicts_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["plan", "llama3-70b", "--nodes", "16", "--json"]
    assert run([*asked, "--cluster", "h100-ib"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["world_size"] == 128 and shown["fits"] and 0.45 < shown["mfu_full"] < 0.6
    assert len(shown["memory_gib"]["stages"]) == shown["parallelism"]["pipeline"]
    assert shown["memory_gib"]["max"] == pytest.approx(max(each["total"] for each in shown["memory_gib"]["stages"]))
    assert sum(shown["step_parts"].values()) == pytest.approx(shown["step_seconds"])
    costs = load_profile("h100-ib").costs
    assert costs is not None and costs.usd_per_gpu_hour is not None
    assert (
        shown["cost_usd"] == pytest.approx(costs.usd_per_gpu_hour * shown["gpu_hours"]) and shown["energy_mwh"] is None
    )
    assert run([*asked, "--cluster", "h100-ib", "--usd-per-gpu-hour", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["cost_usd"] == pytest.approx(3 * shown["gpu_hours"])

    profile = yaml.safe_load((clusters_dir() / "h100-ib.yaml").read_text())
    profile |= {"name": "priced", "costs": {"usd_per_gpu_hour": 2, "watts_per_gpu": 1000, "kg_co2_per_kwh": 0.5}}
    (tmp_path / "priced.yaml").write_text(yaml.safe_dump(profile))
    assert run([*asked, "--cluster", str(tmp_path / "priced.yaml")]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert priced["cost_usd"] == pytest.approx(2 * shown["gpu_hours"])
    assert priced["energy_mwh"] == pytest.approx(shown["gpu_hours"] / 1000)
    assert priced["co2_t"] == pytest.approx(priced["energy_mwh"] / 2)


def simulated(of: Saving, interval: float, failures: int) -> float:
    """Share of the time that trains, with failures at random moments: what `Saving.effective` says in one formula."""
    chance, trained, passed = random.Random(1), 0.0, 0.0
    assert of.mtbf is not None
    for _ in range(failures):
        until = chance.expovariate(1 / of.mtbf)
        now = progress = written = kept = pending = 0.0
        while (now := max(now + interval, written)) <= until:  # training waits for the save before
            kept, progress = pending, progress + interval
            pending, written, now = progress, now + of.write, now + of.stall
        trained += pending if written <= until else kept
        passed += until + of.restart
    return trained / passed


@pytest.mark.parametrize(("stall", "write"), [(0.5, 200.0), (20.0, 600.0), (120.0, 120.0)])
def test_the_best_interval_loses_the_least(stall: float, write: float) -> None:
    """Against failures at random moments, of which the formulas count the first order."""
    of = Saving(bytes=0, stall=stall, write=write, interval=0.0, mtbf=12 * 3600.0, restart=900.0)
    best = of.best_interval
    assert best is not None
    shares = {factor: simulated(of, factor * best, 4_000) for factor in (0.25, 1.0, 4.0)}
    assert shares[1.0] == max(shares.values())
    for factor, share in shares.items():
        assert of.effective(factor * best) == pytest.approx(share, abs=0.01)


def test_failures_of_the_site(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["plan", "llama3-405b", "--gpus", "16384", "train.global_batch_size=2048", "--json"]
    profile = yaml.safe_load((clusters_dir() / "h100-ib.yaml").read_text()) | {"name": "site"}

    def planned(**changes: object) -> dict[str, Any]:
        (tmp_path / "site.yaml").write_text(yaml.safe_dump(profile | changes))
        assert run([*asked, "--cluster", str(tmp_path / "site.yaml")]) == 0
        return json.loads(capsys.readouterr().out)

    shown = planned()
    assert shown["mtbf_hours"] == pytest.approx(54 * 24 / 419, rel=0.01), "Llama 3's, section 3.3.4"
    assert any("save_interval" in each for each in shown["problems"]), "5 GB/s are too slow for it"
    faster = planned(storage_gb_per_s=500)
    assert faster["checkpoint_write_seconds"] == pytest.approx(shown["checkpoint_write_seconds"] / 100)
    assert not faster["problems"] and faster["effective_time"] > 0.85 > shown["effective_time"]
    assert faster["days_with_failures"] == pytest.approx(faster["days"] / faster["effective_time"])
    assert planned(failures=None)["effective_time"] is None
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(profile | {"failures": {"gpu_hours_per_failure": 0}}))
    assert run([*asked, "--cluster", str(tmp_path / "site.yaml")]) == 2
    assert "failures.gpu_hours_per_failure" in capsys.readouterr().out


def test_a_plan_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["plan", "deepseek-v3", "--cluster", "h100-ib", "--nodes", "128"]
    path = tmp_path / "made" / "plan.svg"
    assert run([*asked, "--plot", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    root = ElementTree.fromstring(path.read_text("utf-8"))  # noqa: S314 - our own text
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"weights", "activations", "available", "forward", "backward"} <= set(texts)
    assert any(text.startswith("expert ") and text.endswith("%") for text in texts)
    assert any("32 of 48 micro-batches" in text for text in texts)
    passes = [each for each in root.iter("{http://www.w3.org/2000/svg}path") if each.get("clip-path")]
    assert len(passes) > 2 * 16 * 32, "each pass of the micro-batches drawn"
    for wrong in (["--plot", str(tmp_path / "plan.pdf")], ["--plot", str(path), "--search"]):
        assert run([*asked, *wrong]) == 2
        assert "--plot" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run([*asked, "--plot", str(tmp_path / "file" / "plan.png")]) == 2
    assert str(tmp_path / "file" / "plan.png") in capsys.readouterr().err


def test_plan_searches_layouts_and_writes_the_fastest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    asked = ["plan", "gpt-7b", "--cluster", "h100-ib", "--nodes", "4"]
    assert run([*asked, "--search", "--json", "--write", str(path), "--usd-per-gpu-hour", "3"]) == 0
    layouts = json.loads(capsys.readouterr().out)
    assert all(each["cost_usd"] == pytest.approx(3 * each["gpu_hours"]) for each in layouts)
    speeds = [each["tokens_per_second_per_gpu"] for each in layouts]
    assert speeds == sorted(speeds, reverse=True) and all(each["fits"] for each in layouts)
    assert run(["plan", str(path), *asked[2:], "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["recipe"] == "wide" and written["parallelism"] == layouts[0]["parallelism"]


@pytest.mark.rotating
def test_a_search_cuts_stages_by_what_loss_and_predictions_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """61 layers and one of multi-token prediction divide over nothing; with the loss they are as long as 65."""
    path = tmp_path / "cut.yaml"
    asked = ["plan", "deepseek-v3", "--cluster", "h100-ib", "--nodes", "128"]
    assert run([*asked, "--search", "--json", "--write", str(path)]) == 0
    best = json.loads(capsys.readouterr().out)[0]
    stages = parse(best["parallelism"]["pipeline_layout"])
    assert "".join(stages).replace("t", "") == "EmL" and len({len(each) for each in stages[:-1]}) <= 3
    assert stages[-1].count("t") < stages[1].count("t")
    assert load(str(path)).recipe.layout.pipeline_model_parallel_layout == best["parallelism"]["pipeline_layout"]


def test_a_search_tries_stages_of_zero_and_offload_only_where_nothing_else_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "llama3-8b", "layout=zero2", "--cluster", "h100-ib", "--search"]
    assert run([*asked, "--gpus", "8", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)
    tried = [each["parallelism"] for each in layouts]
    assert {each["zero_stage"] for each in tried} == {1, 2, 3}
    assert all(each["pipeline"] == 1 for each in tried if each["zero_stage"] > 1)
    assert not any(each["offload_optimizer"] for each in tried)
    assert run([*asked, "--gpus", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert lines and all("offload" in each and "not counted: copies to and from main memory" in each for each in lines)


def test_where_no_layout_fits_zero_on_the_same_gpus_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama3-8b", "--cluster", "h100-ib", "--gpus", "1"]
    assert run([*asked, "--search"]) == 2
    message = capsys.readouterr().err
    require_message(message, "--search", rule=("layout.zero.stage=3", "layout.zero.offload_optimizer=cpu"))
    changes = message.partition("on these GPUs: ")[2].partition(" (")[0].split()
    assert run([*asked, "--json", *changes]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_experts_are_split_over_tensor_parallel_ranks_or_not() -> None:
    degrees = {
        (parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size)
        for each in candidates(load("mixtral-8x7b", []).recipe, 32, 8)
        for parallel in [each.layout]
    }
    assert {(4, 4, 4), (4, 4, 1), (4, 1, None), (1, 8, 1)} <= degrees
    assert (4, 1, 1) not in degrees and (1, 8, None) not in degrees
    layout = ["layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true"]
    layout += ["layout.expert_model_parallel_size=4"]
    whole, split = (
        of_recipe("mixtral-8x7b", [*layout, f"layout.expert_tensor_parallel_size={size}"], "h100-ib", 4, None)
        for size in (1, 2)
    )
    assert split.step.expert > whole.step.expert > 0
    assert split.plan.memory.weights < whole.plan.memory.weights


def test_muon_takes_the_time_of_its_products_and_of_what_it_moves() -> None:
    def seconds(kind: str, *keys: str, cluster: str = "h100-ib") -> float:
        layout = [
            "layout={name: null, tensor_model_parallel_size: 2, sequence_parallel: true, micro_batch_size: 8, "
            "use_distributed_optimizer: false}"
        ]
        section = f"optimizer={{optimizer: {kind}, lr: 1e-3}}"
        return of_recipe("gpt-1b", [section, *layout, *keys], cluster, 1, None).step.optimizer

    plain, muon = seconds("adam"), seconds("muon")
    shared = seconds("muon", "optimizer.muon_tp_mode=distributed")
    more = seconds("muon", "optimizer.muon_coefficient_type=simple", "optimizer.muon_num_ns_steps=10")
    assert plain < shared < muon
    assert 1.5 * (muon - plain) < more - plain < 2 * (muon - plain)  # its momentum is updated once
    for cluster, (bf16, tf32, fp32) in {"h100-ib": (1, 2, 989 / 67), "a100-roce": (1, 2, 312 / 19.5)}.items():
        times = [
            seconds("muon", f"optimizer.muon_fp32_matmul_prec={name}", cluster=cluster)
            - seconds("adam", cluster=cluster)
            for name in ("medium", "high", "highest")
        ]
        # Small products, and those whose operands are large, gain less.
        assert times[0] * bf16 < times[1] <= times[0] * tf32 < times[2] < times[0] * fp32 * 1.01


@pytest.mark.parametrize(("mode", "passes"), [("duplicated", 1), ("distributed", 2)])
def test_muon_takes_the_time_of_what_its_ranks_send(mode: str, passes: int) -> None:
    """Rings over two ranks: half of what is gathered passes a link, and of what is summed twice that."""
    optimizer = f"optimizer={{optimizer: muon, lr: 1e-3, muon_tp_mode: {mode}}}"
    keys = "tensor_model_parallel_size: 2, sequence_parallel: true, micro_batch_size: 8"
    layout = [f"layout={{name: null, {keys}, use_distributed_optimizer: false}}"]
    found = of_recipe("gpt-1b", [optimizer, *layout], "h100-ib", 1, None)
    plan, device = found.plan, found.device
    slow = replace(device, nvlink=device.nvlink / 2)
    more = _orthogonalizing(plan, slow, 0) - _orthogonalizing(plan, device, 0)
    sent = sum(size for *_, size in collectives(plan.recipe, plan.shape, plan.layout, plan.device, 0))
    link = device.nvlink * linked(device, software(plan, device)).links
    assert more == pytest.approx(passes * sent / 2 / link)


def test_stage_2_reduces_gradients_after_each_micro_batch() -> None:
    once, often = (
        of_recipe("llama3-8b", ["layout=zero2", f"layout.zero.stage={stage}", *more], "h100-ib", 1, None)
        for stage, more in ((1, []), (2, ["layout.zero.overlap_comm=false"]))
    )
    assert often.plan.num_microbatches == 64
    assert 30 * once.step.gradients < often.step.gradients < 64 * once.step.gradients


@pytest.mark.parametrize(
    ("recipe", "nodes", "overrides"),
    [
        ("llama3-70b", 16, ["layout.micro_batch_size=4", "layout.recompute_granularity=null"]),
        ("mixtral-8x7b", 16, ["layout.micro_batch_size=16", "layout.recompute_granularity=null"]),
    ],
)
def test_a_plan_that_does_not_fit_names_changes_with_which_it_does(
    recipe: str, nodes: int, overrides: list[str]
) -> None:
    run, machine = plan_on(load(recipe, overrides).recipe, nproc=None, cluster="h100-ib", nodes=nodes)
    plan = run.largest
    changes = nearest(plan, 3)
    speeds = [made.tokens_per_second_per_gpu for _, made in changes]
    assert changes and speeds == sorted(speeds, reverse=True)
    for change, made in changes:
        changed = load(recipe, [*overrides, *shlex.split(change)]).recipe
        again = plan_on(changed, nproc=run.world_size, cluster="h100-ib", nodes=None)[0].largest
        assert again.fits and again.memory == made.plan.memory and again.layout == made.plan.layout
    with refused(f"recipe {recipe}", rule=shlex.split(changes[0][0])[0]):
        check(plan, machine)


def test_no_layout_fits_whose_model_states_do_not() -> None:
    """They are left out of a search before they are planned."""
    recipe, cluster = load("llama3-70b", []).recipe, machine_of(load_profile("h100-ib"), 4)
    recomputing = [layout for layout in candidates(recipe, 32, 8) if layout.layout.recompute_granularity][::5]
    left_out = [layout for layout in recomputing if not _may_fit(layout, cluster, 32)]
    assert 10 < len(left_out) < len(recomputing) - 10
    for plan in filter(None, (plan_of(layout, cluster, 32) for layout in left_out)):
        assert not plan.fits or plan.memory_headroom < LEAST_HEADROOM


@pytest.mark.rotating
def test_where_no_layout_fits_the_nodes_of_one_that_does_are_named() -> None:
    alone = [f"layout.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")]
    alone += ["layout.sequence_parallel=false", "layout.virtual_pipeline_model_parallel_size=null"]
    recipe = load("llama3-70b", [*alone, "layout.context_parallel_size=1"]).recipe
    plan, machine = plan_on(recipe, nproc=None, cluster="h100-ib", nodes=1)
    with refused("recipe llama3-70b", rule=("4 nodes", "32 GPUs")):
        check_run(plan, machine)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("gpt-tiny", "--cluster", "laptop", "--usd-per-gpu-hour", "1"), "--cluster"),
        (("gpt-1b", "--cluster", "h100-ib", "--usd-per-gpu-hour", "0"), "--usd-per-gpu-hour"),
        (("gpt-1b", "--cluster", "h100-ib", "--usd-per-gpu-hour", "0", "--search"), "--usd-per-gpu-hour"),
        (("gpt-1b", "--cluster", "h100-ib", "--usd-per-gpu-hour", "1", "--details"), "--usd-per-gpu-hour"),
        (("gpt-7b", "--cluster", "h100-ib", "--write", "x.yaml"), "--write"),
        (("llama3-405b", "--cluster", "h100-ib", "--nodes", "1", "--search"), "--search"),
        (("gpt-7b", "--cluster", "h100-ib", "--search", "--write", "my recipe.yaml"), "--write"),
        (("gpt-7b", "--cluster", "h100-ib", "--search", "--write", "wide.txt"), "--write"),
    ],
)
def test_plan_refuses(arguments: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    require_message(capsys.readouterr().err, where)


@pytest.mark.parametrize(
    ("cluster", "gpu"),
    [("rtx-4090", None), ("ethernet", None), ("gb200-nvl72", None), ("h100-ib", "B200"), ("h100-ib", "AMD MI300X")],
)
def test_a_gpu_without_fitted_runs_has_a_wider_interval(
    cluster: str, gpu: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load((clusters_dir() / f"{cluster}.yaml").read_text()) | {"name": "site"}
    values["gpu"]["name"] = gpu or values["gpu"]["name"]
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(values))
    asked = ["plan", "gpt-125m", "--cluster", str(tmp_path / "site.yaml")]
    assert run([*asked, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    known = forecast(plan_on(load("gpt-125m").recipe, nproc=None, cluster="h100-ib", nodes=1)[0].largest, None)
    least, most = shown["tokens_per_second_per_gpu_range"]
    assert not shown["fitted"] and 0.05 < shown["mfu_full"] < 0.6
    assert least / shown["tokens_per_second_per_gpu"] == pytest.approx(1 - ERROR)
    assert most / least > known.speed_range[1] / known.speed_range[0], "also that of another GPU's shares"
    values["calibration"] = {"compute": 1.5, "communication": 1.0, "runs": 3}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(values))
    assert run([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fitted"], "by runs of this cluster"
    values["gpu"]["name"] = "NVIDIA V100"
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(values))
    assert run([*asked, "--search"]) == 2
    require_message(capsys.readouterr().err, "gpu", rule="H100")
    assert run(asked) == 0
    assert "unknown  until measured" in capsys.readouterr().out, "the rest is planned"


def test_what_does_not_fit_says_what_does_and_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["layout=null", "layout.micro_batch_size=8", "model.seq_length=16384"]
    asked = ["plan", "gpt-1b", "--cluster", "h100-ib", "--gpus", "1", *keys]
    assert run(asked) == 2
    shown = capsys.readouterr()
    require_message(shown.err, "recipe gpt-1b", rule="layout.micro_batch_size=1")
    assert "does NOT fit" in shown.out and "a second" not in shown.out and "hours" not in shown.out
    assert run([*asked, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert run([*asked, "layout.micro_batch_size=1"]) == 0


def test_a_search_says_that_the_batch_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "gpt-7b", "--cluster", "h100-ib", "--gpus", "7", "--search"]) == 2
    require_message(capsys.readouterr().err, "--search", rule="global_batch_size")


def test_kernels_of_a_framework_are_not_carried_to_gpus_it_was_not_measured_on() -> None:
    """Its factors are relative to the shares of H100; with them an A100 would compute at 73 % of its peak."""
    megatron, default = stack("Megatron-LM"), stack("")
    assert kernels_on(device("H100"), megatron) == kernels_on(device("H200"), megatron) == megatron
    elsewhere = kernels_on(device("A100"), megatron)
    assert (elsewhere.gemm, elsewhere.attention) == (default.gemm, default.attention) != (megatron.gemm, 1)
    assert elsewhere.overlap_tensor == megatron.overlap_tensor
