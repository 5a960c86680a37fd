"""One MLflow run per run directory, however often the run is resumed."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from llmrecipes.io import write_atomic
from llmrecipes.tracking.mirror import tracker_name
from llmrecipes.tracking.mlflow.database import (
    KEY_TAG,
    is_local,
    keep,
    own_run,
    redact,
    require_database,
    restore,
    sqlite_uri,
)
from llmrecipes.tracking.mlflow.sink import RUN_FILE
from llmrecipes.untrusted import RECORD, read_json

if TYPE_CHECKING:
    from mlflow.entities import Run

    from llmrecipes.tracking.mlflow.sink import MlflowConfig

logger = logging.getLogger(__name__)

KIND_TAG = "mlflow.experimentKind"
TRAINING_KIND = "custom_model_development"
"""A value of MLflow's UI (`ExperimentKind` in its shared/constants); MLflow's Python has no name for it."""
PARAMS_IN_A_BATCH = 100  # MLflow refuses more in one request
METRICS_IN_A_BATCH = 1000


def dataset_input(values: Mapping[str, Any]) -> DatasetInput:
    """An entity of MLflow for the values of a `DatasetUse`; `mlflow.data.get_source` opens its source."""
    location = values["source"]
    scheme, is_url, _ = location.partition("://")
    source: dict[str, Any]
    if values["kind"] == "hub":
        kind, source = "hugging_face", {"path": location}
    elif is_url and scheme in ("http", "https"):
        kind, source = "http", {"url": location}
    elif location:
        kind, source = scheme if is_url else "local", {"uri": location}
    else:
        kind, source = "code", {"tags": {"llmrecipes.source": values["kind"]}}
    dataset = Dataset(
        values["name"], values["digest"], kind, json.dumps(source), profile=json.dumps(dict(values["counts"]))
    )
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, values["use"])])


class MlflowRun:
    """The MLflow run of a run directory, created or reopened with the status RUNNING.

    mlflow.json in the run directory has a random key, written before the MLflow run is created and set as its tag, so
    that a process that dies in between, or a lost response, does not lead to a second run.

    Raises:
        MlflowException, and database and network errors: the caller retries later.
    """

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._file = Path(config.run_dir) / RUN_FILE
        if config.kept_database is not None:
            restore(config.uri, Path(config.kept_database))
        if is_local(config.uri):
            require_database(config.uri, config.artifact_root or "")
        self.client = MlflowClient(config.uri)
        experiment_id = self._experiment()
        run = self._find(experiment_id)
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._last = {kind: self.last_step(tracker_name(kind)) for kind in ("loss", "valid_loss")}
        self._describe(run)

    def _experiment(self) -> str:
        """Its id; it is marked as one of training, for UIs that choose their pages by an experiment's kind."""
        experiment = self.client.get_experiment_by_name(self._config.experiment)
        if experiment is None:
            kind = {KIND_TAG: TRAINING_KIND}
            return str(self.client.create_experiment(self._config.experiment, self._config.artifact_root, kind))
        if KIND_TAG not in experiment.tags:  # made by somebody else; another kind is the user's choice
            self.client.set_experiment_tag(experiment.experiment_id, KIND_TAG, TRAINING_KIND)
        return str(experiment.experiment_id)

    def _find(self, experiment_id: str) -> Run:
        identity = self._identity()
        run = own_run(self.client, identity)
        if run is None:
            matches = self.client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{identity['key']}'", max_results=1)
            run = matches[0] if matches else None
        if run is None:
            run = self.client.create_run(experiment_id, run_name=self._config.run_name, tags={KEY_TAG: identity["key"]})
        elif run.info.status != "RUNNING":
            self.client.update_run(run.info.run_id, status="RUNNING")
        self._save({**identity, "experiment_id": run.info.experiment_id, "run_id": run.info.run_id})
        return run

    def _identity(self) -> dict[str, str]:
        """Contents of mlflow.json for this store; with a new key for a new run or store."""
        kept = self._config.kept_database
        store = redact(self._config.uri) if kept is None else sqlite_uri(Path(kept))
        try:
            known = read_json(self._file, root=self._file.parent, most=RECORD)
            if known["tracking_uri"] == store and uuid.UUID(known["key"]):
                return dict(known)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        identity = {"tracking_uri": store, "experiment": self._config.experiment, "key": uuid.uuid4().hex}
        self._save(identity)
        return identity

    def _save(self, identity: dict[str, str]) -> None:
        write_atomic(self._file, json.dumps(identity, indent=2) + "\n")

    def _describe(self, run: Run) -> None:
        """Parameters, tags and artifacts. MLflow never changes a parameter: a changed one becomes a tag."""
        known = run.data.params
        new = [Param(key, value) for key, value in self._config.params.items() if key not in known]
        changed = {
            f"changed.{key}"[:250]: value
            for key, value in self._config.params.items()
            if known.get(key, value) != value
        }
        for start in range(0, len(new), PARAMS_IN_A_BATCH):
            self.client.log_batch(self.run_id, params=new[start : start + PARAMS_IN_A_BATCH])
        tags = [RunTag(key, value) for key, value in (self._config.tags | changed).items()]
        for start in range(0, len(tags), PARAMS_IN_A_BATCH):
            self.client.log_batch(self.run_id, tags=tags[start : start + PARAMS_IN_A_BATCH])
        for name in self._config.artifacts:
            try:
                self.client.log_artifact(self.run_id, str(Path(self._config.run_dir) / name))
            except Exception:  # an artifact store without its library or permissions must not block metrics
                logger.warning("MLflow run %s: %s was not uploaded", self.run_id, name, exc_info=True)
        try:
            self.client.log_inputs(self.run_id, [dataset_input(values) for values in self._config.datasets])
        except Exception:  # a server older than datasets
            logger.warning("MLflow run %s: its datasets were not logged", self.run_id, exc_info=True)

    def last_step(self, key: str) -> int:
        """The last step of a metric in MLflow, -1 if none."""
        return max((metric.step for metric in self.client.get_metric_history(self.run_id, key)), default=-1)

    def has(self, values: dict[str, Any]) -> bool:
        """Whether an earlier attempt at this run has sent this point. MLflow cannot delete points."""
        return any(key in values and values["step"] <= last for key, last in self._last.items())

    def log(self, metrics: list[Metric], tags: list[RunTag]) -> None:
        """Send points in order, in one transaction if they are few enough; idempotent."""
        while len(metrics) > METRICS_IN_A_BATCH:  # one step of a deep model with many experts
            self.client.log_batch(self.run_id, metrics=metrics[:METRICS_IN_A_BATCH])
            metrics = metrics[METRICS_IN_A_BATCH:]
        self.client.log_batch(self.run_id, metrics=metrics, tags=tags)

    def finish(self, status: str) -> None:
        """Set the final status and the end time, and keep the database if the pod's disk goes away."""
        self.client.set_terminated(self.run_id, status)
        if self._config.kept_database is not None:
            keep(self._config.uri, Path(self._config.kept_database))
