"""Trials of a study in its storage: who runs them, which were lost, and how they get back into the queue."""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import optuna
import psutil
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial, TrialState, create_trial

from llmrecipes.search.storage import WORKER_ATTRIBUTE, without_heartbeat
from llmrecipes.search.trial import Outcome

logger = logging.getLogger(__name__)

WORKER, GIVEN_BACK, SOURCE, OUTCOME = WORKER_ATTRIBUTE, "given_back", "source_study", "outcome"
"""Attributes of trials: who runs it, which trials it continues, the earlier study it is from, and how it ended."""
SEEDS, STANDARD_ERRORS = "seeds", "standard_errors"
"""Attributes of trials with several seeds: values of the objectives of each, and the standard errors of their means."""
FITS = "fits"
"""Constraint of a trial: the share of memory that its plan lacks, negative where it fits."""


def this_worker() -> dict[str, Any]:
    """What identifies this process, for others on this machine."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_gone(worker: Mapping[str, Any]) -> bool:
    """Whether a process was on this machine and has ended; its trials need not wait for the grace period."""
    if worker.get("host") != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(worker["pid"]).create_time() - worker["started"]) > 1.0
    except psutil.Error:
        return True


def take_back(study: optuna.Study, grace: float) -> None:
    """Put the trials of lost processes back into the queue; their jobs are found again by their runs.

    Args:
        study: the study.
        grace: seconds after which a trial that was asked for but never began is given up.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get(WORKER)
        began = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        if worker is None and time.time() - began > grace:  # its process died, or the answer to `ask` was lost
            if is_queued(trial):
                give_back(study, trial.number)
                continue
            with suppress(UpdateFinishedTrialError):  # as if it had never been
                study._storage.set_trial_user_attr(trial._trial_id, GIVEN_BACK, [trial.number])
            _end(study, trial)
        elif worker is not None and _is_gone(worker) and _end(study, trial):
            logger.warning("trial %d: its search process has ended; it is resumed", trial.number)
    stale = None if (storage := heartbeats(study)) is None else storage.get_heartbeat_stale_trial_callback()
    # Also those whose process was killed after ending them and before putting them back, or before telling a result.
    for trial in own_trials(study):
        has_failed = trial.user_attrs.get(OUTCOME) == Outcome.FAILED
        if trial.state == TrialState.FAIL and not has_failed and stale is not None:
            stale(study, trial)


def is_queued(trial: FrozenTrial) -> bool:
    """Whether a trial was in the queue before it ran: a known point, or one that continues another."""
    return bool(trial.params or "fixed_params" in trial.system_attrs or continues(trial))


def continues(trial: FrozenTrial) -> list[int]:
    """The trials that a trial continues."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return [*RetryHeartbeatStaleTrialCallback.retry_history(trial), *trial.user_attrs.get(GIVEN_BACK, ())]


def _end(study: optuna.Study, trial: FrozenTrial) -> bool:
    """End a trial of another process; False if somebody else has."""
    try:
        study.tell(trial.number, state=TrialState.FAIL)
    except (ValueError, UpdateFinishedTrialError):
        return False
    return True


def give_back(study: optuna.Study, number: int) -> None:
    """Put a trial of this process back into the queue: whoever asks next resumes its run."""
    trial = study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
    earlier = [*trial.user_attrs.get(GIVEN_BACK, ()), trial.number]
    kept = {key: value for key, value in trial.user_attrs.items() if key != WORKER}
    study.add_trial(
        create_trial(
            state=TrialState.WAITING, params=trial.params, distributions=trial.distributions,
            user_attrs={**kept, GIVEN_BACK: earlier}, system_attrs=without_heartbeat(trial),
            intermediate_values=trial.intermediate_values,
        )
    )  # fmt: skip


def discard(study: optuna.Study, trial: optuna.Trial) -> None:
    """End a trial that was one too many, as if it had never been."""
    trial.set_user_attr(GIVEN_BACK, [trial.number])
    study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def heartbeats(study: optuna.Study) -> BaseHeartbeat | None:
    """The storage of a study, which takes signs of life."""
    return study._storage if isinstance(study._storage, BaseHeartbeat) else None


def beat(study: optuna.Study, trial: optuna.Trial) -> None:
    """A sign of life of a running trial."""
    if (storage := heartbeats(study)) is not None:
        storage.record_heartbeat(trial._trial_id)


def own_trials(study: optuna.Study) -> Iterator[FrozenTrial]:
    """The trials of this study: not those of earlier ones, and of a trial that was resumed only the last part.

    If a trial was put back twice, because an answer was lost or two processes did it, the first one counts.
    """
    trials = study.get_trials(deepcopy=False)
    continued: set[int] = set()
    repeated: set[int] = set()
    for each in trials:
        if history := continues(each):
            if (max(history) in continued or repeated.intersection(history)) and each.number not in history:
                repeated.add(each.number)
            continued.update(history)
    for each in trials:
        if each.number not in continued | repeated and SOURCE not in each.user_attrs:
            yield each


def unbegun(study: optuna.Study) -> set[int]:
    """Trials that a process has asked for and not begun: it may have been killed, which `take_back` finds out."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return {each.number for each in running if WORKER not in each.user_attrs}


def is_infeasible(trial: FrozenTrial) -> bool:
    """Whether the plan has said that a trial cannot run."""
    return any(violation > 0 for violation in trial.constraints.values())
