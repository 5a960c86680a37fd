"""Web servers of other programs, on localhost only."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from tempfile import TemporaryFile
from typing import IO

from llmrecipes.errors import UserError

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
        name: of the server, for messages.
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
    command: Sequence[str],
    environment: Mapping[str, str],
    first: Callable[[], None] | None = None,
    output: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server; stops it at the end.

    Args:
        command: starts it.
        environment: its environment.
        first: what its process does before it becomes the server.
        output: file for its output; None: that of this process.
    """
    # A new session: servers start helpers, and killing the process group stops them all.
    process = subprocess.Popen(
        command, env=dict(environment), start_new_session=True, preexec_fn=first, stdout=output, stderr=output
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
