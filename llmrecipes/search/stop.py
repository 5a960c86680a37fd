"""Stop signals of a search, which end a wait."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from llmrecipes.faults.signals import STOPPING


class Stop:
    """Whether a stop signal has arrived; waits for one."""

    def __init__(self) -> None:
        self.requested = False
        self._final = False
        self._read, self._written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self._final and number == signal.SIGINT:
            os._exit(128 + number)  # jobs save by themselves, and are found by --resume
        self.requested = True
        with suppress(BlockingIOError):
            os.write(self._written, b"s")

    def wait(self, seconds: float) -> None:
        """Wait so long, or until a signal arrives."""
        select.select([self._read], [], [], seconds)

    def again(self) -> None:
        """From now on wait for something else; another Ctrl-C ends this process."""
        self._final = True
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._written)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn stop signals into a flag while the block runs."""
    stop = Stop()
    before = {number: signal.signal(number, stop.receive) for number in STOPPING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()
