"""Time and bus bandwidth of the collectives of training, in the groups that training uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Platform
from llmrecipes.hardware.profile import Group, Measured, Operation

WARMUP = 2
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


def measure(
    groups: Groups, platform: Platform, sizes: Sequence[int], repeats: int, ranks_per_node: int
) -> Iterator[Measured]:
    """Measure every operation in every group; all groups of a kind at once, as in training. A collective of all ranks.

    Args:
        groups: of the layout, by name.
        platform: device of the buffers.
        sizes: bytes of the buffers, as nccl-tests counts them: the full result for all-gather, the full input for
            reduce-scatter.
        repeats: measured rounds; the result is the median of the slowest rank's times.
        ranks_per_node: of the run.
    """
    for name, group in groups.items():
        ranks, near = group.size(), on_the_node(dist.get_process_group_ranks(group), ranks_per_node)
        for operation, prepare in OPERATIONS.items():
            for size in sizes:
                elements = max(size // 4 // ranks, 1) * ranks
                call = prepare(torch.ones(elements, device=platform.device), group)
                seconds = _seconds(call, platform, repeats)
                speed = elements * 4 / seconds / 1e9
                yield Measured(
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
    for number in range(WARMUP + repeats):
        dist.barrier()
        started = time.perf_counter()
        call()
        platform.synchronize()
        if number >= WARMUP:
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
