"""The network of this node: InfiniBand, RoCE and EFA ports and GPUDirect RDMA according to the kernel; host name,
interfaces and port; the limits of locked and shared memory and open files."""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.doctor.check_result import Finding, fail, ok, skip, warn
from llmrecipes.hardware.nics import CHOICE, RDMA, SYSTEM, Choice, Port, choose, expected
from llmrecipes.hardware.profile import Adapters, Profile
from llmrecipes.units import GIB

FLAPS = 10
"""Times a link may have gone down since the driver was loaded."""
ERRORS = {
    "symbol_error": 10,
    "link_error_recovery": 10,
    "port_rcv_errors": 10,
    "local_link_integrity_errors": 10,
    "excessive_buffer_overrun_errors": 10,
    "port_rcv_remote_physical_errors": 100,
    "port_xmit_constraint_errors": 100,
    "port_rcv_constraint_errors": 100,
}
"""Counts from which a link is worth a look: the defaults of infiniband-diags' ibcheckerrors."""
SURELY_BAD = 100_000
"""Errors after which a link is no longer used: each costs a retransmission that all ranks wait for."""


def check(ports: Sequence[Port], profile: Profile | None, user: Mapping[str, str]) -> Iterator[Finding]:
    """Check the ports.

    Args:
        profile: which ports training uses, and their rate; None: no expectation.
        user: the environment of the user, whose NCCL_IB_HCA decides which ports are used.
    """
    if profile is not None and profile.inter_node.kind in RDMA:
        yield from _check_wanted(ports, profile, user)
        return
    for port in ports:
        if port.state != "ACTIVE":
            yield _down(port, bad=False)
        yield from _errors(port, bad=False)
    if ports and all(port.state == "ACTIVE" for port in ports):
        yield ok("adapters", f"{len(ports)} ports active, {_rates(ports)}")


def _check_wanted(ports: Sequence[Port], profile: Profile, user: Mapping[str, str]) -> Iterator[Finding]:
    wanted = expected(profile)
    choice = choose(ports, profile, user)
    for name in choice.absent:
        devices = ", ".join(sorted({port.device for port in ports})) or "none"
        yield fail(f"adapter {name}", f"missing, but selected by {choice.reason}", f"adapters of this node: {devices}")
    if not choice.ports:
        yield _none_chosen(ports, profile, choice)
        return
    good = [port for port in choice.ports if port.state == "ACTIVE" and port.gb_per_s >= 0.9 * wanted.gb_per_s]
    # Chosen only by their kind, ports of storage may be among them.
    spare = not choice.exact and len(good) >= wanted.ports
    for port in choice.ports:
        if port.state != "ACTIVE":
            yield _down(port, bad=not spare, more=_which(profile) if spare else "")
        elif port not in good:
            what = f"{port.gb_per_s:g} GB/s, but {profile.name} has {wanted.gb_per_s:g} a port"
            fix = _which(profile) if spare else "a cable or switch port negotiated a lower rate; see ibstat"
            yield (warn if spare else fail)(f"adapter {port.name}", what, fix)
        yield from _errors(port, bad=not spare or port in good)
    yield _suffices(good, choice, profile, wanted)


def _suffices(good: Sequence[Port], choice: Choice, profile: Profile, wanted: Adapters) -> Finding:
    """Whether the ports that are used and good suffice."""
    if len(good) < wanted.ports:
        what = f"{len(good)} of {wanted.ports} ports are active at {wanted.gb_per_s:g} GB/s, by {choice.reason}"
        if choice.by_user:
            return warn("adapters", what, f"unset NCCL_IB_HCA to use all of {profile.name}")
        return fail("adapters", what, f"see ibstat; or adapters.ports in {profile.name}, if its nodes have fewer")
    if len(good) == len(choice.ports):
        return ok("adapters", f"{len(good)} ports active, {_rates(good)}, by {choice.reason}")
    return skip("adapters", f"{len(good)} of {len(choice.ports)} ports are as in {profile.name}, by {choice.reason}")


