"""Alarms that leave the run: to a real server on this machine, and to a real command."""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from llmrecipes.redact import HIDDEN, redact
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking import alarms
from llmrecipes.tracking.alarms import MOST_WAITING, AlarmSink, payload
from llmrecipes.tracking.events import Note, StepMetrics

WAIT = 60.0


class Server(http.server.ThreadingHTTPServer):
    """Keeps what is posted, and answers with `status` once `answering` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.status = 200
        self.answering = threading.Event()
        self.answering.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/s3cret-path"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.put(json.loads(body))
        self.server.answering.wait(WAIT)
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.answering.set()
        made.shutdown()
        thread.join()


@pytest.fixture
def said() -> SimpleQueue[str]:
    return SimpleQueue()


def sink(
    folder: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch, *, url: str = "", command: str = "",
    interval: float = 1e-3, close_seconds: float = WAIT,
) -> AlarmSink:  # fmt: skip
    monkeypatch.setenv("HOOK", url)
    monkeypatch.setenv("COMMAND", command)
    files = RunFiles(folder / "gpt-tiny" / "one")
    return AlarmSink(
        files, 9, webhook="HOOK", command="COMMAND", interval=interval, say=said.put, close_seconds=close_seconds
    )


def step(number: int) -> StepMetrics:
    return StepMetrics(
        step=number, loss=3.0, grad_norm=1.0, lr=1e-3, consumed_samples=number, consumed_tokens=number,
        step_seconds=0.1, tokens_per_second=1.0,
    )  # fmt: skip


def alarm(number: int, event: str = "divergence") -> Note:
    return Note(step=number, event=event, details={"text": "loss rose"}, alarm=True)


def test_a_message_has_what_happened_where_the_last_steps_and_the_next_command(
    tmp_path: Path, server: Server, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sink(tmp_path, said, monkeypatch, url=server.url)
    sent.step(step(4))
    sent.note(Note(step=4, event="checkpoint_saved"))
    sent.note(alarm(4))
    text = server.posted.get(timeout=WAIT)["text"]
    for part in ("gpt-tiny/one", "divergence", "loss rose", "step 4/9", "llmrecipes diagnose"):
        assert part in text
    sent.close("FINISHED")
    assert server.posted.empty()
    assert said.empty()


def test_alarms_are_gathered_between_two_messages_and_sent_at_the_end(
    tmp_path: Path, server: Server, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sink(tmp_path, said, monkeypatch, url=server.url, interval=1e6)
    sent.note(alarm(1))
    assert "divergence" in server.posted.get(timeout=WAIT)["text"]
    for number in range(2, 30):
        sent.note(alarm(number, f"event_{number}"))
    sent.close("FAILED")
    text = server.posted.get(timeout=WAIT)["text"]
    assert "event 2" in text
    assert "and 19 more" in text
    assert server.posted.empty(), "one message for all of them"


def test_a_failed_run_is_an_alarm(
    tmp_path: Path, server: Server, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sink(tmp_path, said, monkeypatch, url=server.url)
    sent.step(step(7))
    sent.close("FAILED")
    assert "7/9" in server.posted.get(timeout=WAIT)["text"]


@pytest.mark.parametrize("status", [302, 403, 500])
def test_a_webhook_that_refuses_is_said_once(
    tmp_path: Path, server: Server, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    server.status = status
    sent = sink(tmp_path, said, monkeypatch, url=server.url)
    for number in (1, 2, 3):
        sent.note(alarm(number))
        server.posted.get(timeout=WAIT)  # a redirect is not followed
    sent.close("FINISHED")
    line = said.get()
    assert "HOOK" in line
    assert str(status) in line
    assert "s3cret" not in line
    assert said.empty()


def test_a_webhook_that_hangs_delays_nothing(
    tmp_path: Path, server: Server, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answering.clear()
    sent = sink(tmp_path, said, monkeypatch, url=server.url, close_seconds=0.2)
    sent.note(alarm(1))
    server.posted.get(timeout=WAIT)  # it now hangs
    began = time.monotonic()
    for number in range(3 * MOST_WAITING):
        sent.note(alarm(number))
    sent.close("FINISHED")
    assert time.monotonic() - began < WAIT / 2, "neither notes nor the end wait for it"
    assert "HOOK" in said.get_nowait() and said.empty(), "the end of the run says it"


def test_what_never_answers_is_said(
    tmp_path: Path, server: Server, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "SEND_SECONDS", 0.1)
    server.answering.clear()
    sent = sink(tmp_path, said, monkeypatch, url=server.url)
    sent.note(alarm(1))
    assert "HOOK" in said.get(timeout=WAIT)
    sent.close("FINISHED")


def test_the_command_gets_the_failure_beside_a_webhook_that_hangs(
    tmp_path: Path, server: Server, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answering.clear()
    sent = sink(tmp_path, said, monkeypatch, url=server.url, command=f"tee {tmp_path / 'mail'}", close_seconds=5.0)
    sent.note(alarm(1))
    server.posted.get(timeout=WAIT)  # it now hangs
    sent.close("FAILED")
    assert "the run failed" in (tmp_path / "mail").read_text()
    assert "HOOK" in said.get_nowait() and said.empty()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("answer", [b"H", b"HTTP/1.1 200 OK\r\n", b"\x16\x03\x03\x7f\xff"])
def test_a_whole_answer_has_a_deadline(
    tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch, scheme: str, answer: bytes
) -> None:
    """A server that always sends a little more, before, in or instead of its answer."""
    monkeypatch.setattr(alarms, "SEND_SECONDS", 1.0)
    done = threading.Event()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(answer)
            while not done.wait(0.05):
                connection.sendall(b"X: y\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle)
        thread.start()
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/s3cret"
        sent = sink(tmp_path, said, monkeypatch, url=url)
        sent.note(alarm(1))
        line = said.get(timeout=WAIT)
        sent.close("FINISHED")
        done.set()
        thread.join()
    assert "HOOK" in line
    assert "s3cret" not in line


def test_a_command_gets_the_message(tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    mail = tmp_path / "mail $(id)"
    sent = sink(tmp_path, said, monkeypatch, command=f"{sys.executable} -c {code!r} '{mail}'".replace("'", '"'))
    sent.note(alarm(1))
    sent.close("FINISHED")
    assert "divergence" in mail.read_text()
    assert said.empty()


@pytest.mark.parametrize(
    ("url", "command"), [("ftp://host/x", ""), ("", "unknown-program-x"), ("", "false"), ("", '"')]
)
def test_targets_that_cannot_work_are_said_once(
    tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch, url: str, command: str
) -> None:
    sent = sink(tmp_path, said, monkeypatch, url=url, command=command)
    sent.note(alarm(1))
    sent.note(alarm(2))
    sent.close("FINISHED")
    assert ("HOOK" if url else "COMMAND") in said.get(timeout=WAIT)
    assert said.empty()


def test_a_command_that_fails_is_said_without_its_arguments(
    tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "COMMAND_SECONDS", 0.1)
    for command in ("sh -c 'exit 7' s3cret", "sh -c 'exec sleep 30' s3cret"):
        sent = sink(tmp_path, said, monkeypatch, command=command)
        sent.note(alarm(1))
        sent.close("FINISHED")
        line = said.get(timeout=WAIT)
        assert "COMMAND" in line
        assert "s3cret" not in line


@pytest.mark.parametrize(
    "url", ["https://host/s3cret path", "https://host/s3cret\r", "http://[s3cret/x", "http://host:s3cret/x"]
)
def test_a_malformed_url_is_said_once_without_its_text(
    tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    sent = sink(tmp_path, said, monkeypatch, url=url)
    sent.note(alarm(1))
    sent.close("FINISHED")
    line = said.get(timeout=WAIT)
    assert "HOOK" in line
    assert "s3cret" not in line
    assert said.empty()


def test_nothing_is_started_without_a_target(
    tmp_path: Path, said: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    sent = sink(tmp_path, said, monkeypatch)
    sent.note(alarm(1))
    assert threading.active_count() == before
    sent.close("FAILED")


def test_teams_gets_a_card() -> None:
    made = payload("https://prod-1.westeurope.logic.azure.com/workflows/x", "a\nb")
    assert made["attachments"][0]["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert made["attachments"][0]["content"]["body"][0]["text"] == "a\n\nb"
    assert set(payload("https://evil-office.com.example.org/x", "a")) == {"text"}


def test_the_url_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRECIPES_ALARM_WEBHOOK", "https://hooks.example.org/services/T0/B0/abcdefgh")
    assert redact("posted to https://hooks.example.org/services/T0/B0/abcdefgh") == f"posted to {HIDDEN}"
