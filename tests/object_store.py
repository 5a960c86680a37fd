"""An S3 server of moto in a process of its own, and a proxy before it that does what stores and networks do."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec  # type: ignore[import-untyped]
import pytest

from llmrecipes import stores

FEW_TRIES = {"config_kwargs": {"read_timeout": 1, "connect_timeout": 1, "retries": {"max_attempts": 0}}}


def give_up_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Notice soon that a store hangs or is away, in this process."""
    monkeypatch.setitem(fsspec.config.conf, "s3", FEW_TRIES)
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", seconds)


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch, bucket: str) -> Iterator[int]:
    """Port of a server with a bucket, with credentials for it in the environment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)])
    try:
        credentials(monkeypatch, port)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        stores.patiently(lambda: fsspec.filesystem("s3").mkdir(bucket), f"s3://{bucket}")
        yield port
    finally:
        server.kill()
        server.wait()


def credentials(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """The endpoint on a port, with credentials that moto accepts."""
    values = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "very-secret"}
    for name, value in {**values, "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


class Proxy:
    """What a server behind it answers, or a fault.

    Attributes:
        fault: called with method and path of each request; `None` forwards it, a number is the status of the answer,
            `cut` closes the connection, `hang` never answers.
        asked: methods and paths of all requests.
    """

    def __init__(self, port: int) -> None:
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None
        self.asked: list[tuple[str, str]] = []
        self.ended = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.asked.append((self.command, self.path))
                fault = proxy.fault(self.command, self.path)
                if fault == "hang":
                    proxy.ended.wait(60)
                if fault in ("cut", "hang"):
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if isinstance(fault, int):
                    self.answer(fault, {}, b"<Error><Code>SlowDown</Code><Message>a fault</Message></Error>")
                    return
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                self.answer(response.status, dict(response.getheaders()), response.read())
                connection.close()

            def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = forward

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, and what hangs in it."""
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def first(number: int, fault: int | str, of: str = "PUT") -> Callable[[str, str], int | str | None]:
    """A fault of the first requests of a method."""
    left = [number]
    lock = threading.Lock()

    def at(method: str, path: str) -> int | str | None:
        with lock:
            if method != of or not left[0]:
                return None
            left[0] -= 1
            return fault

    return at
