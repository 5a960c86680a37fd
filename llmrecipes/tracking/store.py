"""Which MLflow store a run goes to, and the settings that every MLflow process of ours gets."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit


def tracking_uri(runs_dir: Path) -> str:
    """`MLFLOW_TRACKING_URI` if it is set, else SQLite in the runs directory."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    from sqlalchemy.engine import URL, make_url  # MLflow's; versions differ in what a path must have escaped

    path = str(runs_dir.resolve() / "mlflow.db")
    plain = f"sqlite:///{path}"
    return plain if make_url(plain).database == path else URL.create("sqlite", database=path).render_as_string()


def artifact_root(runs_dir: Path) -> str:
    """Where artifacts of the SQLite store lie. The leading dot keeps it apart from recipes' directories."""
    return (runs_dir.resolve() / ".mlflow-artifacts").as_uri()


def is_local(uri: str) -> bool:
    """The store is a file of this machine, with nobody in front of it who would choose a place for artifacts."""
    return urlsplit(uri).scheme == "sqlite"


def redact(uri: str) -> str:
    """The address without user, password and query, fit for files and messages."""
    if is_local(uri):
        return uri
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def process_environment() -> dict[str, str]:
    """Environment of an MLflow process: nothing is sent to MLflow's makers, requests fail soon, one thread.

    Retries are ours, with the same points and times of day, so that an answer that got lost leaves no point twice.
    """
    defaults = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "OMP_NUM_THREADS": "1",
    }
    return defaults | os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
