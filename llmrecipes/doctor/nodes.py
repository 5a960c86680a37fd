"""Checks that need several nodes: filtered ports, clock skew, and a directory that is not shared.

The first node listens. Every node gets the time from it, connects to other nodes once all have arrived, and reports. A
node reports about itself only: it cannot name another one bad.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrecipes.doctor.check_result import Finding, bad_nodes, fail, findings_of, ignored, ok, skip, warn
from llmrecipes.errors import UserError
from llmrecipes.hardware.nics import SYSTEM
from llmrecipes.launch.rendezvous import CONNECT_SECONDS, Channel, Disconnected, FirstNode, joined

SECONDS_BETWEEN_LINES = 10.0
MOST_NAMES = 8
"""Nodes that a line names."""
CLOCK_SECONDS = 5.0
"""Larger clock offsets confuse logs, caches of network file systems, and Slurm's credentials."""


@dataclass(frozen=True)
class NodeRendezvous:
    """The rendezvous of a job's nodes.

    Args:
        hosts: names of all nodes, the same list in the same order everywhere.
        number: index of this node.
        port: on which the first node listens; node n also listens on port + 1 + n.
        shared: directory that all nodes should mount.
        token: secret of the job, the same on all nodes.
        patience: timeout of waiting for other nodes, in seconds.
        log: receives a line now and then about the nodes that the first one waits for.
    """

    hosts: tuple[str, ...]
    number: int
    port: int
    shared: Path
    token: bytes = field(repr=False)
    patience: float = 60.0
    log: Callable[[str], None] = field(default=lambda _: None, repr=False)

    @property
    def own_port(self) -> int:
        return self.port + 1 + self.number


@dataclass(frozen=True)
class GatheredFindings:
    """Result of the check: `findings` of all nodes on the first one, None on the others; `bad` on all."""

    findings: list[Finding] | None
    bad: list[str]


def meet(meeting: NodeRendezvous, findings: Sequence[Finding]) -> GatheredFindings:
    """Collect the findings of all nodes, run the checks between nodes, and tell every node which ones are bad.

    Raises:
        UserError: a port is in use, or the first node does not respond.
    """
    try:
        listener = _Listener(("", meeting.own_port))
    except OSError as error:
        what = f"port {meeting.own_port} cannot be used: {error.strerror}"
        raise UserError(
            what, where=meeting.hosts[meeting.number], fix="stop the program on that port (ss -ltnp)"
        ) from error
    with listener:
        if meeting.number == 0:
            return _lead(meeting, findings)
        return GatheredFindings(None, _follow(meeting, findings))


class _Listener:
    """A port that accepts connections and sends nothing, so that other nodes can test it."""

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


def _lead(meeting: NodeRendezvous, findings: Sequence[Finding]) -> GatheredFindings:
    attendance = _RendezvousState(len(meeting.hosts) - 1, meeting.patience)
    mark = _write_mark(meeting)

    def serve(number: int, channel: Channel) -> None:
        _serve(meeting.hosts[number], number, channel, attendance, mark)

    with FirstNode(meeting.hosts, meeting.port, meeting.token, serve) as first:
        _wait(meeting, attendance, attendance.arrived)
        # All nodes keep their ports open until all have reported, including this one.
        local = [finding.seen_on(meeting.hosts[0]) for finding in findings]
        local += [replace(port, node=meeting.hosts[0]) for port in _ports(meeting)]
        attendance.put(attendance.reports, 0, local)
        _wait(meeting, attendance, attendance.reports)
        reported = [finding for _, report in sorted(attendance.reports.items()) for finding in report]
        strangers = ignored(first.ignored, meeting.hosts[0])
        all_findings = compared([*reported, *_absent(meeting, attendance), *strangers])
        gathered = GatheredFindings(all_findings, bad_nodes(all_findings))
        # Pods start their rank each by itself: a node that is fine may not start without the others.
        attendance.put(attendance.verdict, 0, gathered.bad)
        attendance.wait(attendance.dismissed)
    with suppress(OSError):
        _mark_file(meeting).unlink()
    return gathered


def _wait(meeting: NodeRendezvous, attendance: _RendezvousState, where: dict[int, Any]) -> None:
    """Wait as `_RendezvousState.wait`, and name the nodes that are missing now and then."""
    while not attendance.wait(where, SECONDS_BETWEEN_LINES):
        coming = range(1, len(meeting.hosts)) if where is attendance.arrived else sorted(attendance.arrived)
        missing = [meeting.hosts[number] for number in coming if number not in where]
        shown = ", ".join(missing[:MOST_NAMES]) + (" ..." if len(missing) > MOST_NAMES else "")
        meeting.log(
            f"waiting for {len(missing):,} of {len(meeting.hosts):,} nodes: {shown}; "
            f"{max(0.0, attendance.left_for(where)):.0f} s left"
        )


