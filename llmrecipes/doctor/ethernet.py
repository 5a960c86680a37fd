"""Ethernet of this node: the interfaces that NCCL's sockets would use, and the speed of their links."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from llmrecipes.doctor.check_result import Finding, fail, ok, skip, warn
from llmrecipes.hardware.nics import expected
from llmrecipes.hardware.profile import Profile

INTERFACES = Path("/sys/class/net")
CHOICE = "NCCL_SOCKET_IFNAME"
AUTOMATIC = ("ib", "^docker,lo,virbr", "docker", "lo")
"""What NCCL 2.27 tries without a choice, until one matches (`ncclFindInterfaces`)."""
MOST = 16
"""Interfaces that NCCL uses at most (MAX_IFS)."""
NAME = "Ethernet"


def check_ethernet(
    profile: Profile | None,
    several: bool,
    environment: Mapping[str, str],
    addressed: Collection[str],
    network: Path = INTERFACES,
) -> Iterator[Finding]:
    """Compare the links that NCCL would use with those of the profile.

    Args:
        profile: nothing is checked on sites whose GPUs do not communicate over Ethernet.
        several: whether a run spans several nodes; one node does not use its links.
        environment: of the ranks; may choose interfaces.
        addressed: interfaces with an IP address; NCCL ignores others.
        network: folder of the kernel.
    """
    if not several or profile is None or profile.gpu is None or profile.inter_node.kind != "ethernet":
        return
    usable = [name for name in sorted(addressed) if _read(network / name / "operstate") in ("up", "unknown")]
    used, reason = choose(usable, environment.get(CHOICE, ""))
    if not used:
        what = f"{reason} selects no interface that is up and has an address; there are: {', '.join(usable) or 'none'}"
        yield fail(NAME, what, f"set {CHOICE} to an interface that connects the nodes")
        return
    rates = {name: gb_per_s(network / name) for name in used}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if unknown := [name for name in used if name not in known]:
        yield skip(NAME, f"the kernel does not know the speed of {', '.join(unknown)}; llmrecipes bench collectives")
        return
    yield from _compare(known, profile, reason)


def _compare(rates: Mapping[str, float], profile: Profile, reason: str) -> Iterator[Finding]:
    adapters = expected(profile)
    wanted = adapters.ports * adapters.gb_per_s
    listed = " and ".join(f"{name} {rate:g} GB/s" for name, rate in rates.items())
    best = max(rates, key=lambda name: rates[name])
    slow = [name for name, rate in rates.items() if rate < 0.5 * rates[best]]
    if sum(rates.values()) < 0.9 * wanted:
        what = f"{listed}, by {reason}, but a node of {profile.name} has {wanted:g} GB/s"
        yield fail(NAME, what, f"ethtool {best}: cable, switch port; or {CHOICE}, if another interface is faster")
    elif slow:
        # Channels are spread over all of them, and wait for the slowest.
        what = f"{listed}: NCCL uses all of them, by {reason}"
        yield warn(NAME, what, f"{CHOICE}=={best} in environment of {profile.name}")
    else:
        yield ok(NAME, f"{listed}, by {reason}")


def choose(names: Sequence[str], value: str) -> tuple[list[str], str]:
    """The interfaces that NCCL uses, and what selects them, for a message.

    Args:
        names: those that are up and have an address.
        value: of NCCL_SOCKET_IFNAME: prefixes, or with = whole names; ^ in front excludes them. Empty: unset.
    """
    if value:
        return _matching(names, value), f"{CHOICE}={value}"
    tries = [_matching(names, automatic) for automatic in AUTOMATIC]
    return next((chosen for chosen in tries if chosen), []), "NCCL's own choice"


def _matching(names: Sequence[str], value: str) -> list[str]:
    exclude = value.startswith("^")
    whole = value.lstrip("^").startswith("=")
    wanted = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]
    matches = (name for name in names if any(name == word if whole else name.startswith(word) for word in wanted))
    chosen = set(matches)
    return [name for name in names if (name in chosen) != exclude][:MOST]


def gb_per_s(interface: Path) -> float | None:
    """Speed of an interface's link in 1e9 bytes a second; None if the kernel does not know it.

    A VLAN or a bridge has that of the fastest link below it. veth and the like say 10 Gb/s whatever is below them
    (drivers/net/veth.c), so they count as unknown.
    """
    speeds = [_read(link / "speed") for link in _links(interface)]
    # -1 or an error where the driver does not know, as in virtual machines.
    return max((int(speed) / 8000 for speed in speeds if speed.isdecimal() and int(speed)), default=None)


def addressed() -> list[str]:
    """Interfaces of this machine with an IP address."""
    import psutil  # only where a node is examined

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.family in families for address in addresses)
    ]


def _links(interface: Path) -> list[Path]:
    """The interface itself if there is hardware behind it, or those that it stands on."""
    if (interface / "device").exists() or (interface / "bonding").is_dir():
        return [interface]
    return [link for lower in sorted(interface.glob("lower_*")) for link in _links(lower)]


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
