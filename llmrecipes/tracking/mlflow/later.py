"""Metrics that are added to a run's MLflow run after its training."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from llmrecipes.tracking.store import is_local, process_environment, redact, tracking_uri
from llmrecipes.untrusted import RECORD, read_json

FILE = "mlflow.json"


def add_metrics(run_dir: Path, runs_dir: Path, values: Mapping[str, float], step: int) -> str | None:
    """Add points to the MLflow run of a run directory, whose status and times stay as they are.

    Args:
        run_dir: the run, whose mlflow.json names the MLflow run.
        runs_dir: where runs are kept.
        values: by name of the metric.
        step: of all of them.

    Returns:
        Why they are not there; None if they are.
    """
    try:
        known = read_json(run_dir / FILE, root=run_dir, most=RECORD)
        uri, run_id = str(known["tracking_uri"]), str(known["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return "MLflow does not have this run: the results are in the run's directory alone"
    if not is_local(uri):  # without its password in the file
        here = tracking_uri(runs_dir)
        if redact(here) != uri:
            return f"MLflow: the run is at {uri}; set MLFLOW_TRACKING_URI to add the results there"
        uri = here
    os.environ.update(process_environment())  # short timeouts, before the client is created
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    now = int(time.time() * 1000)
    metrics = [Metric(name, value, now, step) for name, value in values.items()]
    try:
        client = MlflowClient(uri)
        for start in range(0, len(metrics), 1000):
            client.log_batch(run_id, metrics=metrics[start : start + 1000])
    except Exception as error:  # of MLflow, its database or its server
        reason = next(iter(str(error).splitlines()), "")[:200].replace(uri, redact(uri))
        return f"MLflow does not have the results ({type(error).__name__}: {reason}); the run's directory has"
    return None
