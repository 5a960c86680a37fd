"""Data reads that may fail on one rank: all ranks learn of it between two steps, when the state can be saved."""

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

    A rank whose read fails knows it while it computes its last complete step, and its flag travels with that step's
    loss. One micro-batch is read for each one used, so that reading stays spread over the step.

    Args:
        batches: micro-batches from the next step on.
        per_step: micro-batches in a step.
        steps: remaining steps.
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
    """Validation micro-batches of this rank; if they cannot be read, fully masked ones.

    Args:
        batches: to read.
        shape: [micro_batch_size, seq_length].
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
    """The read failure of some rank, the same on every rank; None if there is none. A collective of all ranks.

    Args:
        failure: of this rank.
        device: for the collective.
    """
    # A failure that forbids a restart takes precedence.
    own = -1 if failure is None else (int(failure.code) << 32) + dist.get_rank()
    worst = torch.tensor(own, dtype=torch.int64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst.item() < 0:
        return None
    shared = [failure]
    dist.broadcast_object_list(shared, src=int(worst.item()) & 0xFFFFFFFF)
    return shared[0]
