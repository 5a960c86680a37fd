"""The nodes of a job meet at the first one, which tells each when to serve and when to measure.

Only orders and results go through the first node: the transfers of a round are all at once. Every wait has an end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from pydantic import ValidationError

from llmrecipes.bench.fabric import perftest
from llmrecipes.bench.fabric.node import Answer, FabricNode, Introduction, Limits
from llmrecipes.bench.fabric.transfers import Kind, Pairs, Report, Transfer, judge, rounds
from llmrecipes.commandline import command_line
from llmrecipes.doctor.check_result import Finding, fail, ignored
from llmrecipes.errors import UserError
from llmrecipes.hardware.nics import expected
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.rendezvous import CONNECT_SECONDS, Channel, Disconnected, FirstNode, Message, joined

KINDS = ("infiniband", "roce")
"""Links that are measured; EFA has no reliable connections (RC)."""
SLACK = 10.0
"""Seconds for an answer beside what it waits for."""
ATTEMPTS = 3
"""Of a measurement for which a node was too busy."""
MEASUREMENTS = 4 * 2 * ATTEMPTS
"""At most: rounds, each with latency and bandwidth."""


@dataclass(frozen=True)
class FabricRendezvous:
    """The job.

    Args:
        hosts: names of all nodes, the same list in the same order everywhere.
        number: index of this node.
        port: on which the first node listens.
        patience: timeout of waiting for other nodes, in seconds.
        token: secret of the job, the same on all nodes.
    """

    hosts: tuple[str, ...]
    number: int
    port: int
    patience: float
    limits: Limits
    token: bytes = field(repr=False)

    @property
    def longest(self) -> float:
        """Seconds after which the first node has certainly ended."""
        a_measurement = perftest.LISTEN_SECONDS + self.limits.transfer + perftest.END_SECONDS + 3 * SLACK
        return self.patience + MEASUREMENTS * a_measurement + 2 * SLACK


@dataclass(frozen=True)
class Outcome:
    """`report` on the first node, None on the others; `bad` on all."""

    report: Report | None
    bad: list[str]


@dataclass
class _Member:
    channel: Channel
    ports: list[tuple[str, bool]]


def require_sensible(hosts: tuple[str, ...], profile: Profile | None) -> None:
    """Refuse what cannot be measured.

    Raises:
        UserError: one node, several tasks on a node, or a site without InfiniBand or RoCE.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    step = "srun --ntasks-per-node=1 llmrecipes bench fabric"
    if profile is not None and profile.inter_node.kind not in KINDS:
        what = f"{profile.name} has {profile.inter_node.kind} between nodes"
        rule = f"perftest can only measure {' and '.join(KINDS)}"
        raise UserError(
            what, where="--cluster", rule=rule, fix=command_line("bench collectives", options={"cluster": profile.name})
        )
    if len(hosts) < 2:
        rule = "measuring a fabric needs at least two nodes"
        raise UserError("one node", where="--nodes", rule=rule, fix=f"{step}, or --nodes HOST,HOST on every node")
    if tasks.isdecimal() and int(tasks) > len(hosts):
        raise UserError(f"{tasks} tasks on {len(hosts)} nodes", where="srun", rule="start one task per node", fix=step)


def meet(meeting: FabricRendezvous, profile: Profile | None) -> Outcome:
    """Measure with the other nodes.

    Raises:
        UserError: the port is in use, or the first node does not respond.
    """
    if meeting.number != 0:
        return Outcome(None, _follow(meeting, profile))
    lead = _FirstNode(meeting)
    with FirstNode(meeting.hosts, meeting.port, meeting.token, lead.welcome, first_too=True) as first:
        thread = threading.Thread(target=_take_part, args=(meeting, profile), daemon=True)
        thread.start()
        try:
            lead.gather()
            report = lead.measure(profile)
            lead.dismiss(report.bad_nodes)
            thread.join(SLACK)
        finally:
            lead.close()
    strangers = ignored(first.ignored, meeting.hosts[0])
    return Outcome(replace(report, findings=[*report.findings, *strangers]), report.bad_nodes)


