"""Forming the process group of all ranks."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from llmrecipes.engine.base import Platform
from llmrecipes.errors import UserError
from llmrecipes.launch.ranks import LOOPBACK

TIMEOUT = timedelta(minutes=30)
LONGEST_TELLING = timedelta(seconds=30)
"""How long the first rank waits for others to read why they are refused."""
MOST_NAMED = 8
"""Ranks without a GPU that an error names."""


def connect(platform: Platform, timeout: timedelta) -> None:
    """Join the ranks that a launcher started, or form a world of one.

    Args:
        platform: device of this rank, and backend.
        timeout: of the rendezvous and of collectives.

    Raises:
        UserError: some ranks have a GPU and others do not.
    """
    store, rank, size = _rendezvous(timeout)
    require_same_device(store, rank, size, platform.name)
    on_gpu = platform.name == "cuda"
    dist.init_process_group(
        platform.backend,
        timeout=timeout,
        store=store,
        rank=rank,
        world_size=size,
        # NCCL connects here, so a broken network is found before the model is built.
        device_id=platform.device if on_gpu else None,
    )
    if on_gpu:
        _unbind_from_device()


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    if "WORLD_SIZE" in os.environ:
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if rank == 0 and os.environ["MASTER_ADDR"] == LOOPBACK:
            return _loopback_store(port, size, timeout), rank, size
        result: tuple[dist.Store, int, int] = next(dist.rendezvous("env://", timeout=timeout))
        return result
    return dist.HashStore(), 0, 1  # one process needs no port


def _loopback_store(port: int, size: int, timeout: timedelta) -> dist.Store:
    """The store of ranks on this machine. torch's own would listen on all interfaces, without a password.

    Raises:
        UserError: the port is in use.
    """
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=max(128, size))
    except OSError as error:
        where = f"{LOOPBACK}:{port}"
        fix = "stop what listens there (ss -ltnp), or start again for another port"
        raise UserError(f"the port cannot be used: {error.strerror}", where=where, fix=fix) from error
    # The store closes it.
    return dist.TCPStore(LOOPBACK, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def require_same_device(store: dist.Store, rank: int, size: int, device: str) -> None:
    """Check that all ranks have GPUs, or none. Without a process group: NCCL and gloo could not form one together.

    Args:
        store: of the rendezvous.
        rank: this one.
        size: number of ranks.
        device: `cpu` or `cuda`.

    Raises:
        UserError: on all ranks, with the ranks and hosts that have no GPU.
    """
    if size == 1:
        return
    number = store.add(f"devices/{device}", 1)
    store.set(f"devices/{device}/{number}", f"{rank} ({socket.gethostname()})")
    if store.add("devices", 1) == size:
        store.set("devices/known", "")
    store.wait(["devices/known"], TIMEOUT)
    gpus = store.add("devices/cuda", 0)
    if 0 < gpus < size:
        some = [store.get(f"devices/cpu/{number}").decode() for number in range(1, min(size - gpus, MOST_NAMED) + 1)]
        without = ", ".join(some) + (", …" if size - gpus > MOST_NAMED else "")
        if store.add("devices/told", 1) == size:
            store.set("devices/all told", "")
        if rank == 0:  # the store ends with its process
            with suppress(RuntimeError):
                store.wait(["devices/all told"], LONGEST_TELLING)
        raise UserError(
            f"{gpus} of {size} ranks have a GPU; torch sees none on rank {without}",
            where="torch.cuda",
            rule="all ranks of a run train on the same kind of device",
            fix="llmrecipes doctor on those nodes; nvidia-smi there shows whether the driver answers",
        )


def _unbind_from_device() -> None:
    """Let each later group connect when its members first use it.

    While the process group is bound to a device, torch splits every later group off its communicator by a collective
    of all ranks: for 16,384 of them more than 10,000 times, one after the other. For a gloo group only the ranks
    outside of it take part in that collective, so it never ends.
    """
    group: Any = dist.group.WORLD
    group.bound_device_id = None
