"""Messages between the nodes of a job: lines of JSON over TCP. Nothing in them is executed."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from llmrecipes.errors import UserError

LONGEST_MESSAGE = 1 << 22
CONNECT_SECONDS = 5.0


def connect(host: str, port: int, patience: float) -> socket.socket:
    """A connection to the first node of a job, as soon as it listens.

    Args:
        host, port: where it listens.
        patience: seconds to try.

    Raises:
        UserError: it does not respond.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the first node does not respond: {error.strerror or error}",
                    where=f"{host}:{port}",
                    fix="start the same command on every node at the same time; check for a firewall between them",
                ) from error
            time.sleep(0.2)


def receive(stream: Any) -> dict[str, Any]:
    """The next message.

    Raises:
        UserError: the connection was closed.
        OSError, ValueError: nothing came in time, or it is no message.
    """
    message = json.loads(stream.readline(LONGEST_MESSAGE) or "null")
    if not isinstance(message, dict):
        raise UserError("the connection was closed by the other node", where="nodes", fix="see its messages")
    return message


def send(stream: Any, message: dict[str, Any]) -> None:
    """Send a message."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()
