"""Replicas of a weight on several ranks must be bit-identical: their digests are compared, not their data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from llmrecipes.engine.base import Shard
from llmrecipes.verify.spec import ReplicaDifference
from llmrecipes.verify.tensors import readable

Digest = tuple[str, tuple[int, ...], bytes]
"""Global name, offset in the global tensor, and a hash of the bytes."""


class _Main(NamedTuple):
    rank: int
    digest: bytes


def digests(shards: Iterable[Shard]) -> list[Digest]:
    """Hashes of this rank's weights: about 100 bytes per tensor, whatever its size."""
    return [
        (shard.name, shard.offset, hashlib.blake2b(shard.tensor.numpy().tobytes(), digest_size=16).digest())
        for shard in shards
    ]


def gathered(own: list[Digest]) -> list[list[Digest]]:
    """Every rank's digests; a collective of all ranks."""
    by_rank: list[list[Digest]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, own)
    return by_rank


def first_difference(by_rank: Sequence[Sequence[Digest]], step: int) -> ReplicaDifference | None:
    """The first tensor, by rank and model order, whose replicas differ.

    Args:
        by_rank: digests of each rank.
        step: optimizer steps so far.
    """
    main: dict[tuple[str, tuple[int, ...]], _Main] = {}
    copies, different = 0, []
    for rank, own in enumerate(by_rank):
        for name, offset, digest in own:
            known = main.setdefault((name, offset), _Main(rank, digest))
            copies += known.rank != rank
            if known.digest != digest:
                different.append((name, rank, known.rank))
    if not different:
        return None
    key, rank, other = different[0]
    name, layer = readable(key)
    return ReplicaDifference(
        step=step, tensor=name, layer=layer, rank=rank, main_rank=other, differing=len(different), copies=copies
    )