def _none_chosen(ports: Sequence[Port], profile: Profile, choice: Choice) -> Finding:
    what = f"none is selected by {choice.reason}, but {profile.name} has {profile.inter_node.kind}"
    if not ports:
        return fail(
            "adapters", f"this node has none; {what}", "load the driver, or pass /dev/infiniband to the container"
        )
    available = ", ".join(f"{port.name} ({port.link_layer or 'no link layer'})" for port in ports)
    name = ports[0].device
    fix = f"if training uses one of these: adapters.names in {profile.name}, or export {CHOICE}=={name}"
    return fail("adapters", f"{what}; this node has {available}", fix)


def _down(port: Port, *, bad: bool, more: str = "") -> Finding:
    verdict = fail if bad else warn
    return verdict(f"adapter {port.name}", f"port is {port.state}", more or "check cable and switch port; see ibstat")


def _which(profile: Profile) -> str:
    return f"if training does not use this port: adapters.names in {profile.name}; otherwise see ibstat"


def _errors(port: Port, *, bad: bool) -> Iterator[Finding]:
    name = f"adapter {port.name}"
    downed = port.counters.get("link_downed", 0)
    if downed > FLAPS:
        yield warn(name, f"link went down {downed} times since the driver was loaded", "replace the cable")
    many = {key: port.counters[key] for key, least in ERRORS.items() if port.counters.get(key, 0) > least}
    if many:
        what = ", ".join(f"{key} {count:,}" for key, count in many.items())
        fix = (
            "clean or replace cable and transceiver, then perfquery -R resets the counters; switch side: ibqueryerrors"
        )
        yield (fail if bad and max(many.values()) >= SURELY_BAD else warn)(name, what, fix)


def _rates(ports: Sequence[Port]) -> str:
    rates = sorted({port.gb_per_s for port in ports})
    return " and ".join(f"{rate:g}" for rate in rates) + " GB/s" + (" each" if len(rates) == 1 else "")


INTERFACES = Path("/sys/class/net")
ROCE_MTU = 4200
"""Least MTU of the interface that leaves room for RoCE's largest packets, 4096 bytes."""
GID_INDEX = "NCCL_IB_GID_INDEX"
IPV4 = "0000:0000:0000:0000:0000:ffff:"
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def check_roce(
    ports: Sequence[Port],
    profile: Profile | None,
    user: Mapping[str, str],
    system: Path = SYSTEM,
    network: Path = INTERFACES,
) -> Iterator[Finding]:
    """Check the ports that training uses.

    Args:
        profile: nothing is checked on sites without RoCE.
        system, network: folders of the kernel.
    """
    if profile is None or profile.inter_node.kind != "roce":
        return
    index = _chosen(profile, user)
    for port in choose(ports, profile, user).ports:
        folder = system / port.device / "ports" / port.number
        usable = gid_index(port, profile, user, system)
        if usable is None:
            yield _unusable(port, folder, index)
            continue
        interface = _read(folder, "gid_attrs", "ndevs", str(usable))
        mtu = _read(network, interface, "mtu") if interface else ""
        if mtu.isdecimal() and int(mtu) < ROCE_MTU:
            what = f"MTU of {interface} is {mtu}, too small for RoCE packets of 4096 bytes"
            yield warn(f"RoCE {port.name}", what, f"ip link set dev {interface} mtu 9000, and the same on the switch")


def gid_index(port: Port, profile: Profile | None, user: Mapping[str, str], system: Path = SYSTEM) -> int | None:
    """Index of a port's address of RoCE v2 over IPv4: the one that is chosen, else the first; None without one."""
    index = _chosen(profile, user)
    folder = system / port.device / "ports" / port.number
    numbers = [index] if index.isdecimal() else [path.name for path in folder.glob("gids/*")]
    return next(
        (
            number
            for number in sorted(map(int, numbers))
            if _read(folder, "gid_attrs", "types", str(number)) == "RoCE v2"
            and _read(folder, "gids", str(number)).startswith(IPV4)
        ),
        None,
    )


