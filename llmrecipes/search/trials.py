"""Trials of a study in its storage: who runs them, their heartbeats, which were lost and return to the queue."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Protocol, Self

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial, TrialState, create_trial

from llmrecipes.hardware.process import MachineIdentity, Watch, start_ticks, this_machine
from llmrecipes.search.storage import WORKER_ATTRIBUTE, without_heartbeat
from llmrecipes.search.trial import TrialOutcome

logger = logging.getLogger(__name__)

WORKER, RETURNED, SOURCE, OUTCOME = WORKER_ATTRIBUTE, "given_back", "source_study", "outcome"
"""Attributes of trials: who runs it, which trials it continues, the earlier study it is from, and how it ended."""
SEEDS, STANDARD_ERRORS = "seeds", "standard_errors"
"""Attributes of trials with several seeds: values of the objectives of each, and the standard errors of their means."""
FITS = "fits"
"""Constraint of a trial: the share of memory that its plan lacks, negative where it fits."""


class Jobs(Protocol):
    """The jobs of trials that this machine can reach."""

    def can_be_followed(self, trial: FrozenTrial) -> bool:
        """Whether this process can continue a trial of another one without a second training beside its job."""
        ...

    def cancel(self, trial: FrozenTrial) -> None:
        """Cancel the job of an abandoned trial, if it still runs."""
        ...


def this_worker() -> dict[str, Any]:
    """What identifies this process, for others on this machine."""
    return {**this_machine().as_dict(), "pid": os.getpid(), "started": start_ticks(os.getpid())}


def is_alive(worker: Mapping[str, Any]) -> bool | None:
    """Whether a search process runs; None if unknown, because it is on another machine or in a container."""
    if not MachineIdentity.of(worker).is_this:
        return None
    return start_ticks(worker["pid"]) == worker["started"]


def take_back(study: optuna.Study, grace: float, watch: Watch, jobs: Jobs) -> None:
    """Return the trials of lost processes to the queue; their jobs are recovered from their runs.

    A trial whose job cannot be followed from here is left to a search process where it can. The job of a trial that
    has reached `max_retry` is cancelled before the trial is abandoned.

    Args:
        study: the study.
        grace: seconds after which a trial that was created but never started is abandoned.
        watch: the same at each call.
        jobs: jobs of the trials.
    """
    storage = heartbeats(study)
    without_beat = set() if storage is None else set(storage._get_stale_trial_ids(study._study_id))
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get(WORKER)
        if worker is None:  # its process died, or the answer to `ask` was lost
            if watch.unchanged(("asked", trial.number)) > grace:
                _forget(study, trial)
            continue
        is_lost = is_alive(worker) is False or trial._trial_id in without_beat
        if is_lost and jobs.can_be_followed(trial):
            if not _may_be_retried(study, trial):
                jobs.cancel(trial)
            if _end(study, trial):
                logger.warning("trial %d: its search process has ended", trial.number)
    stale = None if storage is None else storage.get_heartbeat_stale_trial_callback()
    # Also those whose process was killed after ending them and before putting them back, or before telling a result.
    for trial in own_trials(study):
        has_failed = trial.user_attrs.get(OUTCOME) == TrialOutcome.FAILED
        if trial.state == TrialState.FAIL and not has_failed and stale is not None:
            stale(study, trial)


def _forget(study: optuna.Study, trial: FrozenTrial) -> None:
    """Remove a trial that was created and never started; one that was queued returns to the queue."""
    if is_queued(trial):
        return_to_queue(study, trial.number)
        return
    with suppress(UpdateFinishedTrialError):
        study._storage.set_trial_user_attr(trial._trial_id, RETURNED, [trial.number])
    _end(study, trial)


def _may_be_retried(study: optuna.Study, trial: FrozenTrial) -> bool:
    """Whether a trial that is ended now is put back into the queue."""
    stale = None if (storage := heartbeats(study)) is None else storage.get_heartbeat_stale_trial_callback()
    limit = getattr(stale, "_max_retry", None)
    return limit is None or len(trial.system_attrs.get("retry_history", ())) < limit


def given_up(study: optuna.Study, number: int) -> FrozenTrial | None:
    """A trial if another process has ended it and does not continue it, else None."""
    trials = study.get_trials(deepcopy=False)
    trial = trials[number]
    is_continued = any(number in continues(trial) for trial in trials)
    return None if trial.state != TrialState.FAIL or is_continued or _may_be_retried(study, trial) else trial


def is_queued(trial: FrozenTrial) -> bool:
    """Whether a trial was in the queue before it ran: a known point, or one that continues another."""
    return bool(trial.params or "fixed_params" in trial.system_attrs or continues(trial))


def continues(trial: FrozenTrial) -> list[int]:
    """The trials that a trial continues, parts of one run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return [*RetryHeartbeatStaleTrialCallback.retry_history(trial), *trial.user_attrs.get(RETURNED, ())]


