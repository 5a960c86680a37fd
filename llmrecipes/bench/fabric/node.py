"""What one node does: it looks at its ports, serves and measures transfers, and looks at its ports again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import BaseModel

from llmrecipes.bench.fabric import perftest
from llmrecipes.doctor import fabric
from llmrecipes.doctor.check_result import Finding, fail, warn
from llmrecipes.hardware import nics
from llmrecipes.hardware.nics import Port
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.rendezvous import Message

ACTIVE = "ACTIVE"


@dataclass(frozen=True)
class Limits:
    """Seconds: that a bandwidth is measured for, and after which a transfer has failed."""

    seconds: float
    transfer: float


class Introduction(BaseModel):
    """Ports of a node in order, each with whether it can be used, and what is wrong with them."""

    ports: list[tuple[str, bool]]
    findings: list[Finding]


class Answer(BaseModel):
    """What a node answers to an order; by the index of the port, as text."""

    listening: dict[str, int] = {}
    values: dict[str, perftest.PerftestResult] = {}
    errors: dict[str, str] = {}
    findings: list[Finding] = []


class FabricNode:
    """This node.

    Args:
        profile: the site; None: all ports are measured, and compared with nothing.
    """

    def __init__(self, profile: Profile | None, hosts: tuple[str, ...], limits: Limits) -> None:
        self._profile = profile
        self._hosts = hosts
        self._limits = limits
        ports = nics.ports()
        self.findings = [finding for finding in self._look(ports) if finding.status in ("warn", "fail")]
        chosen = ports if profile is None else nics.choose(ports, profile, os.environ).ports
        self._before = {port.name: port for port in chosen}
        self._rails = [self._local(port) for port in chosen]
        self._serving: dict[str, perftest.Process] = {}

    def _local(self, port: Port) -> perftest.Local:
        """A port with the variables of NCCL that say how it is used, so that the same path is measured."""

        def setting(name: str) -> str:
            site = {} if self._profile is None else self._profile.environment
            value = os.environ.get(name) or str(site.get(name, ""))
            return value if value.isdecimal() else ""

        gid = None if port.link_layer == "InfiniBand" else fabric.gid_index(port, self._profile, os.environ)
        return perftest.Local(port, gid, setting("NCCL_IB_TC"), setting("NCCL_IB_SL"))

    def _look(self, ports: list[Port]) -> list[Finding]:
        if missing := perftest.missing():
            fix = "apt-get install perftest, or use the project's CUDA image, which has it"
            return [fail("perftest", f"{' and '.join(missing)} not found on PATH", fix)]
        if not ports and self._profile is None:
            return [fail("adapters", "this node has none", "load the driver, or pass /dev/infiniband to the container")]
        return [
            *fabric.check(ports, self._profile, os.environ),
            *fabric.check_roce(ports, self._profile, os.environ),
        ]

    def introduce(self) -> Message:
        """Its ports in order, each with whether it can be used, and what is wrong with them."""
        able = not any(finding.check == "perftest" for finding in self.findings)
        ports = [[local.port.name, able and local.port.state == ACTIVE] for local in self._rails]
        return {"ports": ports, "findings": [finding.as_dict() for finding in self.findings]}

    def answer(self, message: Message) -> Message:
        """Do what the first node asks for."""
        match message["do"]:
            case "serve":
                return self._serve(message["what"], message["rails"])
            case "measure":
                return self._measure(message["what"], self._hosts[message["peer"]], message["rails"])
            case "end":
                self.end()
                return {}
            case _:
                return self._report()

    def end(self) -> None:
        """End all programs."""
        while self._serving:
            self._serving.popitem()[1].end()

    def _serve(self, what: perftest.What, rails: list[int]) -> Message:
        listening, errors = {}, {}
        limit = self._limits.transfer + 2 * perftest.LISTEN_SECONDS
        for rail, tcp in zip(rails, perftest.free_ports(len(rails)), strict=True):
            words = perftest.command(what, self._rails[rail], self._limits.seconds, tcp, None)
            self._serving[str(rail)] = perftest.Process(words, limit)
            listening[str(rail)] = tcp
        deadline = time.monotonic() + perftest.LISTEN_SECONDS
        for key, tcp in list(listening.items()):
            process = self._serving[key]
            while not (ready := perftest.listens(tcp)) and process.running() and time.monotonic() < deadline:
                time.sleep(0.02)
            if not ready:
                errors[key] = perftest.failure(self._serving.pop(key).end())
                del listening[key]
        return {"listening": listening, "errors": errors}

    def _measure(self, what: perftest.What, peer: str, rails: Mapping[str, int]) -> Message:
        values, errors = {}, {}
        started = {
            key: perftest.Process(
                perftest.command(what, self._rails[int(key)], self._limits.seconds, tcp, peer),
                self._limits.transfer + perftest.LISTEN_SECONDS,
            )
            for key, tcp in rails.items()
        }
        deadline = time.monotonic() + self._limits.transfer
        for key, process in started.items():
            in_time = process.wait(deadline)
            printed = process.end()
            if (result := perftest.parse(what, printed)) is not None:
                values[key] = asdict(result)
            else:
                late = f"no {what} within {self._limits.transfer:g} s"
                errors[key] = perftest.failure(printed) if in_time else late
        return {"values": values, "errors": errors}

    def _report(self) -> Message:
        """What has happened to the ports since the start."""
        findings = []
        for port in nics.ports():
            before = self._before.get(port.name)
            if before is None or before.state != ACTIVE:
                continue
            flaps = port.counters.get("link_downed", 0) - before.counters.get("link_downed", 0)
            name = f"adapter {port.name}"
            fix = "check cable, transceiver and switch port; see ibstat and dmesg"
            if port.state != ACTIVE:
                findings.append(fail(name, f"port went {port.state} during the measurements", fix))
            elif flaps > 0:
                findings.append(fail(name, f"link went down {flaps} times during the measurements", fix))
            risen = {
                key: risen
                for key in fabric.ERRORS
                if (risen := port.counters.get(key, 0) - before.counters.get(key, 0)) > 0
            }
            if risen:
                what = ", ".join(f"{key} {count:,}" for key, count in risen.items())
                findings.append(warn(name, f"errors during the measurements: {what}", "clean or replace the cable"))
        return {"findings": [finding.as_dict() for finding in findings]}
