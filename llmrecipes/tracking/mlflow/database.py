"""The MLflow store of runs: its address, its SQLite database if there is no server, and our processes' environment."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from llmrecipes.io import sync
from llmrecipes.redact import address
from llmrecipes.runfiles import RunFiles
from llmrecipes.untrusted import real

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

KEY_TAG = "llmrecipes.key"
"""Tag of an MLflow run with the random key that mlflow.json has."""


def require_database(uri: str, artifacts: str) -> None:
    """Create the database of a `sqlite:` store where there is none.

    MLflow creates its tables one by one, and SQLite commits each: a process that is killed meanwhile leaves a database
    that no later one can open. Here it appears under its name once it is complete.

    Args:
        uri: the store.
        artifacts: URI of the directory for artifacts.
    """
    from sqlalchemy.engine import make_url

    database = make_url(uri).database
    if not database or database == ":memory:":
        return
    path = Path(database)
    if path.exists():
        return
    with FileLock(path.with_name(f".{path.name}.lock")):
        for unfinished in path.parent.glob(f".{path.name}.*.part*"):
            unfinished.unlink(missing_ok=True)
        if not path.exists():
            _create(path, artifacts)


def restore(uri: str, kept: Path) -> None:
    """Start from the copy of an earlier attempt, unless there is a database already.

    Args:
        uri: uri of a `sqlite:` store.
        kept: the copy; may be missing.
    """
    path = _path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or not kept.exists():
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.copyfile(real(kept, root=kept.parent), part)
    part.replace(path)


def holds(uri: str, identity: Mapping[str, str], run_dir: Path) -> bool:
    """Whether a `sqlite:` store has the run of mlflow.json. MLflow itself would add its tables to any database.

    Args:
        uri: the store; a file in the run's directory may not be a link out of it.
        identity: what mlflow.json has.
        run_dir: the run.
    """
    path = _path(uri)
    query = "SELECT 1 FROM tags JOIN runs USING (run_uuid) WHERE run_uuid = ? AND key = ? AND value = ?"
    try:
        file = real(path, root=run_dir if path.parent == run_dir.resolve() else None)
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as database:  # creates no file
            return bool(database.execute(query, (identity["run_id"], KEY_TAG, identity["key"])).fetchone())
    except (OSError, ValueError, sqlite3.Error):
        return False


def own_run(client: MlflowClient, identity: Mapping[str, str]) -> Run | None:
    """The run that mlflow.json names; None: it is deleted or missing, or has another key and so is somebody else's.

    Args:
        client: of the store.
        identity: what mlflow.json has.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

    if "run_id" not in identity:
        return None
    try:
        run = client.get_run(identity["run_id"])
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return None
        raise
    return run if run.info.lifecycle_stage == "active" and run.data.tags.get(KEY_TAG) == identity["key"] else None


def keep(uri: str, kept: Path) -> None:
    """Copy a database that others may have open; the copy is complete or the one before.

    Args:
        uri: uri of a `sqlite:` store.
        kept: the copy, on any file system.
    """
    path = _path(uri)
    copy = path.with_name(f".{path.name}.{os.getpid()}.copy")
    # SQLite copies to the same disk: it needs locks on the target too.
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    part = kept.with_name(f".{kept.name}.part")
    shutil.copyfile(copy, part)
    copy.unlink()
    sync(part)
    part.replace(kept)
    sync(kept.parent)


def _path(uri: str) -> Path:
    from sqlalchemy.engine import make_url

    return Path(str(make_url(uri).database))


def _create(path: Path, artifacts: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy.engine import URL

    for name in ("mlflow.store.db.utils", "alembic"):  # each table is announced
        logging.getLogger(name).setLevel(logging.WARNING)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    store = SqlAlchemyStore(URL.create("sqlite", database=str(part)).render_as_string(), artifacts)
    # MLflow creates an experiment `Default`, which would stay empty. It does so again unless there is a deleted one.
    store.delete_experiment(store.DEFAULT_EXPERIMENT_ID)
    store.engine.dispose()
    part.replace(path)
    sync(path.parent)


LOCAL_DISK = "LLMRECIPES_LOCAL_DISK"
"""Variable with a folder on the local disk of a pod whose runs directory is on a network file system."""
DATABASE = "mlflow.db"
TRAINING_VIEW = "workflowType=machine_learning"
"""Parameter of pages of MLflow 3, which otherwise shows its pages for traces, whatever the kind of an experiment is."""


def tracking_uri(runs_dir: Path) -> str:
    """`MLFLOW_TRACKING_URI` if it is set, else SQLite in the runs directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(runs_dir.resolve() / DATABASE)


def own_database(run_dir: Path) -> Path | None:
    """Where a run without a server keeps its database while it trains: on the pod's disk, else None.

    SQLite relies on locks that network file systems do not always honor, and each point would wait for them.
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
    return uri.lower().startswith("sqlite:")  # of any text: another's mlflow.json may hold what is no URL


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
