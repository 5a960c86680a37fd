"""MLflow's own web UI for the runs, on localhost only."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.tracking.mlflow.database import require_database
from llmrecipes.tracking.store import (
    DATABASE,
    TRAINING_VIEW,
    artifact_root,
    is_local,
    process_environment,
    redact,
    tracking_uri,
)
from llmrecipes.tracking.web import HOST, reserved, started, until_interrupted

NAME = "the MLflow server"
TRAINING = f"#/experiments?{TRAINING_VIEW}"


@contextmanager
def server(runs_dir: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A running MLflow server on the runs' store; yields its address and process once it responds, stops it at the end.

    Raises:
        UserError: there are no runs, or MLflow does not start.
    """
    uri = tracking_uri(runs_dir)
    if is_local(uri) and not runs_dir.is_dir():
        raise UserError("no runs yet", where=str(runs_dir), fix="train something first: make train")
    if is_local(uri):
        if not (runs_dir / DATABASE).exists():  # takes seconds
            print(f"creating {runs_dir / DATABASE} ...", file=sys.stderr, flush=True)
        require_database(uri, artifact_root(runs_dir))
    environment = process_environment() | {"MLFLOW_BACKEND_STORE_URI": uri}  # may hold a password: not an argument
    with reserved(port) as port:
        command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
        command += ["--default-artifact-root", artifact_root(runs_dir), "--uvicorn-opts", "--log-level warning"]
        with started(NAME, command, port, "/health", environment) as process:
            yield f"http://{HOST}:{port}", process


def serve(runs_dir: Path, port: int = 5000) -> None:
    """Show the runs until Ctrl-C; with a remote `MLFLOW_TRACKING_URI` print its address instead."""
    uri = tracking_uri(runs_dir)
    if uri.startswith(("http://", "https://")):
        print(f"runs are tracked by a server; open {redact(uri).rstrip('/')}/{TRAINING}")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server as well
    with server(runs_dir, port) as (address, process):
        print(f"MLflow shows {runs_dir} at {address}/{TRAINING} (Ctrl-C ends it)", flush=True)
        until_interrupted(NAME, process)
