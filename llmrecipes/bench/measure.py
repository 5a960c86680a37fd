"""What a rank of a benchmark measures: collectives, its own speed, training steps, reading of data."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.bench.results import BenchSpec, RankSpeeds, Reading, StepTimes
from llmrecipes.data.prepared import open_prepared
from llmrecipes.engine.base import Backend, Batch, Platform, World
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Group, MeasuredLinks, Operation
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.loaders import open_loaders

COLLECTIVE_WARMUP = 2
Groups = Mapping[Group, dist.ProcessGroup]


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes over the slowest link per byte of the buffer (nccl-tests, doc/PERFORMANCE.md).

    Args:
        operation: key of `OPERATIONS`.
        ranks: size of the group.
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation == "send_recv" else (ranks - 1) / ranks


def reach(groups: Groups) -> dict[Group, int]:
    """Highest rank of this rank's group of each kind."""
    return {name: max(dist.get_process_group_ranks(group)) for name, group in groups.items()}


def on_the_node(ranks: Sequence[int], ranks_per_node: int) -> int:
    """Ranks of a group on the node of its first one."""
    return sum(rank // ranks_per_node == ranks[0] // ranks_per_node for rank in ranks)


def measure_collectives(
    groups: Groups, platform: Platform, sizes: Sequence[int], repeats: int, ranks_per_node: int
) -> Iterator[MeasuredLinks]:
    """Measure every operation in every group; all groups of a kind at once, as in training. A collective of all ranks.

    Args:
        platform: device of the buffers.
        sizes: bytes of the buffers, as nccl-tests counts them: the full result for all-gather, the full input for
            reduce-scatter.
        repeats: measured rounds; the result is the median of the slowest rank's times.
    """
    for name, group in groups.items():
        ranks, near = group.size(), on_the_node(dist.get_process_group_ranks(group), ranks_per_node)
        for operation, prepare in OPERATIONS.items():
            for size in sizes:
                elements = max(size // 4 // ranks, 1) * ranks
                call = prepare(torch.ones(elements, device=platform.device), group)
                seconds = _seconds(call, platform, repeats)
                speed = elements * 4 / seconds / 1e9
                yield MeasuredLinks(
                    operation=operation,
                    group=name,
                    ranks=ranks,
                    bytes=elements * 4,
                    seconds=seconds,
                    bus_gb_per_s=speed * bus_factor(operation, ranks),
                    ranks_per_node=near,
                )


def _seconds(call: Callable[[], object], platform: Platform, repeats: int) -> float:
    times = []
    for number in range(COLLECTIVE_WARMUP + repeats):
        dist.barrier()
        started = time.perf_counter()
        call()
        platform.synchronize()
        if number >= COLLECTIVE_WARMUP:
            times.append(time.perf_counter() - started)
    slowest = torch.tensor(times, dtype=torch.float64, device=platform.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))


def _all_reduce(buffer: torch.Tensor, group: Any) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffer, group=group)


def _all_gather(buffer: torch.Tensor, group: Any) -> Callable[[], object]:
    part = buffer.chunk(group.size())[group.rank()].clone()
    return lambda: dist.all_gather_into_tensor(buffer, part, group=group)


def _reduce_scatter(buffer: torch.Tensor, group: Any) -> Callable[[], object]:
    part = torch.empty_like(buffer.chunk(group.size())[0])
    return lambda: dist.reduce_scatter_tensor(part, buffer, group=group)


def _all_to_all(buffer: torch.Tensor, group: Any) -> Callable[[], object]:
    result = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(result, buffer, group=group)


