"""Gloo worlds that live as long as the tests: one process a rank, started once, given one job after another."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
LONGEST_JOB = timedelta(minutes=5)

# Forked from a server that has imported torch and megatron-core, so that 15 ranks do not import them 15 times.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.dist.training"])


class WorldFailed(AssertionError):
    """A rank raised, died, or did not answer in time."""


class GlooWorld:
    """Ranks that wait for jobs.

    Each job has a process group of its own, because groups that nobody uses any more keep their sockets and threads.

    Args:
        size: number of ranks.
        folder: for rendezvous files.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self._size, self._folder = size, folder
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._jobs = 0

    def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module on every rank, in a joined process group; what the first rank returned.

        Raises:
            WorldFailed: with the traceback of the first rank that said one. The next job gets new processes.
        """
        if not self._processes:
            self._start()
        rendezvous = self._folder / f"rendezvous-{self._size}-{self._jobs}"
        self._jobs += 1
        for pipe in self._pipes:
            pipe.send((rendezvous, job, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < self._size:
            missing = [self._pipes[rank] for rank in range(self._size) if rank not in answers]
            ready = wait(missing, LONGEST_JOB.total_seconds())
            problem = None if ready else f"ranks {[self._pipes.index(pipe) for pipe in missing]} did not answer"
            for rank in [self._pipes.index(pipe) for pipe in missing if pipe in ready]:
                pipe = self._pipes[rank]
                try:
                    ok, answers[rank] = pipe.recv()
                except EOFError:
                    ok, answers[rank] = False, "the process died"
                if not ok:
                    problem = problem or f"rank {rank}: {answers[rank]}"
            if problem:
                self.close()
                raise WorldFailed(problem)
        return answers[0]

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        for rank in range(self._size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, self._size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from llmrecipes.platform import select

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    platform = select()
    platform.install()
    while True:
        try:
            rendezvous, job, arguments = pipe.recv()
        except EOFError:  # the tests have ended
            return
        store = dist.FileStore(str(rendezvous), size)
        dist.init_process_group(platform.backend, store=store, rank=rank, world_size=size, timeout=LONGEST_JOB)
        try:
            answer = True, job(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
        dist.destroy_process_group()
        gc.collect()
