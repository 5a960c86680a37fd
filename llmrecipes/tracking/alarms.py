"""Sends a run's alarms to a webhook (Slack, Teams and what takes the same JSON) or a command, such as an e-mail.

The training only puts an alarm into a bounded queue of each; a daemon thread of each sends it. What hangs or refuses is
said once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any, Self
from urllib.parse import urlsplit

from llmrecipes.commandline import command_line
from llmrecipes.hardware.process import STARTED_FOR
from llmrecipes.redact import redact, remember
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import EvalMetrics, Note, RunStart, RunStatus, Sink, StepMetrics
from llmrecipes.tracking.posting import post
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
        self._files = files
        self._total = total_steps
        self._close_seconds = close_seconds
        self._last: deque[StepMetrics] = deque(maxlen=LAST_STEPS)
        self._step, self._ended = 0, False
        senders = [sender for sender in (_webhook(webhook, say), _command(command, say)) if sender is not None]
        self._ways = [_Way(sender, self._message, interval) for sender in senders]

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
        if self._ended:
            return
        if status == "FAILED":
            self._put(f"ALARM  the run failed after step {self._step}/{self._total}")
        self._ended = True
        for way in self._ways:
            way.end()

    def close(self, status: RunStatus) -> None:
        self.end(status)
        until = time.monotonic() + self._close_seconds
        for way in self._ways:
            if not way.wait(until - time.monotonic()):
                way.sender.complain(f"no answer within {self._close_seconds:g} s of the end of the run")

    def _put(self, line: str) -> None:
        for way in self._ways:
            way.put(Alarm(line, tuple(self._last)))

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


class _Way:
    """Alarms to one sender, from a thread of its own: another one that hangs does not hold them up.

    Args:
        sender: sends messages.
        message: text of some alarms, and of a number that were not sent.
        interval: seconds between two messages.
    """

    def __init__(self, sender: _Sender, message: Callable[[Sequence[Alarm], int], str], interval: float) -> None:
        self.sender = sender
        self._message = message
        self._interval = interval
        self._queue: Queue[Alarm | None] = Queue(MOST_WAITING)
        self._unsent = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="alarms", daemon=True)
        self._thread.start()

    def put(self, alarm: Alarm) -> None:
        try:
            self._queue.put_nowait(alarm)
        except Full:
            self._unsent += 1

    def end(self) -> None:
        """Send what there is without waiting for the interval, and no more."""
        self._ending.set()
        with suppress(Full):  # then the thread looks at `_ending`
            self._queue.put_nowait(None)

    def wait(self, seconds: float) -> bool:
        """Whether all is sent within this time."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (alarm := self._next()) is not None:
            gathered = [alarm]
            while not self._queue.empty():
                if (more := self._queue.get()) is not None:
                    gathered.append(more)
            unsent = self._unsent
            self._unsent = 0
            self.sender.send(redact(self._message(gathered, unsent)))
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


class _Sender:
    """Sends messages by one way; says once that it does not work."""

    def __init__(self, name: str, send: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._name = name
        self._send = send
        self._say = say
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
    return _Sender(name, lambda message: post(url, json.dumps(payload(url, message)).encode(), SEND_SECONDS), say)


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
            env={name: value for name, value in os.environ.items() if name != STARTED_FOR},  # outlives it
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it did not end within {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        raise OSError(f"exit code {done.returncode}")
