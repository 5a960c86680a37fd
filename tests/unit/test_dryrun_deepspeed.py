"""Ranks of large worlds with ZeRO by DeepSpeed without data: the plan's memory and traffic against the real code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drawn_layouts import planned_bytes, sent_bytes
from benchmarks.former import ADAMW
from llmrecipes.cli import app as cli
from llmrecipes.dryrun.dry_run_spec import DryRunSpec, RankReport
from llmrecipes.plan.traffic import SMALL
from llmrecipes.units import GIB
from tests.dist.worlds import GlooWorld
from tests.unit.test_dryrun import Report, plan_of, require_traffic, run, spec, waits_with

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

SHAPE = ("layout.zero.reduce_bucket_size=5000000", "train.global_batch_size=128", "layout.overlap_grad_reduce=false")
adamw = partial(spec, "gpt-tiny", *ADAMW)
ZERO = {
    "stage 1, bf16": adamw(*SHAPE, "layout.engine=deepspeed", "layout.zero.stage=1", "train.precision=bf16", world=8),
    "stage 1, fp32": adamw(*SHAPE, "layout.engine=deepspeed", "layout.zero.stage=1", world=8),
    "stage 2": adamw(*SHAPE, "layout.zero.stage=2", "train.precision=bf16", world=8, ranks=(0, 7)),
    "stage 2, fp16": adamw(*SHAPE, "layout.zero.stage=2", "train.precision=fp16", world=8),
    "stage 2, many owners": adamw(
        *SHAPE[::2], "layout.zero.stage=2", "train.precision=bf16", "train.global_batch_size=1152", world=72
    ),
    "stage 2, tensor": adamw(
        *SHAPE, "layout.zero.stage=2", "train.precision=bf16", "layout.tensor_model_parallel_size=2",
        "layout.sequence_parallel=true", world=8,
    ),
    "stage 2, experts": spec(
        "moe-tiny", *SHAPE[::2], "train.global_batch_size=64", "layout.engine=deepspeed", "layout.zero.stage=2",
        "layout.expert_model_parallel_size=2", "train.precision=bf16", world=4,
    ),
    "stage 3": spec("gpt-tiny-zero", "train.global_batch_size=64", world=8),
    "stage 3, bf16": adamw(*SHAPE, "layout.zero.stage=3", "train.precision=bf16", world=8, ranks=(0, 7)),
    "stage 3, hpZ": adamw(*SHAPE, "layout.zero.stage=3", "layout.zero.zero_hpz_partition_size=4", world=8),
}  # fmt: skip


@pytest.fixture(scope="module")
def process(worlds: object) -> Iterator[GlooWorld]:
    """One that only runs dry runs with DeepSpeed: its accelerator holds for a whole process."""
    alone = GlooWorld(1)
    yield alone
    alone.close()


@pytest.fixture(scope="module")
def sharded(process: GlooWorld) -> dict[str, list[Report]]:
    found = iter(run(process, *ZERO.values()))
    return {name: [next(found) for _ in DryRunSpec.model_validate_json(text).ranks] for name, text in ZERO.items()}


def require_planned(report: Report) -> None:
    """As in `test_dryrun`, and no more in all; DeepSpeed pads flat buffers to a multiple of the ranks."""
    memory, expected = report["memory"], report["planned"]
    for part in ("weights", "gradients", "optimizer"):
        assert memory[part] == pytest.approx(expected[part], rel=1e-4), part
    # Their peak may come later, when DeepSpeed has its buckets and the logits are freed; the plan adds both.
    assert report["planned_most_activations"] == pytest.approx(report["most_activations"], rel=0.03)
    assert sum(memory.values()) <= 1.01 * sum(expected.values())


@pytest.mark.parametrize("name", ZERO)
def test_the_plan_is_what_deepspeed_does(name: str, sharded: dict[str, list[Report]]) -> None:
    for report in sharded[name]:
        require_planned(report)


@pytest.mark.parametrize("name", [name for name in ZERO if "stage 3" not in name and "fp16" not in name])
def test_gradients_are_sent_as_planned(name: str, sharded: dict[str, list[Report]]) -> None:
    """A reduction for each owner in 8 ranks, an all-reduce in 72; in stage 2 after each micro-batch."""
    for report in sharded[name]:
        require_traffic(report, plan_of(ZERO[name]), padding=1e-3)


def test_stage_3_gathers_each_weight_at_most_twice_a_micro_batch(sharded: dict[str, list[Report]]) -> None:
    for name in ("stage 3", "stage 3, bf16"):
        for report in sharded[name]:
            expected, real = planned_bytes(plan_of(ZERO[name]), 0), sent_bytes(RankReport.model_validate(report))
            assert real["reduce-scatter", 8] == pytest.approx(expected["reduce-scatter", 8], rel=1e-3)
            # What is used again soon, the last layers, is kept; small weights are never given back.
            assert 0.45 < real["all-gather", 8] / expected["all-gather", 8] < 1.001
            assert real["all-reduce", 8] < SMALL


def test_the_engine_waits_once_a_step_and_deepspeed_a_few_times(sharded: dict[str, list[Report]]) -> None:
    """DeepSpeed reads whether gradients are finite, and stage 3 waits for the end of each micro-batch's reductions."""
    for name in ("stage 1, bf16", "stage 1, fp32", "stage 2", "stage 3", "stage 3, bf16"):
        for report in sharded[name]:
            ours = [number for place, number in report["waits"].items() if place.startswith("deepspeed/engine")]
            theirs = sum(report["waits"].values()) - sum(ours)
            each = plan_of(ZERO[name]).num_microbatches if "stage 3" in name else 0
            assert ours == [1], name
            assert theirs <= 4 + each, report["waits"]