def _chosen(profile: Profile | None, user: Mapping[str, str]) -> str:
    return user.get(GID_INDEX) or ("" if profile is None else str(profile.environment.get(GID_INDEX, "")))


def _unusable(port: Port, folder: Path, index: str) -> Finding:
    name = f"RoCE {port.name}"
    fix = f"show_gids lists the GIDs of an adapter; {GID_INDEX} chooses one, RoCE v2 with IPv4"
    if not index:
        return fail(name, "no RoCE v2 GID with an IPv4 address", "assign an IPv4 address to the adapter's interface")
    kind = _read(folder, "gid_attrs", "types", index)
    gid = _read(folder, "gids", index)
    if gid in ("", EMPTY_GID):
        return fail(name, f"GID {index} is empty", fix)
    if kind == "RoCE v2":
        return warn(name, f"GID {index} is {gid}, not an IPv4 address", fix)
    return fail(name, f"GID {index} is of {kind or 'an unknown type'}, not RoCE v2", fix)


def _read(*parts: Path | str) -> str:
    try:
        return Path(*parts).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):  # an empty entry of types/ is EINVAL
        return ""


MODULES = Path("/sys/module")
DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/sys/bus/pci/devices")
DMA_BUF = (5, 12)
"""First Linux with DMA-BUF for RDMA (NVIDIA's GPU Operator documentation, GPUDirect RDMA)."""
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GPU = ("0x0300", "0x0302")
_ADAPTER = ("0x0200", "0x0207")
NVIDIA, MELLANOX = "0x10de", "0x15b3"
EXPRESS, ACCESS_CONTROL = 0x10, 0x0D
"""Capabilities: PCI Express, and (extended) Access Control Services."""
DOWNSTREAM = 6
"""Port type of a switch's downstream port."""
REDIRECTS = 0x04 | 0x08
"""Bits of the ACS control register: P2P request redirect, and P2P completion redirect."""


@dataclass(frozen=True)
class Support:
    """`peermem`: the module is loaded; `driver`: first line of the driver's version file, empty without one."""

    peermem: bool
    driver: str
    kernel: tuple[int, int]


