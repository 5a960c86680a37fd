"""What only several nodes together can tell: filtered ports, clocks, and a directory that is not shared.

The first node listens. Every node asks it for the time, tries the ports of other nodes when all have come, and reports.
The messages are lines of JSON between the nodes of one job; nothing in them is executed.
"""

from __future__ import annotations

import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmrecipes.doctor.finding import Finding, fail, ok
from llmrecipes.errors import UserError

CLOCK_SECONDS = 5.0
"""Larger clock offsets confuse logs, caches of network file systems, and Slurm's credentials."""
LONGEST_MESSAGE = 1 << 22
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a job meet.

    Args:
        hosts: names of all nodes, the same list in the same order everywhere.
        number: which of them this one is.
        port: where the first one listens; each further node listens on the next port.
        shared: directory that all of them should see.
        patience: seconds to wait for the others.
    """

    hosts: tuple[str, ...]
    number: int
    port: int
    shared: Path
    patience: float = 60.0

    @property
    def own_port(self) -> int:
        return self.port + 1 + self.number


def meet(meeting: Meeting, findings: Sequence[Finding]) -> list[Finding] | None:
    """Bring together what all nodes found, and what they can find only together.

    Returns:
        All findings on the first node; None on the others.
    """
    try:
        ear = _Ear(("", meeting.own_port))
    except OSError as error:
        what = f"port {meeting.own_port} cannot be used: {error.strerror}"
        raise UserError(what, where=meeting.hosts[meeting.number], fix="end what listens there: ss -ltnp") from error
    with ear:
        if meeting.number == 0:
            return _lead(meeting, findings)
        _follow(meeting, findings)
        return None


class _Ear:
    """A port that accepts connections and says nothing, so that others can try whether they get through."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._server = socketserver.ThreadingTCPServer(
            address, socketserver.BaseRequestHandler, bind_and_activate=False
        )
        self._server.allow_reuse_address = True
        self._server.server_bind()
        self._server.server_activate()

    def __enter__(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _lead(meeting: Meeting, findings: Sequence[Finding]) -> list[Finding]:
    hall = _Hall(len(meeting.hosts) - 1, meeting.patience)
    token = _write_token(meeting)
    with socket.create_server(("", meeting.port), backlog=len(meeting.hosts)) as server:
        threading.Thread(target=_welcome, args=(server, hall, token), daemon=True).start()
        hall.wait(hall.arrived)
        # The others keep their ports open until all have reported, this node too.
        mine = [*findings, *(replace(found, node=meeting.hosts[0]) for found in _ports(meeting))]
        hall.put(hall.reports, 0, mine)
        hall.wait(hall.reports)
        hall.wait(hall.dismissed)
    gathered: list[Finding] = []
    for number, host in enumerate(meeting.hosts):
        if number and number not in hall.reports:
            what = f"did not answer {meeting.hosts[0]}:{meeting.port} in {meeting.patience:.0f} s"
            fix = "a firewall between the nodes, a name that does not resolve, or a node that hangs"
            gathered.append(replace(fail("node", what, fix), node=host))
    _token_file(meeting).unlink(missing_ok=True)
    return [*(found for _, report in sorted(hall.reports.items()) for found in report), *gathered]


class _Hall:
    """Which nodes have come, and what they reported."""

    def __init__(self, expected: int, patience: float) -> None:
        self._expected, self._patience, self._began = expected, patience, time.monotonic()
        self._changed = threading.Condition()
        self.arrived: dict[int, None] = {}
        self.reports: dict[int, list[Finding]] = {}
        self.dismissed: dict[int, None] = {}

    def put(self, where: dict[int, Any], number: int, value: Any = None) -> None:
        """Write down, and wake those who wait."""
        with self._changed:
            where[number] = value
            self._changed.notify_all()

    def wait(self, where: dict[int, Any]) -> None:
        """Until all are there that can be expected; not for ever.

        All other nodes arrive, those and the first one report, and those that have reported are dismissed.
        """

        def complete() -> bool:
            if where is self.arrived:
                return len(where) >= self._expected
            return len(where) >= (len(self.arrived) + 1 if where is self.reports else len(self.reports) - 1)

        deadline = self._began + self._patience * (1 if where is self.arrived else 2)
        with self._changed:
            self._changed.wait_for(complete, max(0.0, deadline - time.monotonic()))


def _welcome(server: socket.socket, hall: _Hall, token: str) -> None:
    while True:
        try:
            connection = server.accept()[0]
        except OSError:  # closed: the meeting is over
            return
        threading.Thread(target=_talk, args=(connection, hall, token), daemon=True).start()


def _talk(connection: socket.socket, hall: _Hall, token: str) -> None:
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        number = int(_receive(stream)["number"])
        _say(stream, {"time": time.time(), "token": token})
        hall.put(hall.arrived, number)
        hall.wait(hall.arrived)
        _say(stream, {"go": True})
        hall.put(hall.reports, number, [Finding(**found) for found in _receive(stream)["findings"]])
        hall.wait(hall.reports)
        _say(stream, {"done": True})
        hall.put(hall.dismissed, number)


def _follow(meeting: Meeting, findings: Sequence[Finding]) -> None:
    with _call(meeting) as connection, connection.makefile("rw", encoding="utf-8") as stream:
        connection.settimeout(2 * meeting.patience)
        asked = time.time()
        _say(stream, {"number": meeting.number})
        told = _receive(stream)
        clock = _clock(told["time"], asked, time.time())
        _receive(stream)  # all are there, so their ports are open
        mine = [*clock, *_shared(meeting, told["token"]), *_ports(meeting)]
        named = (replace(found, node=meeting.hosts[meeting.number]) for found in mine)
        _say(stream, {"findings": [found.as_dict() for found in (*findings, *named)]})
        _receive(stream)  # nobody tries this node's port any more


def _call(meeting: Meeting) -> socket.socket:
    deadline = time.monotonic() + meeting.patience
    while True:
        try:
            return socket.create_connection((meeting.hosts[0], meeting.port), timeout=CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the first node does not answer: {error.strerror or error}",
                    where=f"{meeting.hosts[0]}:{meeting.port}",
                    fix="start the same command on every node at the same time; a firewall may be between them",
                ) from error
            time.sleep(0.2)


def _clock(theirs: float, asked: float, answered: float) -> Iterator[Finding]:
    # The first node looked at its clock some time between question and answer.
    offset = max(0.0, theirs - answered, asked - theirs)
    if offset > CLOCK_SECONDS:
        yield fail("clock", f"{offset:.0f} s from that of the first node", "start chronyd or ntpd")
    else:
        yield ok("clock", f"within {offset + answered - asked:.2f} s of the first node's")


def _shared(meeting: Meeting, token: str) -> Iterator[Finding]:
    file = _token_file(meeting)
    # Network file systems cache directories for some seconds.
    deadline = time.monotonic() + 10
    while True:
        try:
            found = file.read_text("ascii")
        except OSError:
            found = None
        if found == token:
            yield ok("shared directory", f"{meeting.shared} is that of the first node")
            return
        if time.monotonic() > deadline:
            what = f"{meeting.shared} is not the directory that the first node has there"
            yield fail("shared directory", what, "--runs-dir on a file system that all nodes mount")
            return
        time.sleep(0.2)


def _ports(meeting: Meeting) -> Iterator[Finding]:
    """Whether other nodes can be reached: the next one, and those at distances 2, 4, 8, … as in a tree."""
    count = len(meeting.hosts)
    distances = [1 << power for power in range((count - 1).bit_length())]
    blocked = []
    for number in sorted({(meeting.number + distance) % count for distance in distances} - {meeting.number}):
        try:
            socket.create_connection((meeting.hosts[number], meeting.port + 1 + number), CONNECT_SECONDS).close()
        except OSError as error:
            blocked.append(f"{meeting.hosts[number]} ({error.strerror or 'no answer'})")
    if blocked:
        yield fail("ports between nodes", f"cannot reach {', '.join(blocked)}", "open all ports between compute nodes")
    elif count > 1:
        yield ok("ports between nodes", "open")


def _write_token(meeting: Meeting) -> str:
    token = secrets.token_hex(16)
    meeting.shared.mkdir(parents=True, exist_ok=True)
    file = _token_file(meeting)
    part = file.with_suffix(".part")
    part.write_text(token, "ascii")
    part.replace(file)
    return token


def _token_file(meeting: Meeting) -> Path:
    return meeting.shared / f".doctor-{meeting.port}-{len(meeting.hosts)}"


def _receive(stream: Any) -> dict[str, Any]:
    message = json.loads(stream.readline(LONGEST_MESSAGE) or "null")
    if not isinstance(message, dict):
        raise UserError("the connection was closed by the other node", where="doctor", fix="see its messages")
    return message


def _say(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
