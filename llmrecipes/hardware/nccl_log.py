"""Which network NCCL uses, according to its own log (`NCCL_DEBUG=INFO`, `NCCL_DEBUG_SUBSYS=INIT,NET`).

The lines are those of NCCL's src/init.cc, src/transport/net.cc and src/transport/net_ib, and of aws-ofi-nccl:

    NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
    NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 32 nics)
    NCCL INFO Using network IB
    NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEVEL = "NCCL_DEBUG"
SUBSYSTEMS = "NCCL_DEBUG_SUBSYS"
FILE = "NCCL_DEBUG_FILE"
NEEDED = ("INIT", "NET")
"""Subsystems whose INFO names the network."""
USUAL = ("INIT", "BOOTSTRAP", "ENV")
"""Those that NCCL logs where nobody names any."""
VERBOSE = ("INFO", "ABORT", "TRACE")
"""Levels that include INFO."""
_CHANNEL = re.compile(r"(?:\[(send|receive)\] )?via NET/(.+?)/\d+(?:\(\d+\))?((?:/\S+)*)\s*(?:comm |$)")
_CHOSEN = re.compile(r"NCCL INFO Using network (.+?)\s*$")
_PORT = re.compile(r"\[\d+\]\S+?:\d+/(IB|RoCE)\b")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w-]+)")
_VERBS = re.compile(r"(g?IB|UCX|NCCL RDMA)")
"""Names of NCCL's own network for verbs and of plugins for it: IB, IBext_v8, UCX, `NCCL RDMA Plugin v9`, gIB."""
_LAYERS = {"infiniband": "IB", "roce": "RoCE"}
SHOWN_LINES, SHOWN_CHARACTERS = 4, 200


@dataclass(frozen=True)
class Network:
    """Log findings of one rank.

    `names` are the networks of its connections to other nodes, or the chosen one before there are any; `layers` are
    `IB` and `RoCE`, of the ports that it uses; `provider` is libfabric's.
    """

    names: tuple[str, ...]
    layers: frozenset[str]
    provider: str | None
    receives: int
    """Connections to other nodes that receive; `direct_receives` of them with GPUDirect RDMA."""
    direct_receives: int
    sends: int
    direct_sends: int
    lines: tuple[str, ...]
    """Lines that show it, for a message."""

    @property
    def connections(self) -> int:
        return self.receives + self.sends

    @property
    def direct(self) -> bool:
        """Whether GPUDirect RDMA is used; NCCL sends without it on platforms without NVLink (NCCL_NET_GDR_READ)."""
        sent_by_host = self.receives > 0 and self.direct_sends == 0
        return self.direct_receives == self.receives and (sent_by_host or self.direct_sends == self.sends)

    def described(self) -> str:
        """`IB with GPUDirect RDMA`."""
        name = ", ".join(self.names) or "no network"
        if not self.connections:
            return name
        return f"{name} {'with' if self.direct else 'without'} GPUDirect RDMA"


def read(text: str) -> Network:
    """Parse a log; unknown lines are ignored."""
    chosen: list[str] = []
    used: list[str] = []
    layers: set[str] = set()
    provider = None
    counts = {"receive": [0, 0], "send": [0, 0]}
    shown: dict[str, None] = {}
    for line in text.splitlines():
        if "NCCL" not in line:
            continue
        if match := _CHANNEL.search(line):
            direction, name, more = match.groups()
            used.append(name)
            counts[direction or "receive"][0] += 1
            counts[direction or "receive"][1] += "/GDRDMA" in more
        elif match := _CHOSEN.search(line):
            chosen.append(match[1])
        elif match := _PROVIDER.search(line):
            provider = match[1]
        elif " : Using [" in line:
            layers.update(_PORT.findall(line))
        elif not re.search(r"NET/\w+ ?:|NCCL WARN", line):
            continue
        shown.setdefault(line[line.index("NCCL") :][:SHOWN_CHARACTERS])
    receives, direct_receives = counts["receive"]
    sends, direct_sends = counts["send"]
    names = tuple(dict.fromkeys(used or chosen[-1:]))
    lines = tuple(shown)[:SHOWN_LINES]
    return Network(names, frozenset(layers), provider, receives, direct_receives, sends, direct_sends, lines)


def fault(network: Network, kind: str) -> str | None:
    """Difference from the network of a site; None if none. A rank without connections to other nodes has none.

    Args:
        kind: `infiniband`, `roce` or `efa`.
    """
    if not network.names:
        return "a network not named in NCCL's log"
    names = ", ".join(network.names)
    if kind == "efa":
        if not all("libfabric" in name.lower() or "ofi" in name.lower() for name in network.names):
            return names
        if network.provider not in (None, "efa"):
            return f"{names} over libfabric's provider {network.provider}"
    else:
        if not all(_VERBS.match(name) for name in network.names):
            return names
        if network.layers and _LAYERS[kind] not in network.layers:
            return f"{names} over {', '.join(sorted(network.layers))}"
    return None if network.direct else network.described()


def log_of(environment: Mapping[str, str], host: str, process: int) -> Path | None:
    """The log of a process; None if it logs to its output.

    Args:
        environment: with NCCL_DEBUG_FILE, in which %h is the host name up to its first dot, and %p the process id.
    """
    pattern = environment.get(FILE)
    if not pattern:
        return None
    values = {"%h": host.partition(".")[0], "%p": str(process), "%%": "%"}
    return Path(re.sub("%[hp%]", lambda match: values[match[0]], pattern))


def proving(user: Mapping[str, str]) -> dict[str, str]:
    """Level and subsystems with which NCCL logs what proves its network, and what the user wants besides.

    Args:
        user: variables that the user has set. Subsystems are names with commas between them, after ^ those left out.
    """
    if not verbose(user.get(LEVEL)):
        return {LEVEL: "INFO", SUBSYSTEMS: ",".join(NEEDED)}
    chosen = user.get(SUBSYSTEMS, "").upper()
    names = [name for name in chosen.lstrip("^").split(",") if name]
    if chosen.startswith("^"):
        left = ",".join(name for name in names if name not in (*NEEDED, "ALL"))
        subsystems = f"^{left}" if left else "ALL"
    else:
        subsystems = ",".join(dict.fromkeys((*(names or USUAL), *NEEDED)))
    return {LEVEL: user[LEVEL], SUBSYSTEMS: subsystems}


def verbose(level: str | None) -> bool:
    """Whether a level shows more than warnings."""
    return (level or "").upper() in VERBOSE


def shown(lines: Sequence[str], level: str | None) -> list[str]:
    """Lines of a log at INFO that a level shows.

    Args:
        level: the user's; None: warnings, which a file would take away from the output.
    """
    if verbose(level):
        return list(lines)
    return [line for line in lines if "NCCL WARN" in line]
