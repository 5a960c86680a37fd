"""RoCE's addresses (GIDs) and packet sizes, according to the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, warn
from llmrecipes.hardware.nics import SYSTEM, Port, choose
from llmrecipes.hardware.profile import Profile

NETWORK = Path("/sys/class/net")
MTU = 4200
"""Least MTU of the interface that leaves room for RoCE's largest packets, 4096 bytes."""
INDEX = "NCCL_IB_GID_INDEX"
IPV4 = "0000:0000:0000:0000:0000:ffff:"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def check(
    found: Sequence[Port],
    profile: Profile | None,
    user: Mapping[str, str],
    system: Path = SYSTEM,
    network: Path = NETWORK,
) -> Iterator[Finding]:
    """Check the ports that training uses.

    Args:
        found: ports of this node.
        profile: nothing is checked on sites without RoCE.
        user: the environment of the user.
        system, network: folders of the kernel.
    """
    if profile is None or profile.inter_node.kind != "roce":
        return
    index = _chosen(profile, user)
    for port in choose(found, profile, user).ports:
        folder = system / port.device / "ports" / port.number
        usable = gid_index(port, profile, user, system)
        if usable is None:
            yield _unusable(port, folder, index)
            continue
        interface = _read(folder, "gid_attrs", "ndevs", str(usable))
        mtu = _read(network, interface, "mtu") if interface else ""
        if mtu.isdecimal() and int(mtu) < MTU:
            what = f"MTU of {interface} is {mtu}, too small for RoCE's packets of 4096 bytes"
            yield warn(f"RoCE {port.name}", what, f"ip link set dev {interface} mtu 9000, and the same on the switch")


def gid_index(port: Port, profile: Profile | None, user: Mapping[str, str], system: Path = SYSTEM) -> int | None:
    """Index of a port's address of RoCE v2 over IPv4: the one that is chosen, else the first; None without one.

    Args:
        port, profile, user, system: see `check`.
    """
    index = _chosen(profile, user)
    folder = system / port.device / "ports" / port.number
    numbers = [index] if index.isdecimal() else [each.name for each in folder.glob("gids/*")]
    return next(
        (number for number in sorted(map(int, numbers))
         if _read(folder, "gid_attrs", "types", str(number)) == "RoCE v2"
         and _read(folder, "gids", str(number)).startswith(IPV4)),
        None,
    )  # fmt: skip


def _chosen(profile: Profile | None, user: Mapping[str, str]) -> str:
    return user.get(INDEX) or ("" if profile is None else str(profile.environment.get(INDEX, "")))


def _unusable(port: Port, folder: Path, index: str) -> Finding:
    name, fix = f"RoCE {port.name}", f"show_gids lists the GIDs of an adapter; {INDEX} chooses one, RoCE v2 with IPv4"
    if not index:
        return fail(name, "no GID of RoCE v2 with an IPv4 address", "give the interface of the adapter an address")
    kind, gid = _read(folder, "gid_attrs", "types", index), _read(folder, "gids", index)
    if gid in ("", EMPTY):
        return fail(name, f"GID {index} is empty", fix)
    if kind == "RoCE v2":
        return warn(name, f"GID {index} is {gid}, no IPv4 address", fix)
    return fail(name, f"GID {index} is of {kind or 'an unknown type'}, not RoCE v2", fix)


def _read(*parts: Path | str) -> str:
    try:
        return Path(*parts).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):  # an empty entry of types/ is EINVAL
        return ""
