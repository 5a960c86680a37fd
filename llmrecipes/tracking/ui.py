"""MLflow's own web page on the runs, on this machine only."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.tracking.store import artifact_root, is_local, process_environment, redact, tracking_uri

HOST = "127.0.0.1"
START_SECONDS = 60.0
TRAINING = "#/experiments?workflowType=machine_learning"
"""MLflow 3 opens with pages for agents and traces; this is its page of training runs."""


def free_port(wanted: int) -> int:
    """`wanted` if nobody listens there, else any free port."""
    for port in (wanted, 0):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UserError(f"no free port on {HOST}")


@contextmanager
def server(runs_dir: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A running MLflow server on the runs' store; gives its address and process once it answers, stops it at the end.

    Raises:
        UserError: there are no runs, or MLflow does not start.
    """
    uri = tracking_uri(runs_dir)
    if is_local(uri) and not runs_dir.is_dir():
        raise UserError("no runs yet", where=str(runs_dir), fix="train something first: make train")
    port = free_port(port)
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--default-artifact-root", artifact_root(runs_dir), "--uvicorn-opts", "--log-level warning"]
    environment = process_environment() | {"MLFLOW_BACKEND_STORE_URI": uri}  # may hold a password: not an argument
    # A session of its own: the server starts helpers, and stopping the whole group leaves none behind.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        address = f"http://{HOST}:{port}"
        _wait(port, process)
        yield address, process
    finally:
        _stop(process)


def serve(runs_dir: Path, port: int = 5000) -> None:
    """Show the runs until Ctrl-C; with a remote `MLFLOW_TRACKING_URI` say where its page is instead."""
    uri = tracking_uri(runs_dir)
    if uri.startswith(("http://", "https://")):
        print(f"runs are tracked by a server; open {redact(uri)}")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server as well
    with server(runs_dir, port) as (address, process):
        print(f"MLflow shows {runs_dir} at {address}/{TRAINING} (Ctrl-C ends it)", flush=True)
        try:
            process.wait()
        except KeyboardInterrupt:
            return
    raise UserError(f"the MLflow server ended with code {process.returncode}")


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"the MLflow server did not start (exit code {process.returncode}); its messages are above")
        try:
            with closing(http.client.HTTPConnection(HOST, port, timeout=2.0)) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)  # there is no event for a server that is not listening yet
    raise UserError(f"the MLflow server did not answer within {START_SECONDS:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            continue
        if sign is signal.SIGKILL:
            return