def _absent(meeting: NodeRendezvous, attendance: _RendezvousState) -> Iterator[Finding]:
    for number, host in enumerate(meeting.hosts):
        if number and number not in attendance.reports:
            what = f"did not connect to {meeting.hosts[0]}:{meeting.port} within {meeting.patience:.0f} s"
            fix = "check for a firewall between the nodes, a name that does not resolve, or a node that hangs"
            yield replace(fail("node", what, fix), node=host)


class _RendezvousState:
    """Which nodes have arrived, and their reports."""

    def __init__(self, expected: int, patience: float) -> None:
        self.expected, self._patience, self._began = expected, patience, time.monotonic()
        self._changed = threading.Condition()
        self.arrived: dict[int, None] = {}
        self.reports: dict[int, list[Finding]] = {}
        self.verdict: dict[int, list[str]] = {}
        self.dismissed: dict[int, None] = {}

    def put(self, where: dict[int, Any], number: int, value: Any = None) -> None:
        """Record a value, and wake waiting threads."""
        with self._changed:
            where[number] = value
            self._changed.notify_all()

    def wait(self, where: dict[int, Any], most: float = math.inf) -> bool:
        """Wait for all expected nodes, with a timeout.

        All other nodes arrive; those and the first node report; the first one judges; all that reported are dismissed.

        Args:
            most: seconds after which this returns False, if the timeout is not over.
        """

        def complete() -> bool:
            if where is self.arrived:
                return len(where) >= self.expected
            if where is self.verdict:
                return bool(where)
            return len(where) >= (len(self.arrived) + 1 if where is self.reports else len(self.reports) - 1)

        left = self.left_for(where)
        with self._changed:
            return self._changed.wait_for(complete, max(0.0, min(left, most))) or left <= most

    def left_for(self, where: dict[int, Any]) -> float:
        """Seconds to wait for all of them."""
        return self.left - (self._patience if where is self.arrived else 0)

    @property
    def left(self) -> float:
        """Seconds to wait for a node that has not reported."""
        return self._began + 2 * self._patience - time.monotonic()


def _serve(host: str, number: int, channel: Channel, attendance: _RendezvousState, mark: str) -> None:
    """The messages of one node; a node that ends early is missing among the reports."""
    channel.receive(CONNECT_SECONDS)  # it asks now, so that the answer measures its clock
    channel.send({"time": time.time(), "mark": mark})
    attendance.put(attendance.arrived, number)
    attendance.wait(attendance.arrived)
    channel.send({"go": True})
    message = channel.receive(attendance.left)
    try:
        report = findings_of(message.get("findings"))
    except ValueError as error:
        raise Disconnected("sent malformed findings") from error
    attendance.put(attendance.reports, number, [finding.seen_on(host) for finding in report])
    attendance.wait(attendance.verdict)
    channel.send({"bad": attendance.verdict.get(0, [])})
    attendance.put(attendance.dismissed, number)
    channel.close()


def _follow(meeting: NodeRendezvous, findings: Sequence[Finding]) -> list[str]:
    """The bad nodes according to the first node."""
    longest = 2 * meeting.patience
    with joined(meeting.hosts, meeting.number, meeting.port, meeting.token, meeting.patience) as channel:
        sent = time.time()
        channel.send({})
        reply = channel.receive(longest)
        clock = _clock(float(reply["time"]), sent, time.time())
        channel.receive(longest)  # all nodes have arrived, so their ports are open
        between = [*clock, *_shared(meeting, str(reply["mark"])), *_ports(meeting)]
        named = (replace(finding, node=meeting.hosts[meeting.number]) for finding in between)
        channel.send({"findings": [finding.as_dict() for finding in (*findings, *named)]})
        return [str(host) for host in channel.receive(longest)["bad"]]  # and no node needs this one's port any more


def _clock(remote: float, sent: float, received: float) -> Iterator[Finding]:
    # The first node read its clock some time between request and reply.
    offset = max(0.0, remote - received, sent - remote)
    if offset > CLOCK_SECONDS:
        yield fail("clock", f"differs by {offset:.0f} s from the first node's", "start chronyd or ntpd")
    else:
        yield ok("clock", f"within {offset + received - sent:.2f} s of the first node's")


