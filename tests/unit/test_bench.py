"""`llmrecipes bench` on real ranks over gloo."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmrecipes.bench import measure
from llmrecipes.bench.measure import OPERATIONS, bus_factor
from llmrecipes.bench.results import BenchSpec, Collectives, RankSpeeds, compare
from llmrecipes.cli.app import run
from llmrecipes.data.prepare import prepare
from llmrecipes.engine.core.platform.cpu import CpuPlatform
from llmrecipes.hardware.cluster import detect
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.profile import LINK_BYTES, Group, MeasuredLinks, Operation
from llmrecipes.train.observers.step_profile import Kernel, kind_of, table
from llmrecipes.workflow.bench import sizes, write_profile
from tests.engines.plain import Cpu, PlainBackend, PlainEngine
from tests.helpers import tiny, tiny_on, write_recipe
from tests.refusals import require_message


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(operation, 8) for operation in ("all_reduce", "all_gather", "send_recv")] == [1.75, 0.875, 1.0]
    assert bus_factor("all_to_all", 2) == bus_factor("reduce_scatter", 2) == 0.5


@pytest.mark.slow
def test_collectives_of_every_group_go_into_a_profile(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensor = {"tensor_model_parallel_size": 2}
    recipe = write_recipe(tiny_on(corpus, layout=tensor), tmp_path)
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
    assert answer["compared"] == []  # nothing measured before, and buffers too small for a link
    assert answer["ranks_per_node"] == 4
    assert answer["reach"] == {"tensor": 1, "data": 2, "world": 3}


def row(operation: Operation, group: Group, ranks: int, size: int, speed: float) -> MeasuredLinks:
    return MeasuredLinks(operation=operation, group=group, ranks=ranks, bytes=size, seconds=1.0, bus_gb_per_s=speed)


def test_bandwidths_are_compared_with_the_profile() -> None:
    big = LINK_BYTES
    rows = (
        row("all_reduce", "tensor", 8, 1 << 20, 79.9),
        row("all_reduce", "tensor", 8, big, 361.0),  # 80 % of 450 is 360
        row("all_gather", "tensor", 8, big, 359.0),
        row("all_reduce", "data", 2, big, 41.0),  # between nodes: 80 % of 50 is 40
        row("all_gather", "data", 2, big, 39.0),
        row("all_gather", "data", 2, 1 << 20, 1.0),  # latency: nothing to compare with
    )
    found = Collectives(
        backend="nccl", world_size=16, ranks_per_node=8, reach={"tensor": 7, "data": 8, "world": 15}, rows=rows
    )
    profile = load_profile("h100-ib")
    assert [(each.source, each.ok) for each in compare(found, profile)] == [
        ("intra_node", True), ("intra_node", False), ("inter_node", True), ("inter_node", False),
    ]  # fmt: skip
    # What was measured before counts more than the data sheet.
    before = (row("all_reduce", "tensor", 8, 1 << 20, 100.0), row("all_gather", "data", 2, big, 40.0))
    compared = compare(found, profile.model_copy(update={"measured": before}))
    assert [(each.expected_gb_per_s, each.ok) for each in compared if each.source == "measured"] == [
        (100.0, False), (40.0, True),
    ]  # fmt: skip
    # Over an NVLink domain the ranks of two nodes are near each other.
    assert {each.source for each in compare(found, profile.model_copy(update={"nvlink_domain": 16}))} == {"intra_node"}


def test_the_command_warns_below_what_was_measured_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Collectives(
        backend="gloo",
        world_size=2,
        ranks_per_node=2,
        reach={"world": 1},
        rows=(row("all_reduce", "world", 2, 1024, 0.7), row("all_gather", "world", 2, 1024, 0.9)),
    )
    monkeypatch.setattr("llmrecipes.workflow.bench.measure", lambda _spec, _nproc: now.model_dump_json())
    monkeypatch.chdir(tmp_path)
    write_profile("laptop", [row.model_copy(update={"bus_gb_per_s": 1.0}) for row in now.rows], Path("was.yaml"))
    assert run(["bench", "collectives", "--cluster", "was.yaml"]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "all_reduce" in warnings[0] and "70% of 1 GB/s (measured)" in warnings[0]
    assert run(["bench", "collectives", "--cluster", "was.yaml", "--json"]) == 0
    assert [row["ok"] for row in json.loads(capsys.readouterr().out)["compared"]] == [False, True]


def test_ranks_that_slow_the_others_down_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = (1.0, 1.02, 1.3, 0.99)
    found = RankSpeeds(hosts=("n1", "n1", "n2", "n2"), seconds=seconds, flops=4e14)
    monkeypatch.setattr("llmrecipes.workflow.bench.measure", lambda _spec, _nproc: found.model_dump_json())
    assert run(["bench", "ranks"]) == 0
    (slow,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "rank 2 on n2" in slow and "78%" in slow
    assert run(["bench", "ranks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slow_ranks"] == [2]


def test_every_rank_is_timed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = measure.measure_ranks(CpuPlatform(), 2)
    finally:
        dist.destroy_process_group()
    assert len(found.hosts) == len(found.seconds) == 1 and found.seconds[0] > 0


def test_a_machine_is_measured() -> None:
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = measure.measure_machine(CpuPlatform(), 1).model_dump()
    finally:
        dist.destroy_process_group()
    assert all(value > 0 for name, value in found.items() if name != "depth") and found["depth"] >= 0
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("world", [(1e-4, 2e9), (0.0, 1e9)])
def test_latency_and_bandwidth_are_those_of_a_line(world: tuple[float, float]) -> None:
    latency, speed = world
    found = measure._line([(size, latency + size / speed) for size in measure.RING])
    assert found == pytest.approx((latency or 1e-6, speed), rel=1e-6)


@pytest.mark.slow
def test_a_measured_machine_is_a_profile_with_which_steps_are_planned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.yaml"
    assert run(["bench", "machine", "--write", str(path), "--repeats", "1", "--json"]) == 0
    profile = load_profile(str(path))
    assert profile.rates is not None and profile.cpu_cores == max(1, round(detect().cpu_cores))
    capfd.readouterr()
    assert run(["plan", "gpt-tiny", "--cluster", str(path), "--json"]) == 0
    made = json.loads(capfd.readouterr().out)
    least = 6 * made["num_parameters"] * 2048 / 2 / (max(profile.rates.gflops, profile.rates.gflops_all) * 1e9)
    assert least < made["step_seconds"] < 100 * least
    assert run(["bench", "machine", "--write", str(path)]) == 2
    require_message(capfd.readouterr().err, "--write")


def test_a_step_ends_when_its_update_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[str] = []
    at_the_end: list[int] = []

    class Queue(Cpu):
        """A device whose queue is emptied by `synchronize` only."""

        def synchronize(self) -> None:
            pending.clear()

    class Queueing(PlainEngine):
        def train_step(self, batches: Any, **options: Any) -> Any:
            pending.append("update")
            return super().train_step(batches, **options)

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            at_the_end.append(len(pending))
            return float(len(at_the_end))

        @staticmethod
        def process_time() -> float:
            return 0.0

    class Engines(PlainBackend):
        def build(self, plan: Any, platform: Any, weights: Any = None) -> Any:
            return Queueing(plan, platform)

    monkeypatch.setattr(measure, "time", Clock)
    spec = BenchSpec(recipe=tiny(), data_dir=Path(), out=Path(), what="step", repeats=1)
    engines: Any = Engines()
    platform = Queue()
    with engines.join(spec.recipe, platform) as world:
        measure.steps(spec, engines, world, platform, detect())
    assert not any(at_the_end)


def test_kernels_are_summed_by_kind_and_gaps_are_idle() -> None:
    names = {
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT": "gemm",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel>>": "gemm",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>": "loss",
        "void at::native::vectorized_layer_norm_kernel<float>": "norm",
        "Memcpy DtoD (Device -> Device)": "copy",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    }
    kernels = [Kernel(name, 10.0 * at, 10.0 * at + 8) for at, name in enumerate(names)]
    kernels.append(Kernel("ncclDevKernel_ReduceScatter", 0.0, 9.0))  # overlaps a product, and one gap in part
    found = table(kernels, window=100e-6, steps=2, device="cuda")
    assert {name: kind_of(name) for name in names} == names
    assert found.kinds["idle"] == pytest.approx((100 - 9 * 8 - 1) / 2 * 1e-6)
    assert found.kinds["communication"] == pytest.approx(17e-6 / 2)
    assert found.seconds == pytest.approx(50e-6)


def test_kernels_that_the_compiler_fuses_are_not_copies_because_they_convert() -> None:
    """Names as inductor makes them: all fused operations, sorted."""
    names = {
        "triton_poi_fused__to_copy_add_gelu_mul_3": "elementwise",
        "triton_poi_fused_mul_silu_split_with_sizes_0": "elementwise",
        "triton_poi_fused__scaled_dot_product_flash_attention_add_cat_neg_transpose_7": "elementwise",
        "triton_red_fused__to_copy_amax_gather_sub_12": "elementwise",
        "triton_red_fused__fused_rms_norm__to_copy_add_2": "norm",
        "triton_per_fused_add_native_layer_norm_backward_4": "norm",
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_1": "loss",
        "triton_poi_fused__to_copy_clone_5": "copy",
        "triton_poi_fused_clone_transpose": "copy",
        "triton_tem_fused_mm_9": "gemm",
    }
    assert {name: kind_of(name) for name in names} == names


def test_a_site_with_gpus_is_measured_as_it_is_used_and_at_a_size_that_measures_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[BenchSpec] = []

    def measure(spec: BenchSpec, _nproc: int | None) -> None:
        asked.append(spec)

    monkeypatch.setattr("llmrecipes.workflow.bench.measure", measure)
    for name in load_profile("a100-roce").environment:
        monkeypatch.setenv(name, "18")  # restored after the test, whatever the code sets
        if name != "NCCL_IB_TIMEOUT":
            monkeypatch.delenv(name)
    for words in (
        [],
        ["--cluster", "laptop"],
        ["--cluster", "a100-roce"],
        ["--cluster", "a100-roce", "--sizes", "1KiB"],
    ):
        assert run(["bench", "collectives", *words]) == 0
    assert [max(spec.sizes) for spec in asked] == [16 << 20, 16 << 20, LINK_BYTES, 1024]
    assert (os.environ["NCCL_IB_GID_INDEX"], os.environ["NCCL_IB_TIMEOUT"]) == ("3", "18")


@pytest.mark.slow
def test_steps_and_reading(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_on(corpus)
    name, data_dir = write_recipe(recipe, tmp_path), tmp_path / "data"
    assert run(["bench", "step", name, "--nproc", "2", "--repeats", "3", "--json"]) == 0
    step = json.loads(capfd.readouterr().out)
    assert (step["world_size"], step["layout"]["data_parallel_size"], len(step["seconds"])) == (2, 2, 3)
    assert step["tokens_per_second"] > 0 and len(step["processor_seconds"]) == 3
    assert step["mfu"] is None
    assert run(["bench", "data", name, "--data-dir", str(data_dir)]) == 2
    assert str(data_dir) in capfd.readouterr().err  # the rank says which data is missing
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
        (["collectives", "--cluster", "laptop", "--write", "/"], "--write"),
        (["collectives", "--cluster", "laptop", "--write", "My File.yaml"], "--write"),
        (["step", "gpt-tiny-3d", "--nproc", "6"], "layout"),
        (["step", "no-such"], "no-such"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    require_message(capsys.readouterr().err, named)


def test_sizes() -> None:
    assert sizes("512,4KiB, 2MiB,1gib") == (512, 4096, 2 << 20, 1 << 30)
