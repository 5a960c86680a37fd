"""The process group of a run: ranks, model-parallel groups and random states."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from llmrecipes.platform import Platform

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among all."""

    rank: int
    size: int
    data_parallel_rank: int
    data_parallel_size: int

    @property
    def is_first(self) -> bool:
        """The rank that prints, tracks and publishes."""
        return self.rank == 0


@contextmanager
def join(platform: Platform, seed: int) -> Iterator[World]:
    """Join the ranks a launcher started (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), or be a world of one.

    Args:
        platform: already installed.
        seed: seeds dropout, the same on every data-parallel rank and different over tensor-parallel ranks.
    """
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(platform.backend, timeout=TIMEOUT)
    else:
        # One process needs no port.
        dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
