"""Seconds that a rank waits in collectives, so that what is left of a step is its own work.

All ranks take the same time for a step: the fast ones wait for the slow one in a collective. torch passes all of these
waits, those of messages between pipeline stages too, through `Work.wait`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import Work


class WaitClock:
    """Adds up the waits of the training's threads.

    On a CPU `Work.wait` blocks, and its time is the wait. On a GPU it only makes the stream wait, so an event is
    recorded on the stream before it and another behind it; they are read when the device has passed them anyway.

    Args:
        on_gpu: whether the ranks' collectives are those of a GPU.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.counting = True
        self._on_gpu = on_gpu
        self._seconds = 0.0
        self._threads: dict[int, bool] = {}
        self._free: list[torch.cuda.Event] = []
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, real: Callable[..., Any], work: Any, *arguments: Any, **options: Any) -> Any:
        """`Work.wait`, measured."""
        if not self.counting or not self._is_training():
            return real(work, *arguments, **options)
        if self._on_gpu:
            before, behind = self._event(), self._event()
            before.record()
            result = real(work, *arguments, **options)
            behind.record()
            self._pairs.append((before, behind))
            return result
        started = time.perf_counter()
        try:
            return real(work, *arguments, **options)
        finally:
            self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Seconds since the last call; on a GPU those of waits that the device has passed. Does not wait for it."""
        waiting = []
        for before, behind in self._pairs:
            if behind.query():
                self._seconds += before.elapsed_time(behind) / 1000
                self._free += (before, behind)
            else:
                waiting.append((before, behind))
        self._pairs = waiting
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def _is_training(self) -> bool:
        """Whether this is the main thread or one of autograd's, which Python did not start; a saver's waits are not."""
        number = threading.get_ident()
        known = self._threads.get(number)
        if known is None:
            thread = threading.current_thread()
            known = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
            self._threads[number] = known
        return known


@contextmanager
def waits_counted(*, on_gpu: bool) -> Iterator[WaitClock]:
    """Count the waits of this process while the block runs."""
    clock = WaitClock(on_gpu=on_gpu)
    real = Work.wait

    def wait(work: Work, *arguments: Any, **options: Any) -> Any:
        return clock.wait(real, work, *arguments, **options)

    Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        yield clock
    finally:
        Work.wait = real  # type: ignore[method-assign]
