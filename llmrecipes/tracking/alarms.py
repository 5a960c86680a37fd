"""Sends a run's alarms to a webhook (Slack, Teams and what takes the same JSON) or a command, such as an e-mail.

The training only puts an alarm into a bounded queue; a daemon thread sends it. What hangs or refuses is said once.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import shlex
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from llmrecipes.commandline import command_line
from llmrecipes.redact import redact, remember
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import EvalMetrics, Note, RunStart, RunStatus, Sink, StepMetrics
from llmrecipes.tracking.progress import note_line, step_parts

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Alarms in the queue; more are counted, not sent."""
MOST_LINES = 10
"""Alarms in a message."""
LAST_STEPS = 3
SEND_SECONDS, COMMAND_SECONDS = 10.0, 30.0
CLOSE_SECONDS = 5.0
"""How long the end of a run waits for its last message."""
TEAMS = ("logic.azure.com", "powerplatform.com", "office.com")
"""Ends of the hosts of Teams' workflows, which take cards only."""


@dataclass(frozen=True)
class Alarm:
    """A line about what happened, and the last steps before it."""

    line: str
    last: tuple[StepMetrics, ...]


class AlarmSink(Sink):
    """Sends the notes that are alarms, and the failure of the run, if a webhook or command is set.

    The first alarm is sent at once; those of the next `interval` seconds are gathered into one message.

    Args:
        files: files of the run.
        total_steps: the last step.
        webhook: variable of the environment that has the URL; None: none.
        command: variable that has a command, which gets the message on its standard input; None: none.
        interval: seconds between two messages.
        say: called from another thread with a line for the user.
        close_seconds: how long `close` waits.
    """

    def __init__(
        self,
        files: RunFiles,
        total_steps: int,
        *,
        webhook: str | None,
        command: str | None,
        interval: float,
        say: Callable[[str], None],
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._files, self._total, self._interval, self._say = files, total_steps, interval, say
        self._close_seconds = close_seconds
        self._last: deque[StepMetrics] = deque(maxlen=LAST_STEPS)
        self._step = 0
        self._queue: Queue[Alarm | None] = Queue(MOST_WAITING)
        self._unsent = 0
        self._sending: _Sender | None = None
        self._ending = threading.Event()
        self._senders = [sender for sender in (_webhook(webhook, say), _command(command, say)) if sender is not None]
        self._thread: threading.Thread | None = None
        if self._senders:
            self._thread = threading.Thread(target=self._work, name="alarms", daemon=True)
            self._thread.start()

    @classmethod
    def of(cls, start: RunStart) -> Self:
        tracking = start.recipe.tracking
        return cls(
            RunFiles(start.run_dir),
            start.total_steps,
            webhook=tracking.alarms_webhook,
            command=tracking.alarms_command,
            interval=tracking.alarms_interval,
            say=start.messages.put,
        )

    def step(self, metrics: StepMetrics) -> None:
        self._last.append(metrics)
        self._step = metrics.step

    def eval(self, metrics: EvalMetrics) -> None:
        """Not an alarm."""

    def note(self, note: Note) -> None:
        if note.alarm:
            self._put(note_line(note, self._total))

    def end(self, status: RunStatus) -> None:
        if self._ending.is_set():
            return
        if status == "FAILED":
            self._put(f"ALARM  the run failed after step {self._step}/{self._total}")
        self._ending.set()
        self._put_last()

    def close(self, status: RunStatus) -> None:
        self.end(status)
        if self._thread is None:
            return
        self._thread.join(self._close_seconds)
        if self._thread.is_alive() and (sender := self._sending) is not None:
            sender.complain(f"no answer within {self._close_seconds:g} s of the end of the run")

    def _put(self, line: str) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(Alarm(line, tuple(self._last)))
        except Full:
            self._unsent += 1

    def _put_last(self) -> None:
        with suppress(Full):  # then the thread looks at `_ending`
            self._queue.put_nowait(None)

    def _work(self) -> None:
        while (alarm := self._next()) is not None:
            gathered = [alarm]
            while not self._queue.empty():
                if (more := self._queue.get()) is not None:
                    gathered.append(more)
            unsent, self._unsent = self._unsent, 0
            message = redact(self._message(gathered, unsent))
            for sender in self._senders:
                self._sending = sender
                sender.send(message)
            self._sending = None
            self._ending.wait(self._interval)

    def _next(self) -> Alarm | None:
        while True:
            try:
                alarm = self._queue.get(timeout=None if not self._ending.is_set() else 0.0)
            except Empty:
                return None
            if alarm is not None:
                return alarm
            if self._ending.is_set() and self._queue.empty():
                return None

    def _message(self, alarms: Sequence[Alarm], unsent: int) -> str:
        left_out = max(0, len(alarms) - MOST_LINES) + unsent
        lines = [f"{self._files.name} on {socket.gethostname()}", *(alarm.line for alarm in alarms[:MOST_LINES])]
        lines += [f"and {left_out} more alarms, in metrics.jsonl"] if left_out else []
        last = alarms[-1].last
        if last:
            lines.append("last steps:")
        for metrics in last:
            parts = step_parts(metrics, self._total, metrics.step_seconds)
            lines.append(f"  step {metrics.step}/{self._total}  {'  '.join(parts.values())}")
        lines.append(f"more: {command_line('diagnose', self._files.path.resolve())}")
        return "\n".join(lines) + "\n"


class _Sender:
    """Sends messages by one way; says once that it does not work."""

    def __init__(self, name: str, send: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._name, self._send, self._say = name, send, say
        self._failed = False

    def send(self, message: str) -> None:
        try:
            self._send(message)
        except Exception as error:  # of a server or a program of the user: must not end the thread
            self.complain(redact(f"{type(error).__name__}: {error}".splitlines()[0])[:200])

    def complain(self, reason: str) -> None:
        """Say once that it does not work."""
        if not self._failed:
            self._say(f"alarms: {self._name} did not take a message ({reason}); metrics.jsonl has all alarms")
        self._failed = True


def _webhook(variable: str | None, say: Callable[[str], None]) -> _Sender | None:
    url = os.environ.get(variable, "") if variable else ""
    if not url:
        return None
    remember(url)
    name = f"the webhook of {variable}"
    if not _is_web(url):
        say(f"alarms: {name} is not a URL that begins with https:// and has no spaces; no alarms are sent to it")
        return None
    return _Sender(name, lambda message: _post(url, message), say)


def _is_web(url: str) -> bool:
    """False for what urllib would refuse with part of the URL, a secret, in its text."""
    if any(c <= " " or c == "\x7f" for c in url):
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # an address in brackets without its end, a port that is not a number
        return False


def _command(variable: str | None, say: Callable[[str], None]) -> _Sender | None:
    text = os.environ.get(variable, "") if variable else ""
    if not text:
        return None
    try:
        words = shlex.split(text)
    except ValueError as error:
        say(f"alarms: the command of {variable} cannot be split into words ({error}); it is not run")
        return None
    return _Sender(f"the command of {variable}", lambda message: _run(words, message), say) if words else None


class _NoRedirects(HTTPRedirectHandler):
    """An alarm is sent where the user said, or not at all."""

    def redirect_request(self, *_args: Any, **_options: Any) -> None:
        return None


def _post(url: str, message: str) -> None:
    """Post a message.

    Raises:
        OSError, http.client.HTTPException: the server cannot be reached, does not answer or refuses.
    """
    body = json.dumps(payload(url, message)).encode()
    request = Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310 - http or https
    try:
        with build_opener(_NoRedirects).open(request, timeout=SEND_SECONDS):
            pass
    except HTTPError as error:  # whose own text may have the URL
        raise http.client.HTTPException(f"HTTP status {error.code}") from None


def payload(url: str, message: str) -> dict[str, Any]:
    """The JSON of a message: a card for Teams' workflows, else Slack's, which Mattermost and others take, too."""
    host = urlsplit(url).hostname or ""
    if not any(host == end or host.endswith(f".{end}") for end in TEAMS):
        return {"text": f"```\n{message}```"}
    text = {"type": "TextBlock", "text": message.strip().replace("\n", "\n\n"), "wrap": True, "fontType": "Monospace"}
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [text],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _run(words: Sequence[str], message: str) -> None:
    """Run the command with the message on its standard input.

    Raises:
        OSError: it cannot be started, fails or takes too long; the text has no arguments, which may be secrets.
    """
    try:
        done = subprocess.run(
            words,
            input=message.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it did not end within {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        raise OSError(f"exit code {done.returncode}")
