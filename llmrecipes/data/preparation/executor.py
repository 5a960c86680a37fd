"""What does the numbered items of a preparation: this process, or processes of this machine.

An item is a pure function of its number and of files: done twice, it writes the same bytes under the same name. So an
executor may do one again whenever whoever did it is gone.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from llmrecipes.errors import UserError

_AHEAD = 2
"""Items in flight for each worker, so that none waits for the next."""

REPORT_SECONDS = 5.0
"""Between lines about the progress of items."""
EXECUTORS = {"ray": "llmrecipes.data.preparation.ray_cluster:Ray"}
"""Classes by their name for `--on`, made of the most items at a time or None."""


class Executor(Protocol):
    """Does items."""

    @property
    def workers(self) -> int:
        """Items at a time."""

    @property
    def remote(self) -> bool:
        """Whether the workers may be on other machines: a shard is read where it is encoded."""

    def map[T, R](self, function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        """The results in the order of the items, which are taken as workers become free. An item whose worker was
        killed is done again.

        Raises:
            Exception: the first that `function` raises, in the order of the items.
            UserError: no worker is left.
        """

    def close(self) -> None:
        """End the workers at once, whatever they do."""


def in_order[T, C, R](
    items: Iterable[T],
    workers: Callable[[], int],
    start: Callable[[T], C],
    result: Callable[[deque[C]], R],
    cancel: Callable[[C], object],
) -> Generator[R, None, None]:
    """The results of items in their order, with a few more in flight than there are workers.

    Args:
        items: taken as workers become free.
        workers: how many there are now.
        start: begins an item.
        result: waits for the first of those that were begun.
        cancel: gives one up, when nobody wants its result any more.
    """
    following = iter(items)
    begun = deque[C]()
    try:
        while True:
            for item in islice(following, max(0, _AHEAD * workers() + 1 - len(begun))):
                begun.append(start(item))
            if not begun:
                return
            done = result(begun)
            begun.popleft()
            yield done
    finally:
        for call in begun:
            cancel(call)


class ThisProcess:
    """Does them here."""

    workers = 1
    remote = False

    def map[T, R](self, function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        """One after the other."""
        yield from map(function, items)

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class _Call[T, R]:
    item: T
    future: Future[R]


class Processes:
    """Does them in processes of this machine, which start when a second item is there.

    If one is killed, usually because memory ran out, the pool is started again with one process fewer.

    Args:
        workers: processes.
        log: receives a line when one was killed.
    """

    remote = False

    def __init__(self, workers: int, log: Callable[[str], None]) -> None:
        self.workers = workers
        self._asked = workers
        self._log = log
        self._pool: ProcessPoolExecutor | None = None

    def map[T, R](self, function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        """In the processes; a single item, and everything by a single worker, in this one."""
        if self._asked == 1:
            yield from map(function, items)
            return
        following = iter(items)
        first = list(islice(following, 2))
        if len(first) < 2:
            yield from map(function, first)
            return

        def start(item: T) -> _Call[T, R]:
            return _Call(item, self._submit(function, item))

        def result(begun: deque[_Call[T, R]]) -> R:
            while True:
                try:
                    return begun[0].future.result()
                except BrokenProcessPool:
                    self._go_on_with_fewer()
                for call in begun:
                    if isinstance(call.future.exception(), BrokenProcessPool):
                        call.future = self._submit(function, call.item)

        every = chain(first, following)
        yield from in_order(every, lambda: self.workers, start, result, lambda call: call.future.cancel())

    def close(self) -> None:
        """Kill the processes."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        for process in list((pool._processes or {}).values()):  # Python 3.14 has kill_workers()
            process.kill()
        pool.shutdown(cancel_futures=True)

    def _submit[T, R](self, function: Callable[[T], R], item: T) -> Future[R]:
        if self._pool is None:
            # Spawned, not forked: a fork would copy locks held by threads of loaded libraries.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=live_with_parent)
        try:
            return self._pool.submit(function, item)
        except BrokenProcessPool as error:  # as if it had broken a moment later
            future: Future[R] = Future()
            future.set_exception(error)
            return future

    def _go_on_with_fewer(self) -> None:
        self.close()
        self.workers -= 1
        if not self.workers:
            raise UserError(
                f"{self._asked} worker processes were killed, usually by the kernel because memory ran out",
                where="--workers",
                fix=f"run it again to continue, with fewer than --workers {self._asked} or more memory",
                again=True,
            )
        self._log(f"a worker process was killed, usually because memory ran out; going on with {self.workers}")


def live_with_parent() -> None:
    """In a worker: ignore signals that the parent handles, and exit with the parent if it is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
