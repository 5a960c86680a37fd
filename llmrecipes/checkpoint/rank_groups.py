"""Values from all ranks to the first and back, over gloo groups that stay small.

gloo connects every pair of a group's ranks: in one group of 16,384 each rank would have 16,383 sockets, and look up as
many addresses in the store. Here ranks are in rows of about √N neighbours, and the first ranks of the rows in a group
of their own: 254 sockets at most with 16,384 ranks, and two messages from any rank to the first.

The hashes of a checkpoint are compared on all ranks, because terabytes would take one rank hours. The first rank
chooses the checkpoint, because ranks may see different listings of a shared file system; every rank reads its share of
the files, which are opened by the names in the manifest.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping
from datetime import timedelta
from itertools import chain
from math import isqrt
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from llmrecipes.checkpoint.manifest import Entry, FileRecord, InvalidCheckpoint, Manifest, mismatch
from llmrecipes.checkpoint.store import CheckpointStore, DamagedCheckpoint

T = TypeVar("T")

SMALL = 64
"""Ranks up to which one group has all of them."""


class Ranks:
    """All ranks of the default process group; creating it is a collective of all of them.

    Every rank makes the same calls in the same order, from one thread at a time.

    Args:
        timeout: timeout of a rank that waits for the others.
        row: ranks in a row; by default √N, or all of few.

    Raises:
        RuntimeError: as its methods do: another rank has ended, or did not answer in time.
    """

    def __init__(self, timeout: timedelta, row: int | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        row = row or row_length(self.size)
        # Not by `dist.new_group`: all ranks would wait for each group in turn.
        name = [secrets.token_hex(8)]
        dist.broadcast_object_list(name, src=0)
        store = dist.PrefixStore(f"llmrecipes/{name[0]}", dist.distributed_c10d._get_default_store())
        number, place = divmod(self.rank, row)
        size = min(row, self.size - number * row)
        self._row = _Group(dist.PrefixStore(f"row/{number}", store), place, size, timeout)
        self._firsts: _Group | None = None
        if place == 0 and row < self.size:
            self._firsts = _Group(dist.PrefixStore("firsts", store), number, -(-self.size // row), timeout)

    def gather(self, value: T) -> list[T] | None:
        """Values of all ranks in order, on the first rank; None on the others."""
        of_row = self._row.gather(value)
        if of_row is None or self._firsts is None:
            return cast("list[T] | None", of_row)
        rows = self._firsts.gather(of_row)
        return None if rows is None else list(chain.from_iterable(rows))

    def broadcast(self, value: T | None = None) -> T:
        """The first rank's value, on all ranks."""
        held: Any = value if self._firsts is None else self._firsts.broadcast(value)
        return cast(T, self._row.broadcast(held))


class _Group:
    """A gloo group that sends Python objects to and from its first rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._rank, self._size = rank, size
        # torch's type declarations lack the methods that it inherits.
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def gather(self, value: Any) -> list[Any] | None:
        if self._rank:
            data = _bytes(value)
            for tensor in (torch.tensor([data.numel()]), data):
                self._gloo.send([tensor], 0, 0).wait()
            return None
        return [value, *(pickle.loads(self._received(rank)) for rank in range(1, self._size))]  # noqa: S301 - our ranks

    def broadcast(self, value: Any) -> Any:
        data = _bytes(value) if self._rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        self._gloo.broadcast([length], _FROM_FIRST).wait()
        if self._rank:
            data = torch.empty(int(length), dtype=torch.uint8)
        self._gloo.broadcast([data], _FROM_FIRST).wait()
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own ranks

    def _received(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._gloo.recv([length], rank, 0).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self._gloo.recv([data], rank, 0).wait()
        return data.numpy().tobytes()


_FROM_FIRST = dist.BroadcastOptions()


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def row_length(size: int) -> int:
    """Ranks in a row."""
    return size if size <= SMALL else isqrt(size - 1) + 1


def sockets(size: int) -> int:
    """Most connections of a rank."""
    row = row_length(size)
    return row - 1 + (0 if row == size else -(-size // row) - 1)


LEAST_WAIT = timedelta(minutes=10)
SLOWEST = 10e6
"""Bytes a second with which a rank is waited for: a disk that is slower has failed."""


def survey(store: CheckpointStore) -> tuple[Entry | None, list[DamagedCheckpoint]]:
    """`CheckpointStore.survey` on the first rank, while all others run `serve`."""
    if dist.get_world_size() == 1:
        return store.survey()
    try:
        return store.survey(_compare)
    finally:
        _share(None)


def serve() -> None:
    """Compare files on a rank that is not the first, until its survey has ended."""
    while (checkpoint := _share(None)) is not None:
        _verdict(*checkpoint)


def own_share(files: Mapping[str, FileRecord], rank: int, ranks: int) -> list[str]:
    """Files that a rank compares: neighbours in the manifest, and as many bytes as the other ranks have.

    A file is whole on one rank; with as many ranks as have written, each gets about the one that it reads next.
    """
    total = sum(record.size for record in files.values())
    before = 0
    names = []
    for name, record in files.items():
        if min((before + record.size / 2) * ranks // max(total, 1), ranks - 1) == rank:
            names.append(name)
        before += record.size
    return names


def longest_wait(manifest: Manifest, ranks: int) -> timedelta:
    """How long ranks wait for each other's comparison."""
    largest = max(record.size for record in manifest.files.values())
    return LEAST_WAIT + timedelta(seconds=(manifest.size / ranks + largest) / SLOWEST)


def _compare(path: Path, manifest: Manifest) -> None:
    _share((path, manifest))
    if problem := _verdict(path, manifest):
        raise InvalidCheckpoint(problem)


def _verdict(path: Path, manifest: Manifest) -> str:
    """The first mismatch of any rank, on all ranks; empty without one.

    It uses separate groups, because those of training do not wait long enough.
    """
    ranks = Ranks(longest_wait(manifest, dist.get_world_size()))
    names = own_share(manifest.files, ranks.rank, ranks.size)
    mismatches = ranks.gather(mismatch(path, {name: manifest.files[name] for name in names}))
    return ranks.broadcast(next(filter(None, mismatches), "") if mismatches is not None else None)


def _share(checkpoint: tuple[Path, Manifest] | None) -> tuple[Path, Manifest] | None:
    held = [checkpoint]
    dist.broadcast_object_list(held, src=0)
    return held[0]
