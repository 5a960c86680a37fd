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

from llmrecipes.bench.results import BenchSpec, LoaderReading, MachineRates, RankSpeeds, StepTimes
from llmrecipes.data.folder.prepared import open_prepared
from llmrecipes.engine.base import Backend, Batch, Platform, World
from llmrecipes.hardware.cluster import Cluster, cpu_cores
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
        ranks = group.size()
        near = on_the_node(dist.get_process_group_ranks(group), ranks_per_node)
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
    ranks = dist.get_process_group_ranks(group)
    group_rank = group.rank()
    after = ranks[(group_rank + 1) % len(ranks)]
    before = ranks[group_rank - 1]
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
    speed = (socket.gethostname(), statistics.median(times) / CALLS)
    everybody = [speed] * dist.get_world_size()
    dist.all_gather_object(everybody, speed)
    hosts, seconds = zip(*everybody, strict=True)
    return RankSpeeds(hosts=hosts, seconds=seconds, flops=2.0 * size**3)


RING = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of the all-reduces from which latency and bandwidth between two processes follow."""


def measure_machine(platform: Platform, repeats: int) -> MachineRates:
    """Rates of a node without GPUs. A collective of two ranks, of which the first measures its processor.

    One core is measured in processor time, which other programs slow less than the clock on the wall; of all figures
    the best repeat counts.

    Args:
        repeats: of each measurement, times four.
    """
    rates: dict[str, float] = {}
    threads = torch.get_num_threads()
    if dist.get_rank() == 0:
        torch.set_num_threads(1)
        try:
            rates = _one_core(repeats)
        finally:
            torch.set_num_threads(max(1, round(cpu_cores())))
        rates["gflops_all"] = 2 * 1024**3 / _best(_product(1024), repeats, time.perf_counter) / 1e9
        torch.set_num_threads(threads)
    dist.barrier()
    points = []
    for size in RING:
        buffer = torch.ones(size // 4)
        times = []
        for number in range(COLLECTIVE_WARMUP + 4 * repeats):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(buffer)
            if number >= COLLECTIVE_WARMUP:
                times.append(time.perf_counter() - started)
        points.append((size, min(_slowest(times, platform))))
    latency, speed = _line(points)
    if not rates:
        rates = dict.fromkeys(
            ("gflops", "gflops_all", "depth", "attention_gflops", "memory_gb_per_s", "launch_us"), 0.0
        )
    # An all-reduce of two ranks is a step that scatters and one that gathers, of half the bytes each.
    return MachineRates(**rates, latency_us=latency / 2 * 1e6, link_gb_per_s=speed / 1e9)


def _best(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    times = []
    for number in range(PRODUCT_WARMUP + 4 * repeats):
        started = clock()
        call()
        if number >= PRODUCT_WARMUP:
            times.append(clock() - started)
    return min(times)


def _product(inner: int) -> Callable[[], object]:
    left, right = torch.randn(1024, inner), torch.randn(inner, 1024)
    return lambda: torch.matmul(left, right)


def _one_core(repeats: int) -> dict[str, float]:
    """Rates of this thread."""

    def best(call: Callable[[], object]) -> float:
        return _best(call, repeats, time.thread_time)

    deep, flat = best(_product(1024)), best(_product(64))
    # 2 m n k / rate × (k + depth)/k, at two depths.
    slope = (deep - flat) / (1024 - 64)
    query = torch.randn(4, 4, 512, 64)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention = best(lambda: attend(query, query, query, is_causal=True))
    # As large as the activations of a layer, which a processor's caches hold or not as in training.
    data = torch.randn(1 << 20)
    traffic = best(lambda: torch.mul(data, 1.5))
    small = torch.randn(16, requires_grad=True)

    def chain() -> None:
        value = small
        for _ in range(50):
            value = value * 1.0
        value.sum().backward()

    return {
        "gflops": 2 * 1024**2 / slope / 1e9,
        "depth": max(0.0, flat / slope - 64),
        "attention_gflops": 16 * 0.5 * 4 * 512**2 * 64 / attention / 1e9,
        "memory_gb_per_s": 2 * data.nbytes / traffic / 1e9,
        "launch_us": best(chain) / 100 * 1e6,
    }


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of no byte, and bytes a second, by least squares of relative errors."""
    weights = [(1 / seconds, size / seconds) for size, seconds in points]
    aa, bb = sum(a * a for a, _ in weights), sum(b * b for _, b in weights)
    ab = sum(a * b for a, b in weights)
    a1 = sum(a for a, _ in weights)
    b1 = sum(b for _, b in weights)
    determinant = aa * bb - ab * ab
    latency = (a1 * bb - b1 * ab) / determinant
    slope = (b1 * aa - a1 * ab) / determinant
    return max(latency, 1e-6), 1 / max(slope, 1e-12)


STEP_WARMUP = 2


def steps(spec: BenchSpec, engines: Backend, world: World, platform: Platform, cluster: Cluster) -> StepTimes:
    """Train on random tokens, without prepared data. A collective of all ranks."""
    recipe = spec.recipe
    plan = derive(recipe, world.size, cluster)
    engine = engines.build(plan, platform)
    batches = random_tokens(recipe, world.data_parallel_rank)
    times, processor = [], []
    for number in range(STEP_WARMUP + spec.repeats):
        dist.barrier()
        started = time.perf_counter()
        used = time.process_time()
        engine.train_step(batches)
        platform.synchronize()  # the step returns as soon as the loss is known, while its update still runs
        if number >= STEP_WARMUP:
            times.append(time.perf_counter() - started)
            processor.append(time.process_time() - used)
    memory = torch.tensor([float(platform.peak_memory())], device=platform.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    engine.close()
    return StepTimes(
        world_size=world.size,
        layout=plan.layout.as_dict(),
        seconds=_slowest(times, platform),
        processor_seconds=_slowest(processor, platform),
        tokens_per_step=plan.tokens_per_step,
        flops_per_token=plan.flops_per_token_causal,
        peak_memory_bytes=int(memory.item()),
        peak_tflops=cluster.gpus[0].peak_tflops if cluster.gpus else None,
    )


def reading(spec: BenchSpec, world: World, platform: Platform, cluster: Cluster) -> LoaderReading:
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
    return LoaderReading(
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
    size = recipe.layout.micro_batch_size
    length = recipe.model.seq_length
    positions = torch.arange(length).expand(size, length)
    mask = torch.ones(size, length)
    while True:
        ids = torch.randint(recipe.model.vocab_size, (size, length + 1), generator=random)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "position_ids": positions}
