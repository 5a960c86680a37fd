"""What all ranks have to know alike."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


def of_first_rank(value: Value) -> Value:
    """The value of the first rank; a collective of all ranks."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on some rank; a collective of all ranks."""
    answer = torch.tensor(int(flag), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())
