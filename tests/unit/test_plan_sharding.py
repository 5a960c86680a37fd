"""Memory with ZeRO: the paper's shares, what DeepSpeed keeps besides, and what is offloaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.former import ADAMW
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.check import check
from llmrecipes.plan.derive import Plan, default_world_size, derive
from llmrecipes.recipe.load import load
from llmrecipes.units import GIB, gib
from tests.refusals import refused

GPU = DetectedGpu("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, 989.4)
NODE = Cluster((GPU,) * 8, 8, 1 << 41, 1 << 40, 0)
LAPTOP = replace(NODE, gpus=())
N = 24 * (4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048) + 50304 * 2048 + 2048
"""Parameters of gpt-1b with its padded vocabulary."""
SMALL = 49 * 2048
"""Of them in weights that stage 3 keeps whole: norms."""
PLAIN = ("layout.overlap_grad_reduce=false", "layout.overlap_param_gather=false")
BUCKET = 500_000_000
EMBEDDING = 50304 * 2048
EXACT = (
    "layout.zero.stage3_max_live_parameters=0",
    "layout.zero.stage3_max_reuse_distance=0",
    "layout.zero.stage3_prefetch_bucket_size=0",
)


def plan(*overrides: str, machine: Cluster = NODE, ranks: int = 8) -> Plan:
    return derive(load("gpt-1b", [*PLAIN, *overrides]).recipe, ranks, machine)


ZEROPP = ("layout.zero.stage=3", "train.grad_reduce_in_fp32=false", "train.precision=fp16")


@pytest.mark.parametrize(
    ("overrides", "machine", "ranks", "key", "tokens"),
    [
        (("train.zero_quantized_weights=true",), LAPTOP, 2, "train.zero_quantized_weights", "CPU"),
        (("train.zero_quantized_gradients=true",), LAPTOP, 2, "train.zero_quantized_gradients", "CPU"),
        (("train.zero_quantized_gradients=true",), NODE, 8, "train.zero_quantized_gradients", "16"),
        (("train.zero_quantized_gradients=true",), NODE.times(2), 8, "train.zero_quantized_gradients", "16"),
        (("layout.zero.zero_hpz_partition_size=3",), NODE, 8, "layout.zero.zero_hpz_partition_size", "2 or 4"),
        (("layout.zero.zero_hpz_partition_size=16",), NODE, 8, "layout.zero.zero_hpz_partition_size", "8"),
        (("layout.zero.zero_hpz_partition_size=2",), LAPTOP, 1, "layout.zero.zero_hpz_partition_size", "1"),
    ],
)
def test_zeropp_is_refused_where_it_cannot_work(
    overrides: tuple[str, ...], machine: Cluster, ranks: int, key: str, tokens: str
) -> None:
    with refused(key, rule=tokens):
        plan(*ZEROPP, *overrides, machine=machine, ranks=ranks)


def test_zeropp_on_two_nodes() -> None:
    plan(
        *ZEROPP, "train.zero_quantized_gradients=true", "train.zero_quantized_weights=true",
        "layout.zero.zero_hpz_partition_size=8", machine=NODE.times(2), ranks=16,
    )  # fmt: skip


def test_parameters() -> None:
    assert plan().num_parameters.total == N


@pytest.mark.parametrize(
    ("overrides", "weights", "gradients", "optimizer", "buffers"),
    [
        # Figure 1 of arXiv 1910.02054: 2 + 2 + 12 bytes a parameter, each divided from its stage on; fp32 gradients.
        (("layout.zero.stage=1",), 2 * N, 4 * N, 12 * N // 8, 0),
        (("layout.zero.stage=1", "layout.engine=deepspeed"), 2 * N, 4 * N, 12 * N // 8, 0),
        (("layout.zero.stage=1", "layout.engine=deepspeed", "train.precision=fp16"), 2 * N, 4 * N, 12 * N // 8,
         4 * BUCKET),
        (("layout.zero.stage=2",), 2 * N, 4 * N // 8, 12 * N // 8, 2 * BUCKET + 4 * N // 8),
        (
            ("layout.zero.stage=2", "train.grad_reduce_in_fp32=false"),
            2 * N, 2 * (N // 8 + EMBEDDING), 12 * N // 8, 2 * BUCKET,
        ),
        (("layout.zero.stage=2", "layout.zero.overlap_comm=true"), 2 * N, 4 * N // 8, 12 * N // 8,
         2 * 2 * BUCKET + 4 * N // 8),
        (("layout.zero.stage=2", "train.precision=fp32"), 4 * N, 4 * (N // 8 + EMBEDDING), 12 * N // 8, 4 * BUCKET),
        (("layout.zero.stage=2", "layout.zero.offload_optimizer=cpu"), 2 * N, 0, 0, 2 * BUCKET + 4 * N // 8),
        (("layout.zero.stage=1", "layout.zero.offload_optimizer=cpu"), 2 * N, 4 * N, 0, 4 * BUCKET),
        # Stage 3 and gathered: a billion parameters by default.
        (("layout.zero.stage=3",), 2 * N // 8, 4 * N // 8, 12 * N // 8, 2 * 10**9 + 2 * 4 * BUCKET),
        (("layout.zero.stage=3", "train.precision=fp32"), 4 * N // 8, 4 * N // 8, 12 * N // 8,
         4 * 10**9 + 2 * 4 * BUCKET),
        (
            ("layout.zero.stage=3", "layout.zero.zero_hpz_partition_size=4"),
            2 * N // 8 + 2 * (N - SMALL) // 4, 4 * N // 8, 12 * N // 8, 2 * 10**9 + 2 * 4 * BUCKET,
        ),
        (
            ("layout.zero.stage=3", "train.precision=fp32", "layout.zero.offload_param=cpu"),
            0, 4 * N // 8, 12 * N // 8, 4 * 10**9 + 2 * 4 * BUCKET,
        ),
        (
            ("layout.zero.stage=3", "layout.zero.offload_optimizer=cpu", "layout.zero.offload_param=cpu"),
            0, 0, 0, 2 * 10**9 + 2 * 4 * BUCKET,
        ),
    ],
)  # fmt: skip
def test_the_states_of_a_rank(
    overrides: tuple[str, ...], weights: int, gradients: int, optimizer: int, buffers: int
) -> None:
    memory = plan(*overrides).memory
    assert (memory.weights, memory.gradients, memory.optimizer, memory.buffers) == (
        weights, gradients, optimizer, buffers,
    )  # fmt: skip


def test_stage_3_gathers_at_least_its_largest_part_and_at_most_the_model() -> None:
    reducing = 2 * 4 * BUCKET
    assert plan("layout.zero.stage=3", *EXACT).memory.buffers == 2 * EMBEDDING + reducing
    more = plan("layout.zero.stage=3", *EXACT[:2], "layout.zero.stage3_prefetch_bucket_size=1000").memory
    assert more.buffers == 2 * (EMBEDDING + 1000) + reducing
    assert (
        plan("layout.zero.stage=3", "layout.zero.stage3_max_live_parameters=9000000000").memory.buffers
        == 2 * N + reducing
    )


def test_a_small_sum_of_stage_1_is_copied_to_reduce_it() -> None:
    small = derive(load("gpt-125m", [*PLAIN, "layout.engine=deepspeed", "layout.zero.stage=1"]).recipe, 8, NODE)
    assert small.memory.buffers == 4 * small.num_parameters.total


def test_above_64_ranks_whole_buckets_are_copied_to_reduce_them() -> None:
    found = plan("layout.zero.stage=2", "train.global_batch_size=576", machine=NODE.times(9), ranks=72)
    assert found.memory.buffers == (2 + 2 + 4) * BUCKET


@pytest.mark.parametrize(
    ("overrides", "host"),
    [
        (("layout.zero.stage=3",), 0),
        # Master weights, two moments, fp32 gradients, gradients summed over micro-batches, updated weights.
        (("layout.zero.stage=2", "layout.zero.offload_optimizer=cpu"), 12 + 4 + 2 + 2),
        (("layout.zero.stage=3", "layout.zero.offload_optimizer=cpu"), 12 + 4 + 4),
        (("layout.zero.stage=3", "layout.zero.offload_optimizer=cpu", "layout.zero.offload_param=cpu"), 12 + 4 + 4 + 2),
    ],
)
def test_what_is_offloaded_counts_against_the_main_memory_of_a_node(overrides: tuple[str, ...], host: int) -> None:
    found = plan(*overrides)
    assert found.memory.host == host * N // 8
    assert found.host.offloaded == 8 * found.memory.host
    assert found.as_dict()["host_memory_bytes"] == found.host.total
    assert "host" not in found.as_dict()["memory"]
    two_nodes = plan(*overrides, machine=NODE.times(2), ranks=16)
    assert two_nodes.host.offloaded == 8 * two_nodes.memory.host == host * (N // 16) * 8
    assert two_nodes.host_capacity_bytes == NODE.memory_available_bytes


def test_nvme_leaves_buffers_in_main_memory() -> None:
    nvme = (
        "layout.zero.stage=3",
        "layout.zero.offload_optimizer=nvme",
        "layout.zero.nvme_path=/nvme",
        "layout.zero.sub_group_size=1000000",
    )
    assert plan(*nvme).memory.host == 12 * 4_000_000 + 8 * N // 8


def test_a_node_with_too_little_main_memory_is_refused() -> None:
    small = replace(NODE, memory_available_bytes=20 * GIB)
    found = plan("layout.zero.stage=2", "layout.zero.offload_optimizer=cpu", machine=small)
    assert not found.fits
    with refused("recipe gpt-1b", rule=("24.5 GiB", "20.0 GiB", "layout.zero.offload_optimizer")):
        check(found, small)
    check(plan("layout.zero.stage=2", "layout.zero.offload_optimizer=cpu"), NODE)


def test_a_node_holds_what_its_saves_and_processes_take() -> None:
    """All that the ranks of a node write, as a checkpoint has it; with local checkpoints also all that each has."""
    without = plan("data.num_workers=0")
    saved, processes = without.checkpoint_bytes, without.host.processes
    assert saved < without.host.staged < 1.2 * saved and without.host.offloaded == 0
    assert plan(machine=NODE.times(2), ranks=16).host.staged == pytest.approx(without.host.staged / 2)
    assert plan("checkpoint.async_save=false").host.staged == without.host.staged, "the snapshot is taken all the same"
    local = ("checkpoint.non_persistent_save_interval=5", "checkpoint.non_persistent_local_ckpt_dir=/nvme")
    each = without.memory.weights + without.memory.optimizer
    assert plan(*local).host.staged - without.host.staged == pytest.approx(8 * each, rel=0.2)
    assert processes > 8 * GIB and plan("data.num_workers=4").host.processes > processes
    small = replace(NODE, memory_available_bytes=saved)
    with refused("recipe gpt-1b", rule=gib(without.host.staged)):
        check(plan(machine=small), small)
    check(without, replace(NODE, memory_available_bytes=without.host.total))


def test_on_a_cpu_a_snapshot_is_kept_without_async_saves_too() -> None:
    assert plan(machine=LAPTOP, ranks=1).memory == plan("checkpoint.async_save=false", machine=LAPTOP, ranks=1).memory


def test_on_a_cpu_offloaded_states_are_in_the_same_memory() -> None:
    here = plan("layout.zero.stage=2", "layout.zero.offload_optimizer=cpu", machine=LAPTOP, ranks=2)
    there = plan("layout.zero.stage=2", "layout.zero.offload_optimizer=cpu", ranks=2)
    assert here.host.total == here.memory.host == 0
    assert here.memory.gradients + here.memory.optimizer == there.memory.host
    small = derive(load("gpt-tiny", [*ADAMW, "layout.zero.stage=3"]).recipe, 2, LAPTOP)
    # Gathered weights, and what is written to, of a larger bucket and its copy.
    assert small.memory.buffers == 3 * 4 * small.num_parameters.total


def test_sharded_gradients_need_two_replicas_on_a_cpu() -> None:
    def ranks(machine: Cluster, *overrides: str) -> int:
        return default_world_size(load("gpt-tiny", [*ADAMW, *overrides]).recipe, machine)

    assert ranks(LAPTOP, "layout.zero.stage=1") == 1
    assert ranks(LAPTOP, "layout.zero.stage=2") == ranks(LAPTOP, "layout.zero.stage=3") == 2
    assert ranks(LAPTOP, "layout.zero.stage=2", "layout.tensor_model_parallel_size=2") == 4
    assert ranks(LAPTOP, "layout.zero.stage=3", "train.global_batch_size=8") == 1
    assert ranks(replace(NODE, gpus=(GPU,)), "layout.zero.stage=3") == 1


def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones() -> None:
    overrides = [*PLAIN, "layout.engine=deepspeed", "layout.zero.stage=2", "layout.pipeline_model_parallel_size=1",
                 "layout.tensor_model_parallel_size=1", "layout.sequence_parallel=false",
                 "layout.expert_tensor_parallel_size=1",
                 "layout.expert_model_parallel_size=4", "train.global_batch_size=64"]  # fmt: skip
    of_moe = derive(load("moe-tiny", overrides).recipe, 8, NODE)
    n = of_moe.num_parameters
    # The tokens' table is tied and has no padding on one rank.
    experts, dense = n.experts // 4, n.total - n.experts
    assert of_moe.memory.optimizer == 12 * (-(-dense // 8) + experts // 2)
