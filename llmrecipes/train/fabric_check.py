"""Check that ranks of several nodes reach each other over the site's fabric, before the model is built.

NCCL falls back to TCP silently, and the run would then train several times slower. Its choice is read from its output.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from llmrecipes.engine.base import Platform
from llmrecipes.errors import UserError
from llmrecipes.hardware.nccl_log import FILE, LEVEL, SUBSYSTEMS, fault, log_of, proving, read, shown
from llmrecipes.hardware.nics import CHOICE, LINK_LAYERS, Port
from llmrecipes.launch.environment import FABRIC
from llmrecipes.redact import redact

MOST_NAMED = 8
"""Nodes that a message names."""


@dataclass(frozen=True)
class NetworkReport:
    """What one rank reports; `fault` and `lines` are empty where nothing is wrong."""

    host: str
    network: str
    connections: int
    fault: str = ""
    lines: tuple[str, ...] = ()


def require_fabric(platform: Platform, output: NcclOutput | None, *, allow_socket: bool) -> str | None:
    """Connect all ranks, and compare what NCCL says about its network with the site's. A collective of all ranks.

    Args:
        platform: platform of this rank.
        output: output of NCCL in this rank; None where no network is expected: one node, or a site without a fabric.
        allow_socket: accept any network.

    Returns:
        The network of each node in one line; None where none is expected.

    Raises:
        UserError: on all ranks, if it is another network, or without GPUDirect RDMA.
    """
    if output is None:
        return None
    kind = os.environ[FABRIC]
    # NCCL connects an algorithm when it is first used: these two use trees and rings.
    part = torch.ones(1, device=platform.device)
    dist.all_reduce(part)
    dist.all_gather_into_tensor(torch.empty(dist.get_world_size(), device=platform.device), part)
    platform.synchronize()
    output.restore()
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    mine = report(kind, platform.backend, output.text(), socket.gethostname(), output.where, leads=leads)
    reports: list[NetworkReport] = [mine] * dist.get_world_size()
    dist.all_gather_object(reports, mine)
    return judge(reports, kind, allow_socket=allow_socket)


def leave_out_other_adapters(ports: Sequence[Port]) -> None:
    """Let NCCL use only ports with the site's link layer, where a node has others too and the user named none.

    NCCL itself uses InfiniBand and Ethernet ports together; those of the other kind are for storage.

    Args:
        ports: ports of this node.
    """
    layer = LINK_LAYERS.get(os.environ.get(FABRIC, ""))
    ours = [f"{port.device}:{port.number}" for port in ports if port.link_layer == layer]
    if 0 < len(ours) < len(ports) and layer in ("InfiniBand", "Ethernet"):
        os.environ.setdefault(CHOICE, f"={','.join(ours)}")


def report(kind: str, backend: str, log: str, host: str, where: str, *, leads: bool = True) -> NetworkReport:
    """What a rank's log says.

    Args:
        kind: network of the site.
        backend: backend of torch.distributed; gloo, which CPUs use, only knows sockets.
        log: log of NCCL.
        host: host of the rank.
        where: the log is, for a message.
        leads: whether to quote it: all ranks of a node say the same, and every rank receives what all say.
    """
    if "nccl" not in backend:
        return NetworkReport(host, f"sockets ({backend})", 0, f"sockets ({backend})")
    choice = read(log)
    wrong = fault(choice, kind)
    if wrong is None:
        return NetworkReport(host, choice.described(), choice.connections)
    if not choice.names:
        wrong += f" ({where}, {len(log):,} characters)"
    return NetworkReport(host, choice.described(), choice.connections, wrong, choice.lines if leads else ())


def judge(reports: Sequence[NetworkReport], kind: str, *, allow_socket: bool) -> str:
    """The network of each node in one line.

    Args:
        reports: reports of all ranks.
        kind: network of the site.
        allow_socket: accept any.

    Raises:
        UserError: a rank has a fault, or no rank is connected to another node.
    """
    faulty = [report for report in reports if report.fault]
    if not allow_socket:
        if faulty:
            where = _named(list(dict.fromkeys(report.host for report in faulty)))
            said = next((report.lines for report in faulty if report.lines), ())
            what = f"ranks of different nodes use {faulty[0].fault}, on {where} ({len(faulty)} of {len(reports)} ranks)"
            raise _refused("\n    ".join((what, *said)), kind)
        if not any(report.connections for report in reports):
            raise _refused("NCCL's log shows no connection between nodes", kind)
    # A rank without a connection to another node knows only which network was chosen.
    hosts: dict[str, str] = {}
    for report in sorted(reports, key=lambda report: (bool(report.fault), report.connections)):
        hosts[report.host] = report.network
    by_network: dict[str, list[str]] = {}
    for host, network in sorted(hosts.items()):
        by_network.setdefault(network, []).append(host)
    if len(by_network) == 1:
        return f"{next(iter(by_network))} on {len(hosts)} nodes"
    return "; ".join(f"{network} on {_named(named)}" for network, named in by_network.items())


def _named(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:MOST_NAMED]) + (f" and {len(hosts) - MOST_NAMED} more" if hosts[MOST_NAMED:] else "")


def _refused(what: str, kind: str) -> UserError:
    return UserError(
        what,
        where="network",
        rule=f"inter_node.kind of the profile is {kind}: ranks of different nodes use it, with GPUDirect RDMA",
        fix="llmrecipes doctor --cluster on these nodes; /dev/infiniband and the NCCL plugin in the container; unset "
        "NCCL_NET and NCCL_IB_DISABLE; --allow-socket accepts any network",
    )


SECONDS = 1.0
"""Between looks at the file: a warning is shown so much later than NCCL itself would."""


class NcclOutput:
    """Follows the file that NCCL writes in this process, from before NCCL starts."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Set NCCL's variables, until `restore`.

        Raises:
            UserError: no file can be made on this node.
        """
        host = socket.gethostname()
        try:
            handle, name = tempfile.mkstemp(prefix="llmrecipes-nccl-", suffix=".log")
        except OSError as error:
            raise UserError(
                f"cannot create a file in {tempfile.gettempdir()} on {host}: {error.strerror}",
                where="TMPDIR",
                rule="each rank writes NCCL's log to its node, to show which network it uses",
                fix="set TMPDIR to a writable folder on a local disk of the node",
            ) from error
        os.close(handle)
        self.path = Path(name)
        self.where = f"{host}:{name}"
        self._target = log_of(environment, host, os.getpid())
        self._level = environment.get(LEVEL)
        self._place, self._lock, self._told = 0, threading.Lock(), False
        self._environment = environment
        self._before = {name: environment.get(name) for name in (LEVEL, SUBSYSTEMS, FILE)}
        environment.update({**proving(environment), FILE: name.replace("%", "%%")})

    @property
    def level(self) -> str:
        """What is shown, in words."""
        return f"what {LEVEL}={self._level} asks for" if self._level else "warnings"

    def restore(self) -> None:
        """Restore the user's values: NCCL has read its variables."""
        for name, value in self._before.items():
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value

    def text(self) -> str:
        """All of the file; empty if it no longer exists."""
        try:
            return self.path.read_text("utf-8", "replace")
        except OSError:
            return ""

    def pass_on(self) -> None:
        """Show complete lines that NCCL has written since, as far as the user's level asks for them."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    file.seek(self._place)
                    new = file.read()
            except OSError:
                return
            whole = new[: new.rfind(b"\n") + 1]
            self._place += len(whole)
            if lines := shown(whole.decode("utf-8", "replace").splitlines(), self._level):
                self._show("".join(f"{line}\n" for line in lines))

    def tell(self) -> None:
        """After an error: everything that was not shown yet, and where the rest is; once."""
        self.pass_on()
        if not self._told:
            self._told = True
            print(f"NCCL's log is {self.where}", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        if self._target is not None:
            try:
                with self._target.open("a", encoding="utf-8") as file:
                    file.write(redact(text))
                return
            except OSError:
                self._target = None
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def nccl_output() -> Iterator[NcclOutput | None]:
    """Follow this rank's output in a thread, if the site has a fabric to check; otherwise do nothing.

    The file is removed, after an error it stays.
    """
    if FABRIC not in os.environ:
        yield None
        return
    output = NcclOutput(os.environ)
    ended = threading.Event()
    if os.environ.get("RANK", "0") == "0":
        print(f"NCCL shows {output.level}; its INFO, which names the network, goes to {output.where}", flush=True)

    def follow() -> None:
        while not ended.wait(SECONDS):
            output.pass_on()

    threading.Thread(target=follow, name="nccl-output", daemon=True).start()
    try:
        with report_on_error(output):
            yield output
    finally:
        ended.set()
        output.restore()
    output.pass_on()
    output.path.unlink(missing_ok=True)


@contextmanager
def report_on_error(output: NcclOutput | None) -> Iterator[None]:
    """Show what NCCL has said before an error is handled further: the process may end without closing anything."""
    try:
        yield
    except Exception:
        if output is not None:
            output.tell()
        raise
