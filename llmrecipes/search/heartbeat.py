"""Heartbeats of running trials, from a thread: they go on while a scheduler or a sampler takes its time to answer."""

from __future__ import annotations

import logging
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

import optuna
from optuna.exceptions import UpdateFinishedTrialError

from llmrecipes.search.trials import beat

logger = logging.getLogger(__name__)

LONGEST_END = 5.0
"""Seconds to wait for the last heartbeat."""


class Heartbeat:
    """Sends heartbeats of the trials that were added, while the block runs.

    A storage that does not respond is not reported here: whoever waits for it in the main thread does. A trial that
    was taken over by another process gets none any more.

    Args:
        study: of the trials.
        seconds: between heartbeats.
    """

    def __init__(self, study: optuna.Study, seconds: float) -> None:
        self._study, self._seconds = study, seconds
        self._trials: dict[int, optuna.Trial] = {}
        self._lock, self._ended = Lock(), Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(LONGEST_END)  # it may wait for a storage that does not respond

    def add(self, trial: optuna.Trial) -> None:
        """From now on send heartbeats of a trial."""
        with self._lock:
            self._trials[trial.number] = trial

    def remove(self, number: int) -> None:
        """Send none of a trial any more; nothing if there were none."""
        with self._lock:
            self._trials.pop(number, None)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            with self._lock:
                trials = list(self._trials.values())
            for trial in trials:
                try:
                    beat(self._study, trial)
                except UpdateFinishedTrialError:
                    self.remove(trial.number)
                except Exception as error:  # of the storage, its network or its disk
                    logger.debug("no heartbeat of trial %d: %s", trial.number, error)
