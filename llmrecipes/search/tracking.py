"""A study in MLflow: one parent run, under which each trial's run is nested.

The trials' own processes send their parameters and curves, as every run does; here they only get their parent and
outcome. MLflow may be away: what could not be sent is sent later, and a search never waits for it for long.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import optuna

from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.runfiles import RunFiles
from llmrecipes.search.metrics import find_run
from llmrecipes.search.space import Values
from llmrecipes.search.study import Place, require_section
from llmrecipes.tracking.mlflow.database import (
    artifact_root,
    is_local,
    process_environment,
    redact,
    require_database,
    tracking_uri,
)
from llmrecipes.untrusted import RECORD, read_json

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

PARENT, PARENT_TAG = "llmrecipes:mlflow_run", "mlflow.parentRunId"
"""Attribute of the study with the id of its run; and MLflow's own tag."""
RETRY_SECONDS = 60.0
STATUS = {"complete": "FINISHED", "pruned": "KILLED", "infeasible": "KILLED"}
"""MLflow's status of a trial without a process that sets it; FAILED for others."""
LONGEST = 5000


@dataclass
class StudyTracker:
    """Sends a study to MLflow.

    Attributes:
        study: the study.
        recipe: with the section `search`.
        place: place of the study.
        uri: MLflow store; None: nothing is sent.
    """

    study: optuna.Study
    recipe: Recipe
    place: Place
    uri: str | None
    waiting: list[Callable[[MlflowClient], None]] = field(default_factory=list)
    _client: MlflowClient | None = None
    _experiment: str = ""
    _parent: str = ""
    _not_before: float = 0.0

    @classmethod
    def open(cls, study: optuna.Study, recipe: Recipe, place: Place, uri: str | None = None) -> StudyTracker:
        """The tracker of a study; it does nothing if the recipe disables MLflow."""
        if not recipe.tracking.mlflow:
            return cls(study, recipe, place, None)
        os.environ.update(process_environment())  # short timeouts, before the client is created
        return cls(study, recipe, place, uri or tracking_uri(place.runs_dir))

    @property
    def _name(self) -> str:
        """Name of the experiment, which the trials' runs have too."""
        return self.recipe.tracking.experiment or self.place.group

    def trial_began(self, run_dir: Path, number: int, values: Values) -> bool:
        """Nest the run of a trial, once it has one; False if it has none yet."""
        if self.uri is None:
            return True
        run_id = self._run_of(run_dir)
        if run_id is None:
            return False
        tags = {
            PARENT_TAG: "",
            "search.trial": str(number),
            **{f"search.{key}": _text(each) for key, each in values.items()},
        }
        self._send(lambda client: self._tag(client, run_id, tags))
        return True

    def trial_ended(
        self, run_dir: Path, number: int, values: Values, outcome: str, results: Mapping[str, float]
    ) -> None:
        """The outcome of a trial; a trial that never ran gets a run for it."""
        if self.uri is None:
            return
        run_id = self._run_of(run_dir)
        tags = {"search.outcome": outcome}

        def send(client: MlflowClient) -> None:
            target = run_id or self._create(client, run_dir.name, number, values, STATUS.get(outcome, "FAILED"))
            self._tag(client, target, tags)

        self._send(send)
        count = number + 1
        self._send(lambda client: self._log(client, {f"trial_{name}": value for name, value in results.items()}, count))

    def improved(self, results: Mapping[str, float], number: int, files: list[Path]) -> None:
        """The best trial so far, and the files that go with it."""
        if self.uri is None:
            return
        self._send(
            lambda client: self._log(client, {f"best_{name}": value for name, value in results.items()}, number + 1)
        )
        for path in files:
            self._send(lambda client, path=path: client.log_artifact(self._parent, str(path)))  # type: ignore[misc]

    def close(self, *, finished: bool, files: list[Path]) -> None:
        """The end of this process's part of the study."""
        if self.uri is None:
            return
        for path in files:
            self._send(lambda client, path=path: client.log_artifact(self._parent, str(path)))  # type: ignore[misc]
        self._send(lambda client: client.set_terminated(self._parent, "FINISHED" if finished else "KILLED"))
        self._not_before = 0.0
        self.flush()
        if self.waiting:
            logger.warning("MLflow at %s did not store %d points of the study", redact(self.uri), len(self.waiting))

    def flush(self) -> None:
        """Send what is waiting, unless MLflow has just not responded."""
        if self.uri is None or not self.waiting or time.monotonic() < self._not_before:
            return
        try:
            client = self._connected()
            while self.waiting:
                self.waiting[0](client)
                del self.waiting[0]
        except Exception as error:  # the study must not depend on its tracking
            self._not_before = time.monotonic() + RETRY_SECONDS
            where = redact(self.uri)
            text = str(error).replace(self.uri, redact(self.uri)).partition("\n")[0]
            logger.warning("MLflow at %s does not respond (%s); the search continues", where, text)

    def _send(self, call: Callable[[MlflowClient], None]) -> None:
        self.waiting.append(call)
        self.flush()

    def _connected(self) -> MlflowClient:
        if self._client is not None:
            return self._client
        from mlflow.tracking import MlflowClient

        uri = self.uri or ""
        root = artifact_root(self.place.runs_dir) if is_local(uri) else None
        if is_local(uri):
            self.place.runs_dir.mkdir(parents=True, exist_ok=True)
            require_database(uri, root or "")
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(self._name)
        self._experiment = experiment.experiment_id if experiment else client.create_experiment(self._name, root)
        known = self.study.user_attrs.get(PARENT)
        if known is None:
            known = client.create_run(
                self._experiment, run_name=self.place.name, tags={"search.study": self.place.name}
            ).info.run_id
            self.study.set_user_attr(PARENT, known)
            self._describe(client, known)
        client.update_run(known, status="RUNNING")
        self._parent = known
        self._client = client
        return client

    def _run_of(self, run_dir: Path) -> str | None:
        """Id of a run in MLflow, from its directory or, if that is on another machine, its name; None if unknown."""
        try:
            mlflow_run = read_json(run_dir / "mlflow.json", root=run_dir, most=RECORD).get("run_id")
        except (OSError, ValueError, AttributeError):
            mlflow_run = None
        if mlflow_run is None and time.monotonic() >= self._not_before and not RunFiles(run_dir).metrics.exists():
            with suppress(Exception):  # the server is away; the outcome then gets a run of its own
                mlflow_run = find_run(self._connected(), self._name, run_dir.name)
        return mlflow_run if isinstance(mlflow_run, str) else None

    def _describe(self, client: MlflowClient, run_id: str) -> None:
        search: Search = require_section(self.recipe)
        for key, value in search.model_dump(mode="json", exclude_none=True).items():
            client.log_param(run_id, f"search.{key}", _text(value))

    def _create(self, client: MlflowClient, name: str, number: int, values: Values, status: str) -> str:
        run_id: str = client.create_run(
            self._experiment, run_name=name, tags={PARENT_TAG: self._parent, "search.trial": str(number)}
        ).info.run_id
        for key, value in values.items():
            client.log_param(run_id, key, _text(value))
        client.set_terminated(run_id, status)
        return run_id

    def _tag(self, client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            client.set_tag(run_id, key, self._parent if key == PARENT_TAG else value)

    def _log(self, client: MlflowClient, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            client.log_metric(self._parent, key, value, step=step)


def _text(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST]
