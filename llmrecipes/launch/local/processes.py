"""Ranks on this machine, one process each: all ranks of a run, over the loopback interface, or those of one node.

torchrun is not used for two reasons: it gives the ranks 30 seconds to exit after a signal, which can be too short to
save, and it turns every exit code into 1.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.io import write_atomic
from llmrecipes.launch.environment import missing
from llmrecipes.launch.local.leftover import LONGEST_DEATH, end_leftover, marks
from llmrecipes.launch.local.spares import Spares
from llmrecipes.launch.ranks import (
    FIRST_PORT,
    LAUNCHER,
    LOOPBACK,
    PORTS,
    SPARE,
    SPARE_RANK,
    STOP_SIGNALS,
    Node,
    Rank,
)

logger = logging.getLogger(__name__)

PROCESSES = "processes.json"
"""Process ids of the ranks that run now, by rank, in the folder of the logs; written where there are spares."""


def rank_environment(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """Variables of torch.distributed, for one rank of a single machine.

    Args:
        rank: from 0.
        world_size: number of ranks.
        port: rendezvous port on the loopback interface.
        threads: OpenMP threads of each rank.
    """
    identity = Rank(rank, world_size, rank, world_size, LOOPBACK, port)
    return {**identity.variables(), "OMP_NUM_THREADS": str(threads)}


@dataclass(frozen=True)
class Grace:
    """How long ranks may take to save and exit after a signal, and how the launcher detects that they saved."""

    seconds: float
    newest: Callable[[], Path | None]
    """The newest published checkpoint."""


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    world_size: int,
    threads: int,
    logs: Path,
    node: Node | None = None,
    grace: Grace | None = None,
    environment: Mapping[str, str] | None = None,
    spares: Spares | None = None,
) -> int:
    """Run `python -m module arguments…` once per rank of this node and wait for all of them.

    The first has this process's output; the others write to `<logs>/rank-<n>.log`. If one fails, the rest are stopped.
    What an earlier start with these logs has left on this machine is ended first.

    Args:
        module: that a rank runs.
        arguments: its arguments.
        world_size: ranks of all nodes together.
        threads: OpenMP threads of each rank.
        logs: existing folder.
        node: which of several this is; None: the only one, with a rendezvous on the loopback interface.
        grace: for ranks that save on a signal; None: they have nothing to save.
        environment: variables of all ranks, except those that are set here.
        spares: that become these ranks, and are started again after the first step; None: there are none.

    Returns:
        0 if every rank here exited with 0, else the code of the first that did not. With `grace`, also 75 if a signal
        came before the ranks had started, or if they were killed after the grace period but a checkpoint was published.

    Raises:
        UserError: ranks were killed after the grace period, and no checkpoint was published since the signal.
    """
    common = {**missing(environment or {}, os.environ), **os.environ, LAUNCHER: str(os.getpid()), **marks(logs)}
    end_leftover(logs, () if spares is None else spares.pids)
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        if node is None:
            port = stack.enter_context(reserved_port())
            environments = [rank_environment(rank, world_size, port, threads) for rank in range(world_size)]
        else:
            ours = node.ranks(world_size // node.nodes)
            environments = [{**rank.variables(), "OMP_NUM_THREADS": str(threads)} for rank in ours]
        ranks = {variables["RANK"]: variables for variables in environments}
        first = next(iter(ranks))
        if spares is not None:
            ranks[first] = {**ranks[first], **spares.variables}

        def spawn(
            rank: str, variables: Mapping[str, str], spare: socket.socket | None = None
        ) -> subprocess.Popen[bytes]:
            with ExitStack() as opened:
                log = None if rank == first else opened.enter_context(_log(logs, rank).open("ab"))
                # A rank starts with it blocked, because Python would raise KeyboardInterrupt until it has a handler.
                opened.callback(
                    signal.pthread_sigmask,
                    signal.SIG_SETMASK,
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]),
                )
                return subprocess.Popen(
                    [sys.executable, "-m", module, *arguments, *([] if spare is None else [SPARE])],
                    env={**common, **variables},
                    stdin=None if spare is None else spare.fileno(),
                    stdout=log,
                    stderr=log,
                    pass_fds=() if spares is None or rank != first else (spares.write_end,),
                )

        def spawn_spare(rank: str, connection: socket.socket) -> subprocess.Popen[bytes]:
            variables = {name: value for name, value in ranks[rank].items() if name != "RANK"}
            return spawn(rank, {**variables, SPARE_RANK: rank}, connection)

        signals = stack.enter_context(_forwarded_signals(processes))
        taken = {} if spares is None else spares.take(ranks)
        for rank, variables in ranks.items():
            processes.append(taken.get(rank) or spawn(rank, variables))
        if signals.first is not None:  # some ranks were started after it
            signals.forward(signals.first, None)
        started = dict(zip(ranks, processes, strict=True))
        if spares is not None:
            write_atomic(logs / PROCESSES, json.dumps({rank: process.pid for rank, process in started.items()}) + "\n")

        def watch_spares(selector: selectors.BaseSelector) -> None:
            if spares is not None:
                spares.watch(selector, list(ranks), spawn_spare)

        return _wait(started, logs, signals, grace, watch_spares)


def _wait(
    ranks: dict[str, subprocess.Popen[bytes]],
    logs: Path,
    signals: _Signals,
    grace: Grace | None,
    watch_more: Callable[[selectors.BaseSelector], None],
) -> int:
    first = next(iter(ranks))
    first_failure = int(ExitCode.DONE)
    deadline: float | None = None
    newest_then: Path | None = None
    waiting = dict(ranks)
    with ExitStack() as opened:
        selector = opened.enter_context(selectors.DefaultSelector())
        selector.register(signals.wake, selectors.EVENT_READ)
        for name, process in ranks.items():
            handle = os.pidfd_open(process.pid)
            opened.callback(os.close, handle)
            selector.register(handle, selectors.EVENT_READ, name)
        watch_more(selector)
        while waiting:
            ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready and grace is not None:
                return _end(waiting, grace, newest_then)
            for key, _ in ready:
                if callable(key.data):
                    key.data()
                    continue
                if key.data is None:
                    selector.unregister(key.fd)
                    if grace is not None:
                        deadline = time.monotonic() + grace.seconds
                        newest_then = grace.newest()
                    continue
                selector.unregister(key.fd)
                code = waiting.pop(key.data).wait()
                if code == 0 or first_failure:
                    continue
                if code == ExitCode.REQUEUE:
                    first_failure = code
                    continue  # all have the stop signal, and exit by themselves
                first_failure = _failure(code, None if key.data == first else _log(logs, key.data), key.data, grace)
                # The others wait in a collective for the failed one.
                for other in waiting.values():
                    other.kill()
    return first_failure


def _failure(code: int, log: Path | None, rank: str, grace: Grace | None) -> int:
    """The exit code for the first rank that failed, and a message about it.

    Args:
        code: of the rank; below 0 the signal that killed it.
        log: its output, where that is not shown.
    """
    if grace is not None and -code in STOP_SIGNALS:
        # Every rank has handlers for these before any of them runs the first step.
        logger.warning("stopped before training began; nothing is lost, run the same command again")
        return int(ExitCode.REQUEUE)
    failure = code if code > 0 else 128 - code
    if log is not None:
        logger.error("rank %s ended first, with code %d: see %s", rank, failure, log)
    elif code < 0:  # otherwise it has printed the reason itself
        logger.error("rank %s was killed by signal %d (%s)", rank, -code, signal.strsignal(-code))
    return failure


def _end(waiting: dict[str, subprocess.Popen[bytes]], grace: Grace, newest_then: Path | None) -> int:
    """Kill the ranks that did not exit in time."""
    ranks = ", ".join(f"{name} ({psutil.Process(process.pid).status()})" for name, process in waiting.items())
    for process in waiting.values():
        process.kill()
    for process in waiting.values():
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel, for example on a dead file system
            process.wait(LONGEST_DEATH)
    newest = grace.newest()
    what = f"ranks did not exit within {grace.seconds:g} s of the signal and were killed: {ranks}"
    if newest is not None and newest != newest_then:
        logger.error("%s; the state is saved: %s", what, newest)
        return int(ExitCode.REQUEUE)
    raise UserError(
        f"{what}; nothing was saved after the signal, newest checkpoint: {newest or 'none'}",
        where="train.exit_grace_seconds",
        rule="ranks must save and exit within train.exit_grace_seconds of a signal",
        fix="run the same command again: it resumes from the newest checkpoint; if a save takes longer, set a larger "
        "train.exit_grace_seconds",
        code=ExitCode.TERMINATED,
    )


class _Signals:
    """Forwards signals to the ranks; `wake` becomes readable with the first."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self.first: int | None = None
        self.wake, self._written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def forward(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or number
        # A terminal sends Ctrl-C to every process of the group, so the ranks already have it; forwarded as SIGTERM it
        # does not count as the second Ctrl-C.
        passed_on = signal.SIGTERM if number == signal.SIGINT else number
        for process in self._processes:
            # Not Popen.send_signal, which reaps a process that has ended: `_wait` could no longer open its pidfd.
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, passed_on)
        with suppress(BlockingIOError):
            os.write(self._written, b"s")

    def close(self) -> None:
        os.close(self.wake)
        os.close(self._written)


@contextmanager
def _forwarded_signals(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[_Signals]:
    signals = _Signals(processes)
    before = {number: signal.signal(number, signals.forward) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.close()


def _log(logs: Path, rank: str) -> Path:
    return logs / f"rank-{rank}.log"


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port for the rendezvous on the loopback interface; no other launcher gets it while the context is open.

    The first rank binds it some seconds later, when it has imported torch, with SO_REUSEADDR.
    """
    while True:
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with socket.socket() as holder:
            try:
                holder.bind((LOOPBACK, port))
            except OSError:
                continue
            # Only now: with it, this socket could be bound to a port that another launcher holds.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            yield port
            return
