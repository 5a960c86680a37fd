"""Comparing the hashes of a checkpoint on all ranks: terabytes would take one rank hours.

The first rank chooses the checkpoint, because ranks may see different listings of a shared file system; every rank
reads its share of the files, which are opened by the names in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from llmrecipes.checkpoint.inspection import Entry, InvalidCheckpoint, mismatch
from llmrecipes.checkpoint.manifest import FileRecord, Manifest
from llmrecipes.checkpoint.ranks import Ranks
from llmrecipes.checkpoint.store import CheckpointStore, Damaged

LEAST_WAIT = timedelta(minutes=10)
SLOWEST = 10e6
"""Bytes a second with which a rank is waited for: a disk that is slower has failed."""


def survey(store: CheckpointStore) -> tuple[Entry | None, list[Damaged]]:
    """`CheckpointStore.survey` on the first rank, while all others run `serve`."""
    if dist.get_world_size() == 1:
        return store.survey()
    try:
        return store.survey(_compare)
    finally:
        _share(None)


def serve() -> None:
    """Compare files on a rank that is not the first, until its survey has ended."""
    while (asked := _share(None)) is not None:
        _verdict(*asked)


def own_share(files: Mapping[str, FileRecord], rank: int, ranks: int) -> list[str]:
    """Files that a rank compares: neighbours in the manifest, and as many bytes as the other ranks have.

    A file is whole on one rank; with as many ranks as have written, each gets about the one that it reads next.
    """
    total, before, found = sum(record.size for record in files.values()), 0, []
    for name, record in files.items():
        if min((before + record.size / 2) * ranks // max(total, 1), ranks - 1) == rank:
            found.append(name)
        before += record.size
    return found


def longest_wait(manifest: Manifest, ranks: int) -> timedelta:
    """How long ranks wait for each other's comparison."""
    largest = max(record.size for record in manifest.files.values())
    return LEAST_WAIT + timedelta(seconds=(manifest.size / ranks + largest) / SLOWEST)


def _compare(path: Path, manifest: Manifest) -> None:
    _share((path, manifest))
    if problem := _verdict(path, manifest):
        raise InvalidCheckpoint(problem)


def _verdict(path: Path, manifest: Manifest) -> str:
    """The first mismatch that any rank has found, on all ranks; empty without one.

    Over groups of its own, because those of training do not wait long enough.
    """
    ranks = Ranks(longest_wait(manifest, dist.get_world_size()))
    names = own_share(manifest.files, ranks.rank, ranks.size)
    found = ranks.gather(mismatch(path, {name: manifest.files[name] for name in names}))
    return ranks.broadcast(next(filter(None, found), "") if found is not None else None)


def _share(asked: tuple[Path, Manifest] | None) -> tuple[Path, Manifest] | None:
    held = [asked]
    dist.broadcast_object_list(held, src=0)
    return held[0]