def _take_part(meeting: FabricRendezvous, profile: Profile | None) -> None:
    """The first node as one of all."""
    with suppress(UserError):  # the lost connection is among the findings
        _follow(meeting, profile)


def _follow(meeting: FabricRendezvous, profile: Profile | None) -> list[str]:
    """Do what the first node says; the bad nodes, as it has found."""
    node = FabricNode(profile, meeting.hosts, meeting.limits)
    try:
        with joined(meeting.hosts, meeting.number, meeting.port, meeting.token, meeting.patience) as channel:
            channel.send(node.introduce())
            while "bad" not in (message := channel.receive(meeting.longest)):
                channel.send(node.answer(message))
            return [str(host) for host in message["bad"]]
    finally:
        node.end()


class _FirstNode:
    """The first node."""

    def __init__(self, meeting: FabricRendezvous) -> None:
        self._meeting = meeting
        self._hosts = meeting.hosts
        self._changed = threading.Condition()
        self._late = False
        self._members: dict[int, _Member] = {}
        self._findings: list[Finding] = []

    def gather(self) -> None:
        """Wait until all nodes have introduced themselves; those that do not are failures."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._members) == len(self._hosts), self._meeting.patience)
            self._late = True
        for number, host in enumerate(self._hosts):
            if number not in self._members:
                what = f"did not connect to {self._hosts[0]}:{self._meeting.port} in {self._meeting.patience:.0f} s"
                fix = "start the command on every node; check for a firewall, or a name that does not resolve"
                self._add(number, fail("node", what, fix), host)

    def welcome(self, number: int, channel: Channel) -> None:
        """A node that has the token introduces itself, in a thread of its own.

        Raises:
            Disconnected: it does not, or is too late.
        """
        try:
            introduction = Introduction.model_validate(channel.receive(CONNECT_SECONDS))
        except ValidationError as error:
            raise Disconnected("sent a malformed introduction") from error
        with self._changed:
            if self._late:
                raise Disconnected("connected too late")
            self._members[number] = _Member(channel, introduction.ports)
            for finding in introduction.findings:
                self._add(number, finding)
            self._changed.notify_all()

    def measure(self, profile: Profile | None) -> Report:
        """All rounds, and what follows from them."""
        transfers: list[Transfer] = []
        able = [number for number in sorted(self._members) if any(able for _, able in self._members[number].ports)]
        for kind, pairs in rounds(able):
            transfers += self._round(kind, [pair for pair in pairs if set(pair) <= set(self._members)])
        for number, reply in self._ask({number: {"do": "report"} for number in sorted(self._members)}, 0).items():
            for finding in reply.findings:
                self._add(number, finding)
        gb_per_s = None if profile is None else expected(profile).gb_per_s
        name = None if profile is None else profile.name
        findings = [*self._findings, *judge(transfers, gb_per_s, name, self._findings)]
        place = {host: at for at, host in enumerate(self._hosts)}
        findings.sort(key=lambda finding: place[finding.node])
        return Report(name, gb_per_s, len(self._hosts), len(able), transfers, findings)

    def dismiss(self, bad: list[str]) -> None:
        """Tell all nodes which ones are bad."""
        for member in self._members.values():
            with suppress(Disconnected):
                member.channel.send({"bad": bad})

    def close(self) -> None:
        for member in self._members.values():
            member.channel.close()

    def _round(self, kind: Kind, pairs: Pairs) -> list[Transfer]:
        """The transfers of all pairs at once: of each port with the one in the same place, which is its rail."""
        transfers: dict[tuple[int, int], Transfer] = {}
        receivers: dict[int, int] = {}
        for sender, receiver in pairs:
            receivers[sender] = receiver
            both = zip(self._members[sender].ports, self._members[receiver].ports, strict=False)
            for rail, ((out, can_send), (into, can_receive)) in enumerate(both):
                if can_send and can_receive:
                    ends = (self._hosts[sender], out, self._hosts[receiver], into)
                    transfers[sender, rail] = Transfer(kind, *ends)
        # What has no latency has no bandwidth: a cable that is cut costs one wait, not two.
        for what in perftest.PROGRAMS:
            for attempt in range(ATTEMPTS):
                self._transfers(what, receivers, transfers)
                again = [key for key, transfer in transfers.items() if transfer.error == perftest.NO_CLOCK]
                if not again or attempt == ATTEMPTS - 1:
                    break
                transfers |= {key: replace(transfers[key], error="") for key in again}
        return list(transfers.values())

    def _transfers(
        self, what: perftest.What, receivers: Mapping[int, int], transfers: dict[tuple[int, int], Transfer]
    ) -> None:
        def failed(sender: int, rail: int, why: str) -> None:
            transfers[sender, rail] = replace(transfers[sender, rail], error=why)

        rails: dict[int, list[int]] = {}
        for (sender, rail), transfer in transfers.items():
            if not transfer.error and not transfer.has(what):
                rails.setdefault(sender, []).append(rail)
        serving = self._ask(
            {
                receivers[sender]: {"do": "serve", "what": what, "rails": of_sender}
                for sender, of_sender in rails.items()
            },
            perftest.LISTEN_SECONDS,
        )
        orders: dict[int, Message] = {}
        for sender, of_sender in rails.items():
            ready = serving.get(receivers[sender], Answer())
            listening = {str(rail): ready.listening[str(rail)] for rail in of_sender if str(rail) in ready.listening}
            for rail in of_sender:
                if str(rail) not in listening:
                    host = self._hosts[receivers[sender]]
                    failed(sender, rail, f"{host}: {ready.errors.get(str(rail), 'does not answer')}")
            if listening:
                orders[sender] = {"do": "measure", "what": what, "peer": receivers[sender], "rails": listening}
        measured = self._ask(orders, self._meeting.limits.transfer + perftest.END_SECONDS)
        self._ask({number: {"do": "end"} for number in serving}, perftest.END_SECONDS)
        for sender, order in orders.items():
            reply = measured.get(sender, Answer())
            for key in order["rails"]:
                if (values := reply.values.get(key)) is None:
                    failed(sender, int(key), reply.errors.get(key, "the sender does not answer"))
                else:
                    known = {name: value for name, value in asdict(values).items() if value is not None}
                    transfers[sender, int(key)] = replace(transfers[sender, int(key)], **known)

    def _ask(self, orders: Mapping[int, Message], seconds: float) -> dict[int, Answer]:
        """Give orders to some nodes at once; their answers. A node without one is a failure, and left out from then on.

        Args:
            seconds: timeout of the work.
        """
        answers: dict[int, Answer] = {}
        orders = {number: order for number, order in orders.items() if number in self._members}
        deadline = time.monotonic() + seconds + SLACK
        for number, order in orders.items():
            with suppress(Disconnected):  # noticed when the answer is read
                self._members[number].channel.send(order)
        for number, order in orders.items():
            member = self._members[number]
            try:
                answers[number] = Answer.model_validate(member.channel.receive(deadline - time.monotonic()))
            except (Disconnected, ValidationError) as error:
                member.channel.close()
                del self._members[number]
                why = "sent a malformed answer" if isinstance(error, ValidationError) else str(error)
                what = f"{why}, when asked to {order['do']} {order.get('what', '')}".rstrip()
                self._add(number, fail("node", what, "see the output of that node; drain it if it hangs"))
        return answers

    def _add(self, number: int, finding: Finding, host: str = "") -> None:
        self._findings.append(replace(finding, node=host or self._hosts[number]))
