"""The MLflow store of a run, and the environment of our MLflow processes."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from llmrecipes.redact import address
from llmrecipes.runfiles import RunFiles

LOCAL_DISK = "LLMRECIPES_LOCAL_DISK"
"""Variable with a folder on the own disk of a pod, whose runs directory is on a file system of the network."""
DATABASE = "mlflow.db"
TRAINING_VIEW = "workflowType=machine_learning"
"""Parameter of pages of MLflow 3, which otherwise shows its pages for traces, whatever the kind of an experiment is."""


def tracking_uri(runs_dir: Path) -> str:
    """`MLFLOW_TRACKING_URI` if it is set, else SQLite in the runs directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(runs_dir.resolve() / DATABASE)


def own_database(run_dir: Path) -> Path | None:
    """Where a run without a server keeps its database while it trains: on the pod's own disk, else None.

    SQLite relies on locks that file systems of a network do not always keep, and each point would wait for them.
    """
    disk = os.environ.get(LOCAL_DISK)
    if not disk or os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    return Path(disk).resolve() / RunFiles(run_dir).name / DATABASE


def sqlite_uri(path: Path) -> str:
    """The store in a file."""
    from sqlalchemy.engine import URL, make_url  # MLflow's; versions differ in which characters need escaping

    name = str(path)
    plain = f"sqlite:///{name}"
    return plain if make_url(plain).database == name else URL.create("sqlite", database=name).render_as_string()


def artifact_root(runs_dir: Path) -> str:
    """Artifact directory of the SQLite store. The leading dot avoids a clash with recipes' directories."""
    return (runs_dir.resolve() / ".mlflow-artifacts").as_uri()


def is_local(uri: str) -> bool:
    """Whether the store is a local file, with no server that would choose the artifact location."""
    return urlsplit(uri).scheme == "sqlite"


def redact(uri: str) -> str:
    """The address without user, password and query, safe for files and messages."""
    return uri if is_local(uri) else address(uri)


def process_environment() -> dict[str, str]:
    """Environment of an MLflow process: no telemetry, short request timeouts, one thread.

    We retry ourselves, with the same points and timestamps, so that a lost response does not duplicate points.
    """
    defaults = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "OMP_NUM_THREADS": "1",
    }
    return defaults | os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
