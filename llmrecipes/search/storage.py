"""Storage of a study: a journal file, SQLite or PostgreSQL, with heartbeats of its running trials."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import secrets
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import (
    BaseStorage,
    JournalStorage,
    RDBStorage,
    RetryHeartbeatStaleTrialCallback,
    get_storage,
)
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages._rdb.models import TrialModel
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import TrialState
from sqlalchemy import update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from llmrecipes import untrusted
from llmrecipes.errors import UserError
from llmrecipes.hardware.process import Watch
from llmrecipes.io import sync
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.redact import redacted
from llmrecipes.tracking.mlflow.database import redact

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)

T = TypeVar("T")
OPEN_SECONDS, PATIENCE_SECONDS = 30.0, 120.0
"""How long a storage that does not respond is retried: at the start of a search, and while trials run."""
LONGEST_PAUSE = 5.0
LOCK_SECONDS = 30.0
"""How long to wait for the lock of SQLite."""
HEARTBEAT, WORKER_ATTRIBUTE, CONSTRAINT = "llmrecipes:heartbeat", "worker", f"{_CONSTRAINTS_KEY}:"
"""Attributes of a trial that end with its process."""


_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError)
"""What Optuna raises for a corrupt journal: it does not check what it reads."""


def address(search: Search, folder: Path) -> str:
    """The storage of a study: a URL, or the path of a journal file.

    Args:
        search: the section.
        folder: folder of the study.
    """
    return search.storage or str(folder / "journal.log")


def open_storage(place: str, search: Search) -> BaseStorage:
    """Open or create a storage.

    Raises:
        UserError: it cannot be opened, or has not responded for `OPEN_SECONDS`.
    """
    grace = search.grace_period or 2 * search.heartbeat_interval
    return with_retries(lambda: _open(place, search.heartbeat_interval, grace, search.max_retry), place, OPEN_SECONDS)


def _open(place: str, interval: int, grace: int, retries: int) -> BaseStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        again = RequeueStaleTrial(max_retry=retries, inherit_intermediate_values=True)
        if "://" not in place:
            path = Path(place)
            if path.is_dir():
                raise UserError("is a directory", where=place, rule="a journal is a file", fix=f"{place}/journal.log")
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                untrusted.real(path)  # Optuna opens it by name, and would wait for a FIFO's writer
            journal = Journal(path)
            try:
                return HeartbeatJournal(journal, interval, grace, again)
            except _DAMAGE as error:
                raise UserError(
                    f"line {journal.line} of the journal is corrupt ({type(error).__name__}: {error})",
                    where=place,
                    rule="each line is a complete entry",
                    fix="restore the file from a copy, or search.study_name=NAME for a new study",
                ) from error
        return get_storage(
            Database(
                url_with_driver(place),
                engine_kwargs=_engine(place),
                heartbeat_interval=interval,
                grace_period=grace,
                heartbeat_stale_trial_callback=again,
            )
        )


def file_of(place: str) -> Path | None:
    """The file of a journal or of SQLite; None for a server."""
    if "://" not in place:
        return Path(place)
    return Path(make_url(place).database or "") if place.startswith("sqlite") else None


def url_with_driver(url: str) -> str:
    """`postgresql://` with the driver that the extra `search` installs."""
    parts = urlsplit(url)
    return urlunsplit(("postgresql+psycopg2", *parts[1:])) if parts.scheme == "postgresql" else url


def _engine(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": LOCK_SECONDS}}
    # A connection that a network has dropped silently is noticed within a minute.
    network = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10, **network}}


class RequeueStaleTrial(RetryHeartbeatStaleTrialCallback):
    """Returns a lost trial to the queue, without the heartbeat of its process."""

    def __call__(self, study: Study, trial: FrozenTrial) -> None:
        trial = copy.deepcopy(trial)  # Optuna's callback appends to its history
        trial.user_attrs = {key: value for key, value in trial.user_attrs.items() if key != WORKER_ATTRIBUTE}
        trial.system_attrs = without_heartbeat(trial)
        super().__call__(study, trial)


def without_heartbeat(trial: FrozenTrial) -> dict[str, Any]:
    """Optuna's attributes of a trial, for one that continues it: it is not stale from its beginning.

    Nor has it constraints: they are those of its own plan, and Optuna takes them once only.
    """
    return {
        key: value for key, value in trial.system_attrs.items() if key != HEARTBEAT and not key.startswith(CONSTRAINT)
    }


def with_retries(call: Callable[[], T], place: str, seconds: float | None = None) -> T:
    """The result of a call that uses a storage; repeated while the storage does not respond.

    The call is one that may be made twice, because a response may be lost.

    Args:
        call: the call.
        place: the storage, for messages.
        seconds: how long; None: `PATIENCE_SECONDS`.

    Raises:
        UserError: the storage has not responded for so long, or refuses.
    """
    seconds = PATIENCE_SECONDS if seconds is None else seconds
    started = time.monotonic()
    pause = 0.1
    warned = False
    while True:
        try:
            result = call()
        except (OSError, SQLAlchemyError, StorageInternalError, json.JSONDecodeError, UnicodeDecodeError) as error:
            cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
            if _is_final(cause):
                raise UserError(
                    f"the storage of the study cannot be used: {_first_line(cause)}",
                    where=redact(place),
                    fix="correct its address, permissions or password; no finished trial is lost",
                ) from error
            if time.monotonic() - started + pause > seconds:
                raise UserError(
                    f"the storage of the study does not respond: {_first_line(cause)}",
                    where=redact(place),
                    rule=f"it is retried for {seconds:g} s",
                    fix="the same command with --resume, once the storage is back: no finished trial is lost",
                ) from error
            if not warned:
                logger.warning("the storage of the study does not respond (%s); retrying", _first_line(cause))
            warned = True
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            if warned:
                logger.warning("the storage of the study responds again")
            return result


def _is_final(error: BaseException) -> bool:
    """Whether a retry cannot help: no permission, no such database, a wrong password, a corrupt journal."""
    if isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError | ValueError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    words = str(error.orig)
    final = ("authentication failed", "does not exist", "unable to open", "readonly", "not a database", "malformed")
    return any(text in words for text in final)


def _first_line(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


class Journal(JournalFileBackend):
    """Optuna's journal file, which also survives a process that dies while it writes a line."""

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # the lock is a link to it, and a broken link would never expire
        self._own_path, self._own_lock = path, JournalFileSymlinkLock(str(path))
        super().__init__(str(path), self._own_lock)
        self.line = 0
        """The line that was read last, from 1."""

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Entries from a number on."""
        entries = super().read_logs(log_number_from)
        for number in itertools.count(log_number_from + 1):
            self.line = number
            try:
                entry = next(entries)
            except StopIteration:
                return
            yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append entries; an incomplete last line, which would damage the next, is removed first."""
        if _ends_within_a_line(self._own_path):
            self._own_lock.acquire()  # a line that another process is still writing is complete by now
            try:
                _remove_incomplete_line(self._own_path)
            finally:
                self._own_lock.release()
        super().append_logs(logs)


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _remove_incomplete_line(path: Path) -> None:
    if not _ends_within_a_line(path):
        return
    with path.open("rb+") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
    sync(path)
    logger.warning("%s: removed an incomplete last line, left by a process that was killed", path)


