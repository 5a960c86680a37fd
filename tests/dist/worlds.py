"""The pool of rank processes: worlds that live as long as the tests, and run one job after another.

Ranks are forked from a server that has imported torch and megatron-core, so that 15 ranks do not import these
15 times.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 4, 8)
LONGEST_JOB = timedelta(minutes=5)
LOOPBACK = "127.0.0.1"

_CONTEXT = get_context("forkserver")
# What each rank would import by itself; the last is for context parallelism.
_CONTEXT.set_forkserver_preload(
    ["tests.dist.training", "tests.dist.worlds", "llmrecipes.engine.megatron.backend", "torch.nn.attention.bias"]
)


class WorldFailed(AssertionError):
    """A rank raised, died, or did not answer in time."""


class Job:
    """A call that runs on every rank of a world.

    Args:
        pipes: to the ranks.
        processes: the ranks.
        close: ends the world's processes.
    """

    def __init__(self, pipes: list[Connection], processes: list[Any], close: Callable[[], None]) -> None:
        self._pipes, self._processes, self._close = pipes, processes, close
        self._answers: dict[int, tuple[float, bool, Any]] = {}  # time, whether it returned, and the result
        self._said: deque[tuple[int, tuple[Any, ...]]] = deque()

    def said(self) -> tuple[int, tuple[Any, ...]]:
        """The next message of a rank (`say`), and its rank.

        Raises:
            WorldFailed: all ranks have ended without one.
        """
        while not self._said:
            if len(self._answers) == len(self._pipes):
                self._close()
                raise WorldFailed(f"nothing was said: {self._answers}")
            self._receive()
        return self._said.popleft()

    def everything_said(self) -> list[tuple[int, tuple[Any, ...]]]:
        """The messages that have not been read yet."""
        return list(self._said)

    def kill(self, rank: int) -> None:
        """Kill a rank, as if its machine failed."""
        os.kill(self._processes[rank].pid, signal.SIGKILL)

    def result(self) -> Any:
        """Return value of the first rank.

        Raises:
            WorldFailed: with the first traceback of a rank. The next job gets new processes.
        """
        while len(self._answers) < len(self._pipes) and all(ok for _, ok, _ in self._answers.values()):
            self._receive()
        failures = [(when, rank, answer) for rank, (when, ok, answer) in self._answers.items() if not ok]
        if failures:
            self._close()
            _, rank, answer = min(failures)
            raise WorldFailed(f"rank {rank}: {answer}")
        return self._answers[0][2]

    def end(self) -> list[int]:
        """Wait for all ranks; 0 for each that returned, 1 for one that raised, the exit code of one that died."""
        while len(self._answers) < len(self._pipes):
            self._receive()
        died = {rank: process.exitcode for rank, process in enumerate(self._processes) if process.exitcode is not None}
        codes = [died.get(rank, 0 if self._answers[rank][1] else 1) for rank in range(len(self._pipes))]
        if any(codes):
            self._close()
        return codes

    def _receive(self) -> None:
        missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in self._answers}
        ready = wait(list(missing), LONGEST_JOB.total_seconds())
        if not ready:
            self._close()
            raise WorldFailed(f"ranks {list(missing.values())} did not answer")
        for pipe, rank in missing.items():
            if pipe not in ready:
                continue
            try:
                kind, content = pipe.recv()
            except (EOFError, OSError):
                self._processes[rank].join()
                kind, content = "answer", (time.monotonic(), False, "the process died")
            if kind == "said":
                self._said.append((rank, content))
            else:
                self._answers[rank] = content


class GlooWorld:
    """Ranks that wait for jobs. They are started with the first one, and again after one that failed.

    Each job has a new process group, because unused groups keep their sockets and threads. They meet in a store that is
    in this process, so that it outlives a rank that is killed; a file would be looked at again and again.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._jobs = 0

    def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module on every rank, in a joined process group; returns the first rank's result.

        Raises:
            WorldFailed: with the first traceback of a rank.
        """
        return self.start(job, *arguments).result()

    def start(self, job: Callable[..., Any], *arguments: Any, group: bool = True) -> Job:
        """Start a call of a function on every rank.

        Args:
            job: function of a module.
            arguments: its arguments.
            group: whether the ranks join a process group.
        """
        if not self._processes:
            self._start_ranks()
        rendezvous = (self._store.port, f"job-{self._jobs}") if group else None
        self._jobs += 1
        for pipe in self._pipes:
            pipe.send((rendezvous, job, arguments))
        return Job(self._pipes, self._processes, self.close)

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start_ranks(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        for rank in range(self._size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, self._size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


@contextmanager
def pool() -> Iterator[dict[int, GlooWorld]]:
    """Worlds by number of ranks."""
    # The server keeps its initial environment, and does not have pytest's path.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        forkserver.ensure_running()
    worlds = {size: GlooWorld(size) for size in SIZES}
    try:
        yield worlds
    finally:
        for world in worlds.values():
            world.close()


_to_the_test: Connection | None = None


def say(*words: Any) -> None:
    """Send a message to the test during a job: `Job.said` returns it."""
    assert _to_the_test is not None, "called outside of a rank"
    _to_the_test.send(("said", words))


def freeze_modules() -> None:
    """Exclude the objects of this process from garbage collection, to its end.

    A training and a dry run exclude some too, and end by including all: every later collection of the process would
    look at each module again, for a second.
    """
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)


def _serve(rank: int, size: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker

    from llmrecipes.engine.core.platform import select

    global _to_the_test
    _to_the_test = pipe
    torch.set_num_threads(1)
    platform = select()
    platform.install()
    freeze_modules()  # or each collection below looks at all of them: a fifth of the processor time of a row
    while True:
        try:
            rendezvous, job, arguments = pipe.recv()
        except EOFError:  # the tests have ended
            return
        if rendezvous is not None:
            port, name = rendezvous
            store = dist.PrefixStore(name, dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False))
            dist.init_process_group(platform.backend, store=store, rank=rank, world_size=size, timeout=LONGEST_JOB)
            # A rank whose job ends at once would close connections that another one is still making.
            dist.barrier()
        try:
            ok, answer = True, job(*arguments)
        except Exception:  # raised again by the test that started the job; this process serves the next one
            ok, answer = False, traceback.format_exc()
        pipe.send(("answer", (time.monotonic(), ok, answer)))
        # megatron-core keeps them per process, sized for the layers of its first model
        get_moe_metrics_tracker().metrics.clear()
        if rendezvous is not None:
            dist.destroy_process_group()
        gc.collect()