def waits_with_a_read_added(text: str) -> dict[str, int]:
    """The engine reads each loss."""
    from llmrecipes.engine.deepspeed.engine import DeepSpeedEngine

    def reading(engine: DeepSpeedEngine, plain: Callable[..., Any], *args: Any) -> Any:
        loss = plain(engine, *args)
        float(loss.detach())
        return loss

    return waits_with(text, DeepSpeedEngine, "_loss", reading)


def test_a_host_wait_that_is_added_is_seen(process: GlooWorld) -> None:
    text = ZERO["stage 2"]
    waits: dict[str, int] = process.start(waits_with_a_read_added, text, group=False).result()
    seen = {place: number for place, number in waits.items() if "test_dryrun_deepspeed" in place}
    assert list(seen.values()) == [plan_of(text).num_microbatches]


@pytest.mark.parametrize(
    "text",
    [
        spec("llama3-8b", "layout=zero2", "train.global_batch_size=16", world=8),
        spec("gpt-1b", "layout=zero3", "train.global_batch_size=8192", world=1024),
    ],
    ids=["llama3-8b zero2", "gpt-1b zero3"],
)
def test_a_rank_of_a_full_size_recipe(text: str, process: GlooWorld) -> None:
    (report,) = run(process, text)
    require_planned(report)
    assert sum(report["memory"].values()) > 30 * GIB
    assert sum(report["memory"].values()) < sum(report["planned"].values()) * 1.001
    assert report["save"]["written_bytes"] > 0
    # Of bf16 weights, master weights and two moments a rank writes its share, and below stage 3 it reads all weights.
    weights, share = report["memory"]["weights"], report["memory"]["optimizer"] / 12
    assert report["save"]["written_bytes"] == pytest.approx(14 * share, rel=0.01)
    assert report["resume"]["read_bytes"] == pytest.approx(12 * share + weights, rel=0.01)


def test_the_command_runs_stage_3(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In a process that has imported nothing else."""
    asked = ["dryrun", "gpt-tiny-zero", "train.global_batch_size=64", "--cluster", "h100-ib", "--nodes", "1", "--json"]
    assert cli.run([*asked, "--runs-dir", str(tmp_path)]) == 0
    assert json.loads(capfd.readouterr().out)["world_size"] == 8
