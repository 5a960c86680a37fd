"""Whether data-parallel replicas have the same weights: a 64-bit hash of each, compared over the ranks that share it.

A weight is hashed on its device as whole numbers, so the sum does not depend on the order: Σ word × odd number of its
place, modulo 2^64. One changed bit always changes it. Ranks exchange one number each; only where these differ, the
hashes of all weights.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from llmrecipes.engine.base import ReplicaFault

CHUNK = 1 << 22
"""Words that are hashed at a time; each takes 16 bytes meanwhile."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 divided by the golden ratio, as a signed number
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def first_difference(named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> ReplicaFault | None:
    """The first weight that differs from that of another replica; a collective of all ranks, with one wait.

    Args:
        named: parameters of this rank, complete on every rank.
        device: of the weights.

    Returns:
        The same on every rank.
    """
    dense: list[tuple[str, torch.Tensor]] = []
    experts: list[tuple[str, torch.Tensor]] = []
    for name, parameter in named:
        (dense if getattr(parameter, "allreduce", True) else experts).append((name, parameter))
    groups = [
        (dense, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (experts, parallel_state.get_expert_data_parallel_group()),
    ]
    places = _odd_numbers(CHUNK, device)
    hashes = [(_hashes(weights, places, device), weights, group) for weights, group in groups if weights]
    differs = torch.zeros((), dtype=torch.int64, device=device)
    for values, _, group in hashes:
        total = (values * places[: len(values)]).sum().reshape(1)
        everyones = [torch.empty_like(total) for _ in range(group.size())]
        dist.all_gather(everyones, total, group=group)
        differs |= (torch.cat(everyones) != total).any()
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if not differs.item():
        return None
    differing = [fault for values, weights, group in hashes if (fault := _in_group(values, weights, group)) is not None]
    everyones_found: list[list[ReplicaFault]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones_found, differing)
    return min(
        (fault for faults in everyones_found for fault in faults), key=lambda fault: (not fault.is_outvoted, fault.rank)
    )


def _in_group(
    values: torch.Tensor, weights: list[tuple[str, torch.Tensor]], group: dist.ProcessGroup
) -> ReplicaFault | None:
    """The finding of this rank about itself: None if it has what most replicas have."""
    everyones: list[tuple[str, list[int]]] = [("", [])] * group.size()
    dist.all_gather_object(everyones, (socket.gethostname(), values.tolist()), group=group)
    ranks = dist.get_process_group_ranks(group)
    me = ranks.index(dist.get_rank())
    votes = Counter(tuple(each) for _, each in everyones)
    usual, count = votes.most_common(1)[0]
    # Of two replicas neither is known to be the right one: the second is named, and the first it differs from.
    mine = tuple(everyones[me][1])
    if mine == usual:
        return None
    other = next(number for number, (_, each) in enumerate(everyones) if tuple(each) == usual)
    differing = [name for (name, _), one, known in zip(weights, mine, usual, strict=True) if one != known]
    return ReplicaFault(
        rank=ranks[me],
        node=everyones[me][0],
        other=ranks[other],
        parameter=differing[0],
        differing=len(differing),
        is_outvoted=count > len(everyones) - count,
    )


def _hashes(weights: list[tuple[str, torch.Tensor]], places: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[weights] on the device, int64."""
    result = torch.zeros(len(weights), dtype=torch.int64, device=device)
    for number, (_, weight) in enumerate(weights):
        words = weight.detach().contiguous().view(-1).view(_WORDS[weight.element_size()])
        for part in words.split(CHUNK):
            result[number] = result[number] * _ODD + (part.long() * places[: len(part)]).sum()
    return result


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int64, device=device) * _ODD) | 1
