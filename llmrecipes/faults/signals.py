"""Signals that ask a run to stop: it saves once at the next step boundary and exits with `ExitCode.REQUEUE`.

SIGTERM comes from Slurm, Kubernetes and torchrun, SIGUSR1 from `sbatch --signal`, SIGINT from a terminal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from llmrecipes.launch.ranks import STOP_SIGNALS as STOPPING

PRESS_INTERVAL = 1.0
"""Seconds within which a second SIGINT is the same Ctrl-C: a terminal sends it to all ranks, and a launcher such as
torchrun passes its own copy on to them at once."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after a second SIGINT: nothing was saved since the last checkpoint."""


class StoppedEarly(BaseException):
    """A signal that asks to stop came while no step was under way, so that nothing has to be saved.

    Not an `Exception`, so that nobody takes it for a failure of what they have just tried.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(
            f"stopped by {number.name} before training started: nothing is lost; run the same command again"
        )


@contextmanager
def early_signals() -> Iterator[None]:
    """Raise `StoppedEarly` in the main thread when a stopping signal comes while the block runs.

    Imports, data preparation and building take minutes; where training begins, `catch_signals` takes over.
    """
    handler = _Early()
    before = {number: signal.signal(number, handler) for number in STOPPING}
    try:
        yield
    except Exception as error:
        if handler.signal is None:
            raise
        raise StoppedEarly(handler.signal) from error  # native code turns what a handler raises into its own errors
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
            # Kept, because Python drops what is raised while an object is being deleted.
            self.signal = signal.Signals(number)
            raise StoppedEarly(self.signal)


class StopRequest:
    """Whether this rank was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None


@contextmanager
def catch_signals(describe_newest: Callable[[], str]) -> Iterator[StopRequest]:
    """Turn stopping signals into a flag while the block runs; the handlers of before come back afterwards.

    A second SIGINT ends the process at once with exit code `INTERRUPTED`.

    Args:
        describe_newest: names the newest checkpoint for the message of that case; it must be quick.
    """
    request = StopRequest()
    process = os.getpid()
    first_press: float | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal first_press
        # Forked data loader workers inherit this handler; they go on until the trainer ends them.
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
    # A launcher may have them blocked, so that none that comes before this line is lost or ends the process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _leave(describe_newest: Callable[[], str]) -> None:
    sys.stdout.flush()
    # os.write, because a signal may come in the middle of a print.
    os.write(2, f"\nInterrupted twice: stopping without saving. Newest checkpoint: {describe_newest()}\n".encode())
    os._exit(INTERRUPTED)