def support(modules: Path = MODULES, driver: Path = DRIVER, release: str | None = None) -> Support:
    """What this machine has."""
    try:
        line = driver.read_text("ascii", "replace").partition("\n")[0]
    except OSError:
        line = ""
    major, minor = [*re.findall(r"\d+", release or os.uname().release), "0", "0"][:2]
    peermem = any((modules / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem"))
    return Support(peermem, line, (int(major), int(minor)))


def check_gpudirect(support: Support, profile: Profile | None) -> Iterator[Finding]:
    """Whether adapters can read and write GPU memory.

    Args:
        profile: asked for on sites with GPUs and InfiniBand or RoCE.
    """
    if profile is None or profile.gpu is None or profile.inter_node.kind not in ("infiniband", "roce"):
        return
    linux = ".".join(map(str, support.kernel))
    if support.peermem:
        yield ok("GPUDirect RDMA", "nvidia_peermem is loaded")
    elif not support.driver:
        yield skip("GPUDirect RDMA", "no NVIDIA driver")
    elif "Open Kernel Module" in support.driver and support.kernel >= DMA_BUF:
        yield ok("GPUDirect RDMA", f"DMA-BUF: open kernel module on Linux {linux}")
    else:
        kind = "open" if "Open Kernel Module" in support.driver else "proprietary"
        what = f"neither nvidia_peermem nor DMA-BUF ({kind} kernel module, Linux {linux})"
        yield fail("GPUDirect RDMA", what, "modprobe nvidia_peermem; or the driver's open kernel modules on Linux 5.12")


def access_control(devices: Path = DEVICES) -> Iterator[Finding]:
    """Whether PCIe switches above GPUs and adapters send their traffic through the root complex (ACS)."""
    redirected = []
    hidden = False
    above = set()
    for device in devices.glob("*"):
        if _is(device, NVIDIA, _GPU) or _is(device, MELLANOX, _ADAPTER):
            above |= {folder for folder in device.resolve().parents if _ADDRESS.fullmatch(folder.name)}
    for bridge in sorted(above):
        try:
            config = (bridge / "config").read_bytes()
        except OSError:
            config = b""
        if len(config) <= 256:  # without root the kernel only shows the first 64 bytes
            hidden = True
        elif _port_type(config) == DOWNSTREAM and _acs_control(config) & REDIRECTS:
            redirected.append(bridge.name)
    if redirected:
        what = f"redirects peer-to-peer traffic at {len(redirected)} switch ports: {', '.join(redirected[:4])}"
        fix = "disable ACS in the BIOS, or setpci -s PORT ECAP_ACS+6.w=0 for each at boot; virtual machines need it"
        yield warn("PCIe ACS", what, fix)
    elif hidden:
        yield skip("PCIe ACS", "only root can read it")
    elif above:
        yield ok("PCIe ACS", f"{len(above)} bridges do not redirect peer-to-peer traffic")


def _is(device: Path, vendor: str, kinds: tuple[str, ...]) -> bool:
    try:
        vendor_id, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
    except (OSError, UnicodeDecodeError):
        return False
    return vendor_id == vendor and kind.startswith(kinds)


def _port_type(config: bytes) -> int | None:
    # The list of capabilities starts at 0x34; each has its number, the next one's offset, and its registers.
    at, steps = config[0x34], 0
    while at >= 0x40 and steps < 48:
        if config[at] == EXPRESS:
            return int.from_bytes(config[at + 2 : at + 4], "little") >> 4 & 0xF
        at = config[at + 1]
        steps = steps + 1
    return None


def _acs_control(config: bytes) -> int:
    at, steps = 0x100, 0
    while 0x100 <= at <= len(config) - 8 and steps < 96:
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACCESS_CONTROL:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at, steps = header >> 20, steps + 1
    return 0


def check_network(port: int, several: bool, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check this node's network.

    Args:
        several: whether a run spans several nodes; a host name that resolves to loopback is an error then.
        environment: of the ranks; may name interfaces.
    """
    yield check_name(socket.gethostname(), several)
    interfaces = {interface for _, interface in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        wanted = [] if value.startswith("^") else [part for part in value.lstrip("=").split(",") if part]
        missing = [part for part in wanted if not any(interface.startswith(part) for interface in interfaces)]
        if missing:
            what = f"{variable}: no interface {', '.join(missing)} (available: {', '.join(sorted(interfaces))})"
            yield fail("interfaces", what, f"set {variable} to an interface that all nodes have")
    yield free_port(port)


def check_name(host: str, several: bool) -> Finding:
    """Whether a host name resolves to an address that other nodes can reach."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:  # the latter for a name that DNS does not permit
        verdict = fail if several else warn
        return verdict("host name", f"{host} does not resolve: {error}", f"an entry for {host} in DNS or /etc/hosts")
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        what = f"{host} resolves to {', '.join(sorted(addresses))}, a loopback address, different on every node"
        # Debian writes 127.0.1.1 into /etc/hosts.
        return (fail if several else ok)(
            "host name", what, *([f"remove {host} from the 127.0.1.1 line of /etc/hosts"] if several else [])
        )
    return ok("host name", f"{host} resolves to {', '.join(sorted(addresses))}")


def free_port(port: int) -> Finding:
    """Whether the first rank can listen on its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return fail("port", f"{port} cannot be used: {error.strerror}", "stop the program on that port (ss -ltnp)")
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
        memlock_bytes=None if _may_lock(PROCESS) else _soft_limit(resource.RLIMIT_MEMLOCK),
        shared_bytes=shared.f_frsize * shared.f_bavail if shared else 0,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
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


def _soft_limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
