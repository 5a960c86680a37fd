"""Speed of each rank by itself: all of them wait for the slowest."""

from __future__ import annotations

import socket
import statistics
import time

import torch
import torch.distributed as dist

from llmrecipes.bench.spec import RankSpeeds
from llmrecipes.engine.base import Platform

WARMUP = 2
CALLS = 20
"""Matrix products that are timed together, so that starting them costs nothing in comparison."""
SIZE = {"cuda": 8192, "cpu": 256}
"""Rows and columns of the matrices."""


def measure(platform: Platform, repeats: int) -> RankSpeeds:
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
    for number in range(WARMUP + repeats):
        started = time.perf_counter()
        for _ in range(CALLS):
            torch.matmul(left, right)
        platform.synchronize()
        if number >= WARMUP:
            times.append(time.perf_counter() - started)
    own = (socket.gethostname(), statistics.median(times) / CALLS)
    everybody = [own] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    hosts, seconds = zip(*everybody, strict=True)
    return RankSpeeds(hosts=hosts, seconds=seconds, flops=2.0 * size**3)
