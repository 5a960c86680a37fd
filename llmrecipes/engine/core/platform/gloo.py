"""One network device of gloo for all process groups of a rank."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from llmrecipes.engine.core.platform.patching import replace

THREADS = 2
"""Of each group, for its collectives; torch's own number for one device. They wait without waking."""


def share_device() -> None:
    """Have every later group use the same device.

    torch makes a device for each group, and with it a thread that looks a hundred times a second whether something
    has arrived (gloo, transport/tcp/loop.cc). A rank has about 20 groups, also if it is the only one: eight ranks that
    wait take a quarter of a core for this, and a hundredth with one device each.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's type declarations lack its options
    real = gloo.__init__

    def init(group: Any, store: dist.Store, rank: int, size: int, timeout: Any = dist.default_pg_timeout) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            options = gloo._Options()
            options._devices = [_device()]
            options._threads = THREADS
            options._timeout = timeout
        real(group, store, rank, size, options)

    replace("torch.distributed.ProcessGroupGloo", "__init__", init)


@cache
def _device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()