def _send_recv(buffer: torch.Tensor, group: Any) -> Callable[[], object]:
    """Each rank sends to the next one of the group and receives from the previous one, like pipeline stages."""
    ranks, own = dist.get_process_group_ranks(group), group.rank()
    after, before = ranks[(own + 1) % len(ranks)], ranks[own - 1]
    result = torch.empty_like(buffer)

    def call() -> None:
        pair = [dist.P2POp(dist.isend, buffer, after, group), dist.P2POp(dist.irecv, result, before, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return call


OPERATIONS: dict[Operation, Callable[[torch.Tensor, Any], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


PRODUCT_WARMUP = 2
CALLS = 20
"""Matrix products that are timed together, so that starting them costs nothing in comparison."""
SIZE = {"cuda": 8192, "cpu": 256}
"""Rows and columns of the matrices."""


def measure_ranks(platform: Platform, repeats: int) -> RankSpeeds:
    """Time the same matrix products on every rank, all at once, as in training. A collective of all ranks.

    Args:
        platform: of this rank; bf16 on a GPU, fp32 on a CPU.
        repeats: measured rounds; a rank's result is their median.
    """
    size = SIZE[platform.name]
    kind = torch.bfloat16 if platform.name == "cuda" else torch.float32
    left = torch.randn(size, size, device=platform.device, dtype=kind)
    right = torch.randn(size, size, device=platform.device, dtype=kind)
    times = []
    dist.barrier()
    for number in range(PRODUCT_WARMUP + repeats):
        started = time.perf_counter()
        for _ in range(CALLS):
            torch.matmul(left, right)
        platform.synchronize()
        if number >= PRODUCT_WARMUP:
            times.append(time.perf_counter() - started)
    own = (socket.gethostname(), statistics.median(times) / CALLS)
    everybody = [own] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    hosts, seconds = zip(*everybody, strict=True)
    return RankSpeeds(hosts=hosts, seconds=seconds, flops=2.0 * size**3)


STEP_WARMUP = 2


def steps(spec: BenchSpec, engines: Backend, world: World, platform: Platform, cluster: Cluster) -> StepTimes:
    """Train on random tokens, without prepared data. A collective of all ranks."""
    recipe = spec.recipe
    plan = derive(recipe, world.size, cluster)
    engine = engines.build(plan, platform)
    batches = random_tokens(recipe, world.data_parallel_rank)
    times = []
    for number in range(STEP_WARMUP + spec.repeats):
        dist.barrier()
        started = time.perf_counter()
        engine.train_step(batches)
        platform.synchronize()  # the step returns as soon as the loss is known, while its update still runs
        if number >= STEP_WARMUP:
            times.append(time.perf_counter() - started)
    memory = torch.tensor([float(platform.peak_memory())], device=platform.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    engine.close()
    return StepTimes(
        world_size=world.size,
        layout=plan.layout.as_dict(),
        seconds=_slowest(times, platform),
        tokens_per_step=plan.tokens_per_step,
        flops_per_token=plan.flops_per_token_causal,
        peak_memory_bytes=int(memory.item()),
        peak_tflops=cluster.gpus[0].peak_tflops if cluster.gpus else None,
    )


def reading(spec: BenchSpec, world: World, platform: Platform, cluster: Cluster) -> Reading:
    """Read global batches of prepared data to the device. A collective of all ranks.

    Raises:
        UserError: the data is not prepared.
    """
    recipe = spec.recipe
    plan = derive(recipe, world.size, cluster)
    started = time.perf_counter()
    loaders = open_loaders(recipe, open_prepared(recipe, spec.data_dir), world, pin_memory=platform.name == "cuda")
    with closing(loaders.train(0)) as batches:
        _to_device(next(batches), platform)
        first = time.perf_counter() - started
        for _ in range(plan.num_microbatches - 1):
            next(batches)
        times = []
        for _ in range(spec.repeats):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(plan.num_microbatches):
                _to_device(next(batches), platform)
            times.append(time.perf_counter() - started)
    return Reading(
        world_size=world.size,
        seconds=_slowest(times, platform),
        tokens_per_batch=plan.tokens_per_step,
        first_seconds=_slowest([first], platform)[0],
    )


def _to_device(batch: Batch, platform: Platform) -> None:
    for tensor in batch.values():
        tensor.to(platform.device, non_blocking=True)


def _slowest(times: list[float], platform: Platform) -> tuple[float, ...]:
    slowest = torch.tensor(times, dtype=torch.float64, device=platform.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return tuple(slowest.tolist())


def random_tokens(recipe: Recipe, data_parallel_rank: int) -> Iterator[Batch]:
    """Endless micro-batches: the same tokens on every rank of a model replica."""
    random = torch.Generator().manual_seed(data_parallel_rank)
    size, length = recipe.train.micro_batch_size, recipe.model.seq_length
    positions, mask = torch.arange(length).expand(size, length), torch.ones(size, length)
    while True:
        ids = torch.randint(recipe.model.vocab_size, (size, length + 1), generator=random)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "position_ids": positions}
