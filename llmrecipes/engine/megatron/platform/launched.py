"""The process group of the ranks that a launcher started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def connect(backend: str, timeout: timedelta) -> None:
    """Join the ranks that a launcher started (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, …), or form a world of one."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        # One process needs no port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
