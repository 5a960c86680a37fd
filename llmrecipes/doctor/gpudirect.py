"""What GPUDirect RDMA needs besides adapters: a way to map GPU memory, and PCIe switches that forward directly."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.doctor.finding import Finding, fail, ok, skip, warn
from llmrecipes.hardware.profile import Profile

MODULES = Path("/sys/module")
DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/sys/bus/pci/devices")
DMA_BUF = (5, 12)
"""First Linux with DMA-BUF for RDMA (NVIDIA's GPU Operator documentation, GPUDirect RDMA)."""
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
GPU, ADAPTER = ("0x0300", "0x0302"), ("0x0200", "0x0207")
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


def check(found: Support, profile: Profile | None) -> Iterator[Finding]:
    """Whether adapters can read and write GPU memory.

    Args:
        found: see `support`.
        profile: asked for on sites with GPUs and InfiniBand or RoCE.
    """
    if profile is None or profile.gpu is None or profile.inter_node.kind not in ("infiniband", "roce"):
        return
    linux = ".".join(map(str, found.kernel))
    if found.peermem:
        yield ok("GPUDirect RDMA", "nvidia_peermem is loaded")
    elif not found.driver:
        yield skip("GPUDirect RDMA", "no NVIDIA driver here")
    elif "Open Kernel Module" in found.driver and found.kernel >= DMA_BUF:
        yield ok("GPUDirect RDMA", f"DMA-BUF: open kernel module on Linux {linux}")
    else:
        kind = "open" if "Open Kernel Module" in found.driver else "proprietary"
        what = f"neither nvidia_peermem nor DMA-BUF ({kind} kernel module, Linux {linux})"
        yield fail("GPUDirect RDMA", what, "modprobe nvidia_peermem; or the driver's open kernel modules on Linux 5.12")


def access_control(devices: Path = DEVICES) -> Iterator[Finding]:
    """Whether PCIe switches above GPUs and adapters send their traffic through the root complex (ACS)."""
    redirected, hidden, above = [], False, set()
    for device in devices.glob("*"):
        if _is(device, NVIDIA, GPU) or _is(device, MELLANOX, ADAPTER):
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
        own, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
    except (OSError, UnicodeDecodeError):
        return False
    return own == vendor and kind.startswith(kinds)


def _port_type(config: bytes) -> int | None:
    # The list of capabilities starts at 0x34; each has its number, the next one's offset, and its registers.
    at, steps = config[0x34], 0
    while at >= 0x40 and steps < 48:
        if config[at] == EXPRESS:
            return int.from_bytes(config[at + 2 : at + 4], "little") >> 4 & 0xF
        at, steps = config[at + 1], steps + 1
    return None


def _acs_control(config: bytes) -> int:
    at, steps = 0x100, 0
    while 0x100 <= at <= len(config) - 8 and steps < 96:
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACCESS_CONTROL:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at, steps = header >> 20, steps + 1
    return 0
