"""Seconds of collectives over NVLink and between nodes.

Rings as NCCL builds them: every rank sends (n - 1)/n of the buffer; where a ring leaves a node, the GPUs of a group on
it share their adapters. Latency grows with the steps of the ring, beyond eight nodes with their logarithm as in a tree
(Thakur et al. 2005).
"""

from __future__ import annotations

from math import ceil, log2

from llmrecipes.plan.speed.device import Device


def _bus(device: Device, ranks: int, near: int) -> tuple[float, float]:
    """Bytes per second of a ring's slowest link per rank, and its latency."""
    near = max(1, min(near, ranks))
    if near >= ranks:
        return device.nvlink * device.links, (ranks - 1) * device.hop_near
    nodes = ceil(ranks / near)
    rate = min(device.nvlink, near**device.rails * device.nic) * device.links / (1 + device.crowd * log2(nodes))
    steps = (nodes - 1) if nodes <= 8 else 8 + 4 * log2(nodes / 8)
    return rate, steps * device.hop_far + (near - 1) * steps * device.hop_near


def gather(device: Device, size: float, ranks: int, near: int) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in total over ranks, `near` of them on a node."""
    if ranks <= 1:
        return 0.0
    rate, latency = _bus(device, ranks, near)
    return size * (ranks - 1) / ranks / rate + latency


def reduce(device: Device, size: float, ranks: int, near: int) -> float:
    """Seconds of an all-reduce of `size` bytes."""
    return 2 * gather(device, size, ranks, near)


def exchange(device: Device, size: float, ranks: int, near: int, copies: int = 0) -> float:
    """Seconds of an all-to-all in which a rank sends `size` bytes, its part included.

    Args:
        copies: of a token in `size`, where it goes only once to a node; 0: every copy is sent.
    """
    if ranks <= 1:
        return 0.0
    near = max(1, min(near, ranks))
    inside = size * (near - 1) / ranks / (device.nvlink * device.links)
    outside = size * (ranks - near) / ranks / (device.nic * device.links)
    if copies and near < ranks:
        nodes = ranks / near
        outside *= nodes * (1 - (1 - 1 / nodes) ** copies) / copies
        inside = size / (device.nvlink * device.links)
    return max(inside, outside) + device.hop_far * (1 if near < ranks else 0) + device.hop_near * log2(ranks)


def send(device: Device, size: float, *, far: bool) -> float:
    """Seconds of a message to the next pipeline stage."""
    if far:
        return size / (device.nic * device.links) + device.hop_far
    return size / (device.nvlink * device.links) + device.hop_near