def _shared(meeting: NodeRendezvous, mark: str) -> Iterator[Finding]:
    if not mark:
        yield skip("shared directory", f"the first node cannot write to {meeting.shared}")
        return
    file = _mark_file(meeting)
    # Network file systems cache directories for a few seconds.
    deadline = time.monotonic() + 10
    while True:
        try:
            text = file.read_text("ascii")
        except OSError:
            text = None
        if text == mark:
            yield ok("shared directory", f"{meeting.shared} is the same as on the first node")
            return
        if time.monotonic() > deadline:
            what = f"{meeting.shared} is not the same directory as on the first node"
            yield fail("shared directory", what, "--runs-dir on a file system that all nodes mount")
            return
        time.sleep(0.2)


def _ports(meeting: NodeRendezvous) -> Iterator[Finding]:
    """Whether other nodes can be reached: the next one, and those at distances 2, 4, 8, … as in a tree."""
    count = len(meeting.hosts)
    distances = [1 << power for power in range((count - 1).bit_length())]
    blocked = []
    for number in sorted({(meeting.number + distance) % count for distance in distances} - {meeting.number}):
        try:
            socket.create_connection((meeting.hosts[number], meeting.port + 1 + number), CONNECT_SECONDS).close()
        except OSError as error:
            blocked.append(f"{meeting.hosts[number]} ({error.strerror or 'no response'})")
    if blocked:
        yield fail("ports between nodes", f"cannot reach {', '.join(blocked)}", "open all ports between compute nodes")
    elif count > 1:
        yield ok("ports between nodes", "open")


def _write_mark(meeting: NodeRendezvous) -> str:
    """File that the other nodes look for; empty if it cannot be written, which is a separate finding."""
    mark = secrets.token_hex(16)
    file = _mark_file(meeting)
    part = file.with_suffix(".part")
    try:
        meeting.shared.mkdir(parents=True, exist_ok=True)
        part.write_text(mark, "ascii")
        part.replace(file)
    except OSError:
        return ""
    return mark


def _mark_file(meeting: NodeRendezvous) -> Path:
    # Pods of all runs use the same port, and may share the directory.
    nodes = hashlib.sha256(",".join(meeting.hosts).encode()).hexdigest()[:16]
    return meeting.shared / f".doctor-{meeting.port}-{nodes}"


SOFTWARE = "software"
MUST_AGREE = ("torch", "megatron-core", "nvidia-nccl", "deepspeed", "transformer-engine")
"""Starts of the names of packages whose other version computes something else, or hangs in a collective."""


def inventory(packages: Mapping[str, str], driver: str | None) -> Finding:
    """The versions of this node, as a finding that the first node compares."""
    named = {**packages, **({"driver": driver} if driver else {}), "Linux": os.uname().release}
    if versions := firmware(SYSTEM):
        named["adapter firmware"] = " and ".join(versions)
    return ok(SOFTWARE, "; ".join(f"{name} = {version}" for name, version in sorted(named.items())))


def firmware(system: Path) -> list[str]:
    """Versions of all adapters; those that cannot be read are left out."""
    versions = set()
    for file in system.glob("*/fw_ver"):
        with suppress(OSError, UnicodeDecodeError):
            versions.add(file.read_text("ascii").strip())
    return sorted(versions)


def differing(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Compare the inventories of nodes: each version with that of most nodes, in a tie with the first node's."""
    nodes = [
        (finding.node, _parse_versions(finding.what))
        for finding in findings
        if finding.check == SOFTWARE and finding.status == "ok"
    ]
    for name in sorted({name for _, versions in nodes for name in versions}):
        values = [versions.get(name, "not installed") for _, versions in nodes]
        (usual, count), *others = Counter(values).most_common()
        if not others:
            continue
        verdict = fail if name.startswith(MUST_AGREE) else warn
        for (node, _), value in zip(nodes, values, strict=True):
            if value != usual:
                what = f"{name} {value}, but {usual} on {count} of {len(nodes)} nodes"
                yield replace(verdict(SOFTWARE, what, "the same image or environment on all nodes"), node=node)


def compared(findings: Sequence[Finding]) -> list[Finding]:
    """The findings of all nodes, with those about differences."""
    return [*findings, *differing(findings)]


def _parse_versions(text: str) -> dict[str, str]:
    return dict(item.split(" = ", 1) for item in text.split("; "))
