"""This node's names, interfaces and ports, and the limits of this process: locked and shared memory, open files."""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, ok, warn
from llmrecipes.hardware.nics import RDMA
from llmrecipes.hardware.profile import Profile
from llmrecipes.units import GIB


def check(port: int, several: bool, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check this node's network.

    Args:
        several: whether a run spans several nodes; a host name that resolves to loopback is an error then.
        environment: of the ranks; may name interfaces.
    """
    yield name(socket.gethostname(), several)
    interfaces = {interface for _, interface in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        wanted = [] if value.startswith("^") else [part for part in value.lstrip("=").split(",") if part]
        missing = [part for part in wanted if not any(interface.startswith(part) for interface in interfaces)]
        if missing:
            what = f"{variable}: no interface {', '.join(missing)} (available: {', '.join(sorted(interfaces))})"
            yield fail("interfaces", what, f"set {variable} to an interface that all nodes have")
    yield free_port(port)


def name(host: str, several: bool) -> Finding:
    """Whether a host name resolves to an address that other nodes can reach."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:  # the latter for a name that DNS does not permit
        verdict = fail if several else warn
        return verdict("host name", f"{host} does not resolve: {error}", f"an entry for {host} in DNS or /etc/hosts")
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        what = f"{host} is {', '.join(sorted(addresses))}, a loopback address, which every node resolves to itself"
        # Debian writes 127.0.1.1 into /etc/hosts.
        return (fail if several else ok)(
            "host name", what, *([f"remove {host} from the 127.0.1.1 line of /etc/hosts"] if several else [])
        )
    return ok("host name", f"{host} is {', '.join(sorted(addresses))}")


def free_port(port: int) -> Finding:
    """Whether the first rank can listen on its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("", port))
        except OSError as error:
            return fail("port", f"{port} cannot be used: {error.strerror}", "stop what listens there (ss -ltnp)")
    return ok("port", f"{port} is free")


SHARED_PER_RANK = GIB
"""Shared memory a rank may need: NCCL's transport between processes of a node, and batches of DataLoader workers.
Docker's default is 64 MiB."""
FILES = 4096
PROCESS = Path("/proc/self/status")
CAP_IPC_LOCK = 14
"""Bit of a capability set (linux/capability.h)."""


@dataclass(frozen=True)
class NetworkLimits:
    """Limits of this process; None: no limit."""

    memlock_bytes: int | None
    shared_bytes: int
    open_files: int | None


def read_limits() -> NetworkLimits:
    """The limits of this process."""
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - not written to
    return NetworkLimits(
        memlock_bytes=None if _may_lock(PROCESS) else _limit(resource.RLIMIT_MEMLOCK),
        shared_bytes=shared.f_frsize * shared.f_bavail if shared else 0,
        open_files=_limit(resource.RLIMIT_NOFILE),
    )


def check_limits(limits: NetworkLimits, profile: Profile | None, ranks: int) -> Iterator[Finding]:
    """Find limits that are too low.

    Args:
        profile: RDMA adapters need locked memory.
    """
    if profile is not None and profile.inter_node.kind in RDMA and limits.memlock_bytes is not None:
        fix = (
            "ulimit -l unlimited: LimitMEMLOCK=infinity for slurmd, in pods for containerd (CRI-O: default_ulimits); "
            "--ulimit memlock=-1 for docker. IPC_LOCK has no effect without root"
        )
        yield fail("locked memory", f"{limits.memlock_bytes >> 10} KiB; RDMA pins its buffers", fix)
    else:
        amount = "no limit" if limits.memlock_bytes is None else f"{limits.memlock_bytes >> 10} KiB"
        yield ok("locked memory", amount)
    needed = SHARED_PER_RANK * max(ranks, 1)
    if limits.shared_bytes < needed:
        what = f"{limits.shared_bytes / GIB:.1f} GiB in /dev/shm for {ranks} ranks"
        yield warn("shared memory", what, "--ipc=host, --shm-size, or an emptyDir of medium Memory at /dev/shm")
    else:
        yield ok("shared memory", f"{limits.shared_bytes / GIB:.1f} GiB free in /dev/shm")
    if limits.open_files is not None and limits.open_files < FILES:
        yield warn("open files", f"at most {limits.open_files}", f"ulimit -n {FILES} or more")


def _may_lock(status: Path) -> bool:
    """Whether the process has CAP_IPC_LOCK in effect, which lifts the limit of locked memory."""
    try:
        capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text("ascii"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return False
    return capabilities is not None and bool(int(capabilities[1], 16) >> CAP_IPC_LOCK & 1)


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
