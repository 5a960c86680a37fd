"""Ranks on this machine, one process each, over the loopback interface.

torchrun would do, but for two things that a run here needs: it gives the ranks 30 seconds to end after a signal, which
can be too short to save, and it turns every exit code into 1.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from llmrecipes.errors import ExitCode

logger = logging.getLogger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


def rank_environment(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """What torch.distributed reads, for one rank of a single machine.

    Args:
        rank: from 0.
        world_size: ranks in all.
        port: rendezvous port on the loopback interface.
        threads: OpenMP threads of each rank.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads),
    }


def run_ranks(module: str, arguments: Sequence[str], *, world_size: int, threads: int, logs: Path) -> int:
    """Run `python -m module arguments…` once a rank and wait for all of them.

    Rank 0 has this process's output; the others write to `<logs>/rank-<n>.log`. The first that fails ends the rest.

    Returns:
        0 if every rank ended with 0, else the code of the first rank that did not.
    """
    port = _free_port()
    processes = []
    for rank in range(world_size):
        environment = {**os.environ, **rank_environment(rank, world_size, port, threads)}
        log = None if rank == 0 else _log(logs, rank).open("ab")
        processes.append(
            subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment, stdout=log, stderr=log)
        )
        if log is not None:
            log.close()
    with _forward_signals(processes):
        return _wait(processes, logs)


def _wait(processes: list[subprocess.Popen[bytes]], logs: Path) -> int:
    first_failure = int(ExitCode.DONE)
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)
        while waiting := selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fd)
                os.close(key.fd)
                code = key.data.wait()
                if code == 0 or first_failure:
                    continue
                first_failure = code if code > 0 else 128 - code
                if first_failure == ExitCode.REQUEUE:
                    continue  # all were asked to stop, and end by themselves
                if rank := processes.index(key.data):
                    logger.error("rank %d ended first, with code %d: see %s", rank, first_failure, _log(logs, rank))
                # The others wait in a collective for the one that is gone.
                for other in waiting.values():
                    other.data.kill()
    return first_failure


@contextmanager
def _forward_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    # A terminal sends its Ctrl-C to every process of the group, so the ranks have it already.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
