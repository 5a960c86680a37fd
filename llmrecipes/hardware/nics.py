"""Ports of InfiniBand, RoCE and EFA adapters: what the kernel says about them, and which of them training uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmrecipes.hardware.profile import Adapters, Profile

SYSTEM = Path("/sys/class/infiniband")
RDMA = ("infiniband", "roce", "efa")
"""Kinds of links with such adapters."""
LINK_LAYERS = {"infiniband": "InfiniBand", "roce": "Ethernet", "efa": "Unknown"}
"""What `ports/1/link_layer` says (drivers/infiniband/core/sysfs.c); the EFA driver reports no layer."""
CHOICE = "NCCL_IB_HCA"


@dataclass(frozen=True)
class Port:
    """One port of an adapter."""

    name: str
    """`mlx5_0/1`."""
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, …"""
    gb_per_s: float
    """Link rate in 1e9 bytes a second."""
    link_layer: str = ""
    """`InfiniBand`, `Ethernet` or `Unknown`; empty if the kernel does not say."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Of `counters/` and `hw_counters/`, the larger where both have one; since the driver was loaded."""

    @property
    def device(self) -> str:
        return self.name.partition("/")[0]

    @property
    def number(self) -> str:
        return self.name.partition("/")[2]


@dataclass(frozen=True)
class Choice:
    """The ports that training uses."""

    ports: tuple[Port, ...]
    reason: str
    """Who chose them, for a message."""
    by_user: bool = False
    """Whether the user's own NCCL_IB_HCA did."""
    absent: tuple[str, ...] = ()
    """Chosen names that do not exist."""
    exact: bool = False
    """Whether they were chosen by name, not by their kind."""


def ports(system: Path = SYSTEM) -> list[Port]:
    """Ports of all adapters, in order."""
    folders = sorted(system.glob("*/ports/*")) if system.is_dir() else []
    return [_port(folder) for folder in folders]


def expected(profile: Profile) -> Adapters:
    """The ports of a node; in profiles that do not say, one for each GPU with its bandwidth."""
    return profile.adapters or Adapters(ports=profile.gpus_per_node or 1, gb_per_s=profile.inter_node.gb_per_s)


def nccl_ib_hca(profile: Profile) -> str | None:
    """The value of NCCL_IB_HCA that follows from the names in a profile; None without names."""
    names = () if profile.adapters is None else profile.adapters.names
    return f"={','.join(names)}" if names and profile.inter_node.kind != "efa" else None


def choose(ports: Sequence[Port], profile: Profile, user: Mapping[str, str]) -> Choice:
    """The ports that ranks use on a site with such adapters.

    Args:
        user: variables that the user has set, which win over the profile's.
    """
    kind = profile.inter_node.kind
    if kind != "efa":  # NCCL's plugin for EFA does not read the variable
        if chosen_by_user := user.get(CHOICE):
            return _by_value(ports, chosen_by_user, f"{CHOICE}={chosen_by_user} of your environment", by_user=True)
        if chosen_by_user := str(profile.environment.get(CHOICE, "")) or nccl_ib_hca(profile):
            return _by_value(ports, chosen_by_user, f"{CHOICE}={chosen_by_user} of {profile.name}")
    elif profile.adapters is not None and profile.adapters.names:
        return _by_value(ports, f"={','.join(profile.adapters.names)}", f"adapters.names of {profile.name}")
    layer = LINK_LAYERS[kind]
    return Choice(tuple(port for port in ports if port.link_layer in (layer, "")), f"link layer {layer}")


def _by_value(ports: Sequence[Port], value: str, reason: str, *, by_user: bool = False) -> Choice:
    """NCCL's syntax: prefixes of names, or with = whole names, each with `:port` or not; ^ in front excludes them."""
    exclude = value.startswith("^")
    exact = "=" in value[:2]
    wanted = [word.partition(":") for word in value.lstrip("^=").split(",") if word]

    def matches(port: Port, name: str, number: str) -> bool:
        same = port.device == name if exact else port.device.startswith(name)
        return same and number in ("", port.number)

    chosen = tuple(port for port in ports if any(matches(port, name, no) for name, _, no in wanted) != exclude)
    missing = (name for name, _, no in wanted if not any(matches(port, name, no) for port in ports))
    return Choice(chosen, reason, by_user, () if exclude else tuple(missing), exact and not exclude)


def _port(folder: Path) -> Port:
    # `4: ACTIVE` and `400 Gb/sec (4X NDR)`.
    state = _read(folder / "state").partition(": ")[2] or "unknown"
    rate = re.match(r"\d+(\.\d+)?", _read(folder / "rate"))
    counters: dict[str, int] = {}
    # Soft-RoCE and EFA have no counters/, and mlx5 has some of them twice.
    for file in (*folder.glob("counters/*"), *folder.glob("hw_counters/*")):
        if (value := _read(file)).isdecimal():
            counters[file.name] = max(int(value), counters.get(file.name, 0))
    name = f"{folder.parents[1].name}/{folder.name}"
    return Port(name, state, float(rate[0]) / 8 if rate else 0.0, _read(folder / "link_layer"), counters)


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
