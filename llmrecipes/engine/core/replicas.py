"""Whether data-parallel replicas have the same weights and compute the same, by 64-bit hashes.

A tensor is hashed on its device as whole numbers, so the sum does not depend on the order: Σ word × odd number of its
place, modulo 2^64. One changed bit always changes it. Ranks that should have the same exchange one number each; only
where these differ, the hashes of all tensors.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from llmrecipes.engine.base import Batch
from llmrecipes.engine.meters import ReplicaFault
from llmrecipes.recipe.schema import Recipe

CHUNK = 1 << 22
"""Words that are hashed at a time; each takes 16 bytes meanwhile."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 divided by the golden ratio, as a signed number
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_LAYER = "after layer "
_Group = tuple[list[tuple[str, torch.Tensor]], dist.ProcessGroup]
"""Named tensors, and the ranks that have the same ones."""


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
    groups: list[_Group] = [
        (dense, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (experts, parallel_state.get_expert_data_parallel_group()),
    ]
    return _first_difference(groups, device)


def fixed_tokens(recipe: Recipe) -> Batch:
    """A micro-batch that is the same on every rank, of tokens drawn uniformly."""
    size = recipe.layout.micro_batch_size
    length = recipe.model.seq_length
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(recipe.model.vocab_size, (size, length + 1), generator=drawn)
    positions = torch.arange(length).expand(size, length).contiguous()
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(size, length),
        "position_ids": positions,
    }


@contextmanager
def watched_results(modules: Sequence[torch.nn.Module]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yields what the chunks of a model compute in the block: hidden states, and losses on the last stage."""
    results: list[tuple[str, torch.Tensor]] = []

    def see(module: Any, _inputs: Any, output: torch.Tensor) -> None:
        last = max((layer.layer_number for layer in module.decoder.layers), default=0)
        results.append(
            (
                f"losses, {_LAYER}{last}" if module.post_process else f"hidden states, {_LAYER}{last}",
                output.detach().clone(),
            )
        )

    hooks = [module.register_forward_hook(see) for module in modules]
    try:
        yield results
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def first_other_result(
    results: list[tuple[str, torch.Tensor]], recipe: Recipe, device: torch.device
) -> ReplicaFault | None:
    """The first result of the same tokens that differs from that of another replica; a collective of all ranks.

    With expert parallelism a rank's experts also compute tokens of other ranks, so those are compared that have the
    same place among the ranks that share the experts.

    Args:
        results: of this rank, as many as on the ranks of the same pipeline stage.
    """
    group = parallel_state.get_data_parallel_group()
    if recipe.layout.expert_model_parallel_size > 1:
        group = parallel_state.get_expert_data_parallel_group()
    # A wrong result makes those of later layers wrong, with virtual stages on earlier ranks too.
    return _first_difference([(results, group)], device, lambda name: int(name.rpartition(_LAYER)[2]))


def _first_difference(
    groups: list[_Group], device: torch.device, order: Callable[[str], int] = lambda _: 0
) -> ReplicaFault | None:
    places = _odd_numbers(CHUNK, device)
    hashes = [(_hashes(tensors, places, device), tensors, group) for tensors, group in groups if tensors]
    differs = torch.zeros((), dtype=torch.int64, device=device)
    for values, _, group in hashes:
        total = (values * places[: len(values)]).sum().reshape(1)
        everyones = [torch.empty_like(total) for _ in range(group.size())]
        dist.all_gather(everyones, total, group=group)
        differs |= (torch.cat(everyones) != total).any()
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if not differs.item():
        return None
    differing = [fault for values, tensors, group in hashes if (fault := _in_group(values, tensors, group)) is not None]
    everyones_found: list[list[ReplicaFault]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones_found, differing)
    return min(
        (fault for faults in everyones_found for fault in faults),
        key=lambda fault: (not fault.is_outvoted, order(fault.parameter), fault.rank),
    )


def _in_group(
    values: torch.Tensor, tensors: list[tuple[str, torch.Tensor]], group: dist.ProcessGroup
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
    differing = [name for (name, _), one, known in zip(tensors, mine, usual, strict=True) if one != known]
    return ReplicaFault(
        rank=ranks[me],
        node=everyones[me][0],
        other=ranks[other],
        parameter=differing[0],
        differing=len(differing),
        is_outvoted=count > len(everyones) - count,
    )


def _hashes(tensors: list[tuple[str, torch.Tensor]], places: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[tensors] on the device, int64."""
    result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for number, (_, tensor) in enumerate(tensors):
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
        for part in words.split(CHUNK):
            result[number] = result[number] * _ODD + (part.long() * places[: len(part)]).sum()
    return result


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int64, device=device) * _ODD) | 1
