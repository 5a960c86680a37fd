"""Web servers of other programs, on localhost only: MLflow's and TensorBoard's pages of runs."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from llmrecipes.errors import UserError
from llmrecipes.parent import end_with_parent
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.mlflow.database import (
    DATABASE,
    TRAINING_VIEW,
    artifact_root,
    is_local,
    process_environment,
    redact,
    require_database,
    tracking_uri,
)

HOST = "127.0.0.1"
START_SECONDS = 180.0
"""Long, because a first start on a shared file system reads thousands of files; what it waits for is shown."""
SECONDS_BETWEEN_SIGNS = 5.0
LINES_OF_OUTPUT = 20
"""Last lines of a server's output that are shown if it fails."""


@contextmanager
def reserved(wanted: int) -> Iterator[int]:
    """`wanted` if it is free, else any free port; no other program gets it while the context is open.

    A server may need many seconds before it binds its port. Linux leaves out ports that a socket holds when it chooses
    one for another program, but lets a server with `SO_REUSEADDR` bind it, because nobody listens there.

    Raises:
        UserError: no port is free.
    """
    for port in (wanted, 0):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((HOST, port))
            except OSError:
                continue
            yield int(holder.getsockname()[1])
            return
    raise UserError(f"no free port on {HOST}")


@contextmanager
def started(
    name: str, command: Sequence[str], port: int, path: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server, once it responds at `path`; stops it at the end.

    Its output is only shown if it fails: notices of libraries, and addresses that the caller prints.

    Args:
        name: name of the server, for messages.
        command: starts it on `HOST` and `port`.

    Raises:
        UserError: it does not start.
    """
    with TemporaryFile() as output:
        try:
            with running(command, environment, output=output) as process:
                _wait(name, port, path, process)
                yield process
        except UserError:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            print(*lines[-LINES_OF_OUTPUT:], sep="\n", file=sys.stderr)
            raise


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server; stops it at the end, and also if this process is killed.

    Args:
        command: starts it.
        environment: its environment.
        output: file for its output; None: that of this process.
    """
    # Servers start helpers. In a new session, killing the process group stops them all; if this process is killed
    # itself, SIGTERM lets the server stop them: vLLM's engine outlives a SIGKILL of its server and keeps its memory.
    process = subprocess.Popen(
        command,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        stdout=output,
        stderr=output,
    )
    try:
        yield process
    finally:
        _stop(process)


def until_interrupted(name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for Ctrl-C.

    Raises:
        UserError: the server exited.
    """
    try:
        process.wait()
    except KeyboardInterrupt:
        return
    raise UserError(f"{name} exited with code {process.returncode}")


def _wait(name: str, port: int, path: str, process: subprocess.Popen[bytes]) -> None:
    print(f"starting {name} ...", file=sys.stderr, flush=True)
    started = shown = time.monotonic()
    while time.monotonic() < started + START_SECONDS:
        if time.monotonic() >= shown + SECONDS_BETWEEN_SIGNS:
            shown = time.monotonic()
            print(f"starting {name} ... {shown - started:.0f} s", file=sys.stderr, flush=True)
        if process.poll() is not None:
            raise UserError(f"{name} did not start (exit code {process.returncode}); its messages are above")
        try:
            with closing(http.client.HTTPConnection(HOST, port, timeout=2.0)) as connection:
                connection.request("GET", path)
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)  # there is no event for a server that is not listening yet
    raise UserError(f"{name} did not respond within {START_SECONDS:.0f} s")


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


MLFLOW = "the MLflow server"
MLFLOW_PAGE = f"#/experiments?{TRAINING_VIEW}"


@contextmanager
def mlflow_server(runs_dir: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A running MLflow server on the runs' store; yields its address and process once it responds, stops it at the end.

    Raises:
        UserError: there are no runs, or MLflow does not start.
    """
    uri = tracking_uri(runs_dir)
    if is_local(uri) and not runs_dir.is_dir():
        raise UserError("no runs yet", where=str(runs_dir), fix="train a model first: make train")
    if is_local(uri):
        if not (runs_dir / DATABASE).exists():  # takes seconds
            print(f"creating {runs_dir / DATABASE} ...", file=sys.stderr, flush=True)
        require_database(uri, artifact_root(runs_dir))
    environment = process_environment() | {"MLFLOW_BACKEND_STORE_URI": uri}  # may hold a password: not an argument
    with reserved(port) as port:
        command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
        command += ["--default-artifact-root", artifact_root(runs_dir), "--uvicorn-opts", "--log-level warning"]
        with started(MLFLOW, command, port, "/health", environment) as process:
            yield f"http://{HOST}:{port}", process


def serve_mlflow(runs_dir: Path, port: int = 5000) -> None:
    """Show the runs until Ctrl-C; with a remote `MLFLOW_TRACKING_URI` print its address instead."""
    uri = tracking_uri(runs_dir)
    if uri.startswith(("http://", "https://")):
        print(f"runs are tracked by a server; open {redact(uri).rstrip('/')}/{MLFLOW_PAGE}")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server as well
    with mlflow_server(runs_dir, port) as (address, process):
        print(f"MLflow shows {runs_dir} at {address}/{MLFLOW_PAGE} (Ctrl-C stops it)", flush=True)
        until_interrupted(MLFLOW, process)


TENSORBOARD = "TensorBoard"
EVENT_FILES = "tensorboard"


@contextmanager
def tensorboard_server(run_dirs: Sequence[Path], port: int) -> Iterator[tuple[str, int, subprocess.Popen[bytes]]]:
    """A running TensorBoard; yields its address, the number of runs it shows, and its process; stops it at the end.

    Args:
        run_dirs: runs; those without event files are skipped.
        port: preferred port; another one if it is in use.

    Raises:
        UserError: none of the runs has event files, or TensorBoard does not start.
    """
    shown = [run_dir for run_dir in run_dirs if any((run_dir / EVENT_FILES).glob("events.out.tfevents.*"))]
    if not shown:
        one = len(run_dirs) == 1
        raise UserError(
            "no TensorBoard files" if one else "no run has TensorBoard files",
            where=str(run_dirs[0]) if one else "",
            rule="a run writes them if its recipe has tracking.tensorboard: true",
            fix="llmrecipes ui shows runs in MLflow, llmrecipes compare in the terminal",
        )
    # A folder of links: TensorBoard scans everything below its folder, and the checkpoints of a run can be a hundred
    # thousand files.
    with TemporaryDirectory(prefix="llmrecipes-tensorboard-") as folder:
        for run_dir in shown:
            link = Path(folder, RunFiles(run_dir.resolve()).name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to((run_dir / EVENT_FILES).resolve(), target_is_directory=True)
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONWARNINGS": "ignore"}
        with reserved(port) as port:
            command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", HOST]
            # Use the Python reader: the Rust one does not follow links.
            command += ["--port", str(port), "--load_fast", "false", "--reload_interval", "10"]
            with started(TENSORBOARD, command, port, "/data/environment", environment) as process:
                yield f"http://{HOST}:{port}", len(shown), process


def serve_tensorboard(run_dirs: Sequence[Path], port: int) -> None:
    """Show runs until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server as well
    with tensorboard_server(run_dirs, port) as (address, number, process):
        what = str(run_dirs[0]) if len(run_dirs) == 1 else f"{number} runs"
        print(f"TensorBoard shows {what} at {address}/#scalars (Ctrl-C stops it)", flush=True)
        until_interrupted(TENSORBOARD, process)
