"""Ranks on this machine, one process each: all ranks of a run, over the loopback interface, or those of one node.

torchrun would do, but for two things that a run here needs: it gives the ranks 30 seconds to end after a signal, which
can be too short to save, and it turns every exit code into 1.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from llmrecipes.errors import ExitCode
from llmrecipes.launch.ranks import FIRST_PORT, PORTS, Node, Rank

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
    here = Rank(rank, world_size, rank, world_size, "127.0.0.1", port)
    return {**here.variables(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads)}


def run_ranks(
    module: str, arguments: Sequence[str], *, world_size: int, threads: int, logs: Path, node: Node | None = None
) -> int:
    """Run `python -m module arguments…` once a rank of this node and wait for all of them.

    The first has this process's output; the others write to `<logs>/rank-<n>.log`. The first that fails ends the rest.

    Args:
        module: what a rank runs.
        arguments: its arguments.
        world_size: ranks of all nodes together.
        threads: OpenMP threads of each rank.
        logs: folder that is there.
        node: which of several this is; None: the only one, with ranks that meet on the loopback interface.

    Returns:
        0 if every rank here ended with 0, else the code of the first that did not.
    """
    if node is None:
        port = _free_port()
        environments = [rank_environment(rank, world_size, port, threads) for rank in range(world_size)]
    else:
        ours = node.ranks(world_size // node.nodes)
        environments = [{**rank.variables(), "OMP_NUM_THREADS": str(threads)} for rank in ours]
    processes = []
    for number, variables in enumerate(environments):
        log = None if number == 0 else _log(logs, variables["RANK"]).open("ab")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments], env={**os.environ, **variables}, stdout=log, stderr=log
            )
        )
        if log is not None:
            log.close()
    names = [variables["RANK"] for variables in environments]
    with _forward_signals(processes):
        return _wait(processes, names, logs)


def _wait(processes: list[subprocess.Popen[bytes]], names: Sequence[str], logs: Path) -> int:
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
                if number := processes.index(key.data):
                    log = _log(logs, names[number])
                    logger.error("rank %s ended first, with code %d: see %s", names[number], first_failure, log)
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


def _log(logs: Path, rank: str) -> Path:
    return logs / f"rank-{rank}.log"


def _free_port() -> int:
    """A port for the rendezvous, which begins when ranks have imported torch, some seconds later."""
    while True:
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