class _RedactedAttributes(BaseStorage):
    """Attributes of studies and trials quote recipes, overrides and errors of libraries; others may read them."""

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        super().set_study_user_attr(study_id, key, redacted(value))  # type: ignore[safe-super]

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        super().set_trial_user_attr(trial_id, key, redacted(value))  # type: ignore[safe-super]


class Database(_RedactedAttributes, RDBStorage):
    """SQLite or PostgreSQL."""

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set the state of a trial; False if it is to run, and another process has taken it.

        Optuna reads the state, then writes it. SQLite has no lock for that: of processes that ask at the same moment,
        several would train the trial. One statement that does both is atomic in every database.
        """
        if state != TrialState.RUNNING:
            return super().set_trial_state_values(trial_id, state, values)
        take = (
            update(TrialModel)
            .where(TrialModel.trial_id == trial_id, TrialModel.state == TrialState.WAITING)
            .values(state=state, datetime_start=datetime.now())
        )
        with self.engine.begin() as connection:
            taken = connection.execute(take).rowcount == 1
        if not taken:
            self.check_trial_is_updatable(trial_id, self.get_trial(trial_id).state)
        return taken


class HeartbeatJournal(_RedactedAttributes, JournalStorage, BaseHeartbeat):
    """A journal with heartbeats, which Optuna has for databases only.

    A heartbeat is stale if it has not changed for the grace period, by the monotonic clock of the process that looks:
    neither a clock that is set nor clocks that disagree end a trial.
    """

    def __init__(
        self, backend: Journal, interval: int, grace: int, stale: Callable[[Study, FrozenTrial], None]
    ) -> None:
        super().__init__(backend)
        self._interval = interval
        self._grace = grace
        self._stale = stale
        self._watch = Watch()

    def record_heartbeat(self, trial_id: int) -> None:
        """Record a heartbeat of a running trial."""
        self.set_trial_system_attr(trial_id, HEARTBEAT, secrets.token_hex(8))

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        running = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
        beats = {trial._trial_id: trial.system_attrs[HEARTBEAT] for trial in running if HEARTBEAT in trial.system_attrs}
        self._watch.keep(beats.keys())
        return [number for number, value in beats.items() if self._watch.unchanged(number, value) > self._grace]

    def get_heartbeat_interval(self) -> int:
        """Seconds between heartbeats."""
        return self._interval

    def get_heartbeat_stale_trial_callback(self) -> Callable[[Study, FrozenTrial], None]:
        """What happens to a trial whose heartbeats have stopped."""
        return self._stale