def _end(study: optuna.Study, trial: FrozenTrial) -> bool:
    """End a trial of another process; False if somebody else has."""
    try:
        study.tell(trial.number, state=TrialState.FAIL)
    except (ValueError, UpdateFinishedTrialError):
        return False
    return True


def return_to_queue(study: optuna.Study, number: int) -> None:
    """Return a trial of this process to the queue; the next process that takes it resumes its run."""
    trial = study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
    earlier = [*trial.user_attrs.get(RETURNED, ()), trial.number]
    kept = {key: value for key, value in trial.user_attrs.items() if key != WORKER}
    study.add_trial(
        create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={**kept, RETURNED: earlier},
            system_attrs=without_heartbeat(trial),
            intermediate_values=trial.intermediate_values,
        )
    )


def discard(study: optuna.Study, trial: optuna.Trial) -> None:
    """Remove a trial that exceeds the limit."""
    trial.set_user_attr(RETURNED, [trial.number])
    study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def heartbeats(study: optuna.Study) -> BaseHeartbeat | None:
    """The storage of a study, which takes heartbeats."""
    return study._storage if isinstance(study._storage, BaseHeartbeat) else None


def beat(study: optuna.Study, trial: optuna.Trial) -> None:
    """Record a heartbeat of a running trial."""
    if (storage := heartbeats(study)) is not None:
        storage.record_heartbeat(trial._trial_id)


def own_trials(study: optuna.Study) -> Iterator[FrozenTrial]:
    """The trials of this study: not those of earlier ones, and of a trial that was resumed only the last part.

    If a trial was put back twice, because an answer was lost or two processes did it, the first one counts.
    """
    trials = study.get_trials(deepcopy=False)
    continued: set[int] = set()
    repeated: set[int] = set()
    for trial in trials:
        if history := continues(trial):
            if (max(history) in continued or repeated.intersection(history)) and trial.number not in history:
                repeated.add(trial.number)
            continued.update(history)
    for trial in trials:
        if trial.number not in continued | repeated and SOURCE not in trial.user_attrs:
            yield trial


def unbegun(study: optuna.Study) -> set[int]:
    """Trials that a process has created and not started; `take_back` checks whether it was killed."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return {trial.number for trial in running if WORKER not in trial.user_attrs}


def is_infeasible(trial: FrozenTrial) -> bool:
    """Whether the plan has said that a trial cannot run."""
    return any(violation > 0 for violation in trial.constraints.values())


def unheard(study: optuna.Study, watch: Watch, seconds: float) -> set[int]:
    """Running trials of processes that cannot be asked whether they live.

    None after so many seconds with the same trials: `take_back` has found them stale by then, if their processes died.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    workers = {trial.number: trial.user_attrs[WORKER] for trial in running if WORKER in trial.user_attrs}
    unknown = {number for number, worker in workers.items() if is_alive(worker) is None}
    return set() if watch.unchanged("unheard", frozenset(unknown)) > seconds else unknown


LONGEST_END = 5.0
"""Seconds to wait for the last heartbeat."""


class Heartbeat:
    """Sends heartbeats of the trials that were added, while the block runs.

    A storage that does not respond is not reported here: whoever waits for it in the main thread does. A trial that
    was taken over by another process gets none any more.

    Args:
        study: study of the trials.
        seconds: between heartbeats.
    """

    def __init__(self, study: optuna.Study, seconds: float) -> None:
        self._study = study
        self._seconds = seconds
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
        """Start sending heartbeats of a trial."""
        with self._lock:
            self._trials[trial.number] = trial

    def remove(self, number: int) -> None:
        """Stop sending heartbeats of a trial; no effect if none were sent."""
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
