"""Signals that stop a run: it saves once at the next step boundary and exits with `ExitCode.REQUEUE`.

SIGTERM comes from Slurm, Kubernetes and torchrun, SIGUSR1 from `sbatch --signal`, SIGINT from a terminal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from llmrecipes.launch.ranks import STOP_SIGNALS as STOPPING

PRESS_INTERVAL = 1.0
"""Seconds within which a second SIGINT is the same Ctrl-C: a terminal sends it to all ranks, and a launcher such as
torchrun immediately forwards its own copy to them."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after a second SIGINT: nothing was saved since the last checkpoint."""


class StoppedEarly(BaseException):
    """A stop signal arrived before training, when there is nothing to save.

    Not an `Exception`, so that `except Exception` does not swallow it.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}: nothing is lost; run the same command again")


@contextmanager
def early_signals() -> Iterator[None]:
    """Raise `StoppedEarly` in the main thread if a stop signal arrives while the block runs.

    Imports, data preparation and model construction take minutes; for training, `catch_signals` takes over.
    """
    handler = _Early()
    before = {number: signal.signal(number, handler) for number in STOPPING}
    try:
        yield
    except Exception as error:
        if handler.signal is None:
            raise
        raise StoppedEarly(handler.signal) from error  # native code converts a handler's exception into its own
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _Early:
    """The handler of `early_signals`."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._process = os.getpid()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:  # not in a forked process
            # Kept, because Python drops exceptions raised during object deletion.
            self.signal = signal.Signals(number)
            raise StoppedEarly(self.signal)


class StopRequest:
    """Whether this rank has received a stop signal, and which."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None


@contextmanager
def catch_signals(describe_newest: Callable[[], str]) -> Iterator[StopRequest]:
    """Turn stop signals into a flag while the block runs; restores the previous handlers afterwards.

    A second SIGINT exits immediately with code `INTERRUPTED`.

    Args:
        describe_newest: returns the newest checkpoint for that message; it must be quick.
    """
    request = StopRequest()
    process = os.getpid()
    first_press: float | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal first_press
        # Forked data loader workers inherit this handler; they run until the trainer stops them.
        if os.getpid() != process:
            return
        request.signal = request.signal or signal.Signals(number)
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if first_press is None:
            first_press = now
            return
        if now - first_press >= PRESS_INTERVAL:
            _leave(describe_newest)

    before = {number: signal.signal(number, handle) for number in STOPPING}
    request.signal = next((early.signal for early in before.values() if isinstance(early, _Early)), None)
    # A launcher may have blocked them, so that one that arrives before this line is neither lost nor fatal.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _leave(describe_newest: Callable[[], str]) -> None:
    # os.write, because a signal may interrupt a print; a buffer that is being written cannot be flushed then.
    with suppress(RuntimeError):
        sys.stdout.flush()
    os.write(2, f"\nInterrupted twice: stopping without saving. Newest checkpoint: {describe_newest()}\n".encode())
    os._exit(INTERRUPTED)
