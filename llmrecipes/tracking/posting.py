"""Posts JSON to a server that may hang, send a byte now and then, or point elsewhere."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener


def post(
    url: str,
    body: bytes,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> None:
    """Post JSON, and leave the answer unread.

    Args:
        url: http or https; a redirection is an error.
        body: the JSON.
        seconds: how long the whole exchange may take.
        headers: besides the type of the content.
        context: certificates to trust; by default those of the system.

    Raises:
        OSError, http.client.HTTPException: the server cannot be reached, does not answer in time or refuses.
    """
    request = Request(url, body, {"Content-Type": "application/json", **(headers or {})}, method="POST")  # noqa: S310 - http or https
    connections = _Connections()
    # The timeout of a socket is for each read: a server that sends a byte now and then would never meet it.
    deadline = threading.Timer(seconds, connections.shut)
    deadline.daemon = True
    deadline.start()
    try:
        with build_opener(_NoRedirects, connections, _Secure(connections, context)).open(request, timeout=seconds):
            pass
    except HTTPError as error:  # whose own text may have the URL
        raise http.client.HTTPException(f"HTTP status {error.code}") from None
    except Exception:
        if not connections.late:
            raise
    finally:
        deadline.cancel()
    if connections.late:  # what was cut off may look like an answer
        raise TimeoutError(f"no whole answer within {seconds:g} s")


class _NoRedirects(HTTPRedirectHandler):
    """A message is sent where the user said, or not at all."""

    def redirect_request(self, *_args: Any, **_options: Any) -> None:
        return None


class _Connections(HTTPHandler):
    """Opens connections that another thread can shut, also while they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.late = False
        self._opened: list[http.client.HTTPConnection] = []

    def kept(self, kind: type[http.client.HTTPConnection], *arguments: Any, **options: Any) -> Any:
        """A new connection."""
        self._opened.append(kind(*arguments, **options))
        return self._opened[-1]

    def http_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self.kept, http.client.HTTPConnection), req)

    def shut(self) -> None:
        """End every exchange; a read of it returns at once."""
        self.late = True
        for connection in self._opened:
            if connection.sock is not None:
                with suppress(OSError):
                    # Not that of an SSLSocket, which takes its state from under the thread that reads.
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


class _Secure(HTTPSHandler):
    def __init__(self, connections: _Connections, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._connections = connections
        self._trusted = context

    def https_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connections.kept, http.client.HTTPSConnection), req, context=self._trusted)
