"""InfiniBand, RoCE and EFA ports that are missing, down or slow, according to the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, ok, warn
from llmrecipes.hardware.profile import Profile

SYSTEM = Path("/sys/class/infiniband")
RDMA = ("infiniband", "roce", "efa")
FLAPS = 10
"""Times a link may have gone down since the machine started."""


@dataclass(frozen=True)
class Port:
    """One port of an adapter."""

    name: str
    """`mlx5_0/1`."""
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, …"""
    gb_per_s: float
    """Link rate in 1e9 bytes a second."""
    downed: int
    """Times the link went down."""


def ports(system: Path = SYSTEM) -> list[Port]:
    """Ports of all adapters, in order."""
    folders = sorted(system.glob("*/ports/*")) if system.is_dir() else []
    return [_port(folder) for folder in folders]


def check(found: list[Port], profile: Profile | None) -> Iterator[Finding]:
    """Check the ports.

    Args:
        found: ports of this node.
        profile: which ports training uses, and their rate; None: no expectation.
    """
    wanted = profile is not None and profile.inter_node.kind in RDMA
    if profile is not None and wanted:
        pattern = str(profile.environment.get("NCCL_IB_HCA", ""))
        found = [port for port in found if _used(port, pattern)]
        if not found:
            what = f"none, but {profile.name} has {profile.inter_node.kind}"
            yield fail("adapters", what, "load the driver, or pass /dev/infiniband to the container")
            return
    for port in found:
        check_name = f"adapter {port.name}"
        if port.state != "ACTIVE":
            verdict = fail if wanted else warn
            yield verdict(check_name, f"port is {port.state}", "check cable and switch port; see ibstat")
        elif profile is not None and wanted and port.gb_per_s < 0.9 * profile.inter_node.gb_per_s:
            what = f"{port.gb_per_s:g} GB/s, but {profile.name} has {profile.inter_node.gb_per_s:g}"
            yield fail(check_name, what, "a cable or switch port negotiated a lower rate; see ibstat")
        if port.downed > FLAPS:
            yield warn(check_name, f"link went down {port.downed} times since the machine started", "replace the cable")
    if found and all(port.state == "ACTIVE" for port in found):
        yield ok("adapters", f"{len(found)} ports active, {found[0].gb_per_s:g} GB/s each")


def _used(port: Port, pattern: str) -> bool:
    """NCCL_IB_HCA: prefixes, or with = whole names; ^ excludes."""
    exclude, exact = pattern.startswith("^"), "=" in pattern[:2]
    names = [name.partition(":")[0] for name in pattern.lstrip("^=").split(",") if name]
    if not names:
        return True
    device = port.name.partition("/")[0]
    match = device in names if exact else device.startswith(tuple(names))
    return match != exclude


def _port(folder: Path) -> Port:
    # `4: ACTIVE` and `400 Gb/sec (4X NDR)`.
    state = _read(folder / "state").partition(": ")[2] or "unknown"
    rate = re.match(r"[\d.]+", _read(folder / "rate"))
    downed = _read(folder / "counters" / "link_downed")
    name = f"{folder.parents[1].name}/{folder.name}"
    return Port(name, state, float(rate[0]) / 8 if rate else 0.0, int(downed) if downed.isdecimal() else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
