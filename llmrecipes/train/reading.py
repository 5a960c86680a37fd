"""Reading that may fail on one rank: all ranks learn of it between two steps, when the state can be saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Batch
from llmrecipes.errors import UserError


class ReadAhead:
    """Micro-batches of this rank, read one step before they are used.

    So a rank that cannot read knows it while it computes its last whole step, and its flag travels with that step's
    loss. Each micro-batch that is used makes room for one, so reading stays spread over the step.

    Args:
        batches: micro-batches from the next step on.
        per_step: of them in a step.
        steps: that are left.
    """

    def __init__(self, batches: Iterator[Batch], per_step: int, steps: int) -> None:
        self.failure: UserError | None = None
        self._source = islice(batches, per_step * steps)
        self._ready: deque[Batch] = deque()
        for _ in range(per_step):
            self._read()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            raise self.failure or StopIteration
        batch = self._ready.popleft()
        self._read()
        return batch

    def _read(self) -> None:
        if self.failure is not None:
            return
        try:
            self._ready.extend(islice(self._source, 1))
        except UserError as failure:
            self.failure = failure


class HeldOut:
    """Validation micro-batches of this rank; where they cannot be read, empty ones that weigh nothing.

    Args:
        batches: to read.
        shape: of a micro-batch.
    """

    def __init__(self, batches: Iterator[Batch], shape: tuple[int, int]) -> None:
        self.failure: UserError | None = None
        self._source, self._shape = batches, shape

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.failure is None:
            try:
                return next(self._source)
            except UserError as failure:
                self.failure = failure
        ids = torch.zeros(self._shape, dtype=torch.int64)
        return {"tokens": ids, "labels": ids, "loss_mask": torch.zeros(self._shape), "position_ids": ids}


def first_failure(failure: UserError | None, device: torch.device) -> UserError | None:
    """What some rank could not read, the same on every rank; None where all could. All ranks have to call it.

    Args:
        failure: of this rank.
        device: where collectives are.
    """
    # The failure that forbids a restart goes first.
    mine = -1 if failure is None else (int(failure.code) << 32) + dist.get_rank()
    worst = torch.tensor(mine, dtype=torch.int64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst.item() < 0:
        return None
    told = [failure]
    dist.broadcast_object_list(told, src=int(worst.item()) & 0xFFFFFFFF)
    return told[0]
