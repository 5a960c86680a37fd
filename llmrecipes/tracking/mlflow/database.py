"""The SQLite database of runs that have no MLflow server."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from filelock import FileLock

from llmrecipes.io import sync


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
        uri: of a `sqlite:` store.
        kept: the copy; may be missing.
    """
    path = _path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or not kept.exists():
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.copyfile(kept, part)
    part.replace(path)


def keep(uri: str, kept: Path) -> None:
    """Copy a database that others may have open; the copy is complete or the one before.

    Args:
        uri: of a `sqlite:` store.
        kept: the copy, on any file system.
    """
    path = _path(uri)
    own = path.with_name(f".{path.name}.{os.getpid()}.copy")
    # SQLite copies to the same disk: it needs locks there too.
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(own)) as target:
        source.backup(target)
    part = kept.with_name(f".{kept.name}.part")
    shutil.copyfile(own, part)
    own.unlink()
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
