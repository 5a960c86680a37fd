"""Which cores and which memory a rank uses: those next to its GPU, according to the kernel.

Slurm's default distribution puts alternate ranks on alternate sockets, wherever their GPUs are; a rank on the wrong one
reaches its GPU and its adapter through the link between the sockets.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmrecipes.hardware import nvidia
from llmrecipes.hardware.cluster import allowed_cpus

PCI = Path("/sys/bus/pci/devices")
ADAPTERS = Path("/sys/class/infiniband")
CPUS = Path("/sys/devices/system/cpu")
FIELDS = ("index", "uuid", "pci.bus_id")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call (asm/unistd.h)."""
MPOL_PREFERRED = 1
"""linux/mempolicy.h: allocates elsewhere if the node is full, rather than ending the process."""


@dataclass(frozen=True)
class GpuLocation:
    """PCI address and neighbours of a GPU.

    Attributes:
        address: on the PCI bus, as in /sys.
        cores: logical CPUs next to it.
        numa: its memory node; None: the machine has one.
        adapters: RDMA adapters with the longest common path of PCIe switches.
    """

    address: str
    cores: frozenset[int]
    numa: int | None
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binding:
    """Binding of a rank; `cores` is empty if it is not bound, and `reason` says why.

    `memory` is whether the memory node of `device` is preferred, too: some containers forbid it.
    """

    cores: tuple[int, ...] = ()
    device: GpuLocation | None = None
    reason: str = ""
    memory: bool = False

    def __str__(self) -> str:
        if self.device is None or not self.cores:
            return f"not bound to cores: {self.reason}"
        memory = f", memory of node {self.device.numa}" if self.memory else ""
        near = f", adapter {' '.join(self.device.adapters)}" if self.device.adapters else ""
        return f"GPU {self.device.address}, cores {ranges(self.cores)}{memory}{near}"


def bind(local_rank: int, ranks: int) -> Binding:
    """Bind this process, before it starts threads, to the cores and memory next to its GPU.

    Args:
        local_rank: number of this rank on its node; also that of its GPU.
    """
    listed = nvidia.query(*FIELDS, timeout=60)
    addresses = visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices = [device(address) for address in addresses[:ranks]]
    cores = choose(local_rank, devices, ranks, allowed_cpus(), siblings())
    if cores.cores:
        os.sched_setaffinity(0, cores.cores)
        numa = None if cores.device is None else cores.device.numa
        return replace(cores, memory=numa is not None and _prefer_memory(numa))
    return cores


def choose(
    local_rank: int,
    devices: Sequence[GpuLocation],
    ranks: int,
    allowed: set[int],
    threads: Mapping[int, int],
) -> Binding:
    """The cores of one rank: an equal share of the allowed ones next to its GPU.

    Ranks whose GPUs are next to the same cores divide them; hardware threads of a core stay together.

    Args:
        devices: GPUs of the ranks of this node, in order.
        allowed: logical CPUs that this process may use.
        threads: first hardware thread of the core of each logical CPU.
    """
    if len(devices) < ranks:
        return Binding(reason=f"visible GPUs: {len(devices)}, ranks: {ranks}")
    local_device = devices[local_rank]
    near = local_device.cores & allowed
    if not near:
        return Binding(device=local_device, reason=f"this job may not use the cores next to GPU {local_device.address}")
    cores: dict[int, list[int]] = {}
    for cpu in sorted(near):
        cores.setdefault(threads.get(cpu, cpu), []).append(cpu)
    sharing = [number for number, device in enumerate(devices[:ranks]) if device.cores == local_device.cores]
    place = sharing.index(local_rank)
    whole = list(cores.values())
    share = len(whole) // len(sharing)
    if not share:
        return Binding(device=local_device, reason=f"{len(whole)} cores are next to {len(sharing)} GPUs")
    return Binding(
        tuple(sorted(cpu for core in whole[place * share : (place + 1) * share] for cpu in core)), local_device
    )


def visible(listed: Sequence[Mapping[str, str]], chosen: str | None) -> list[str]:
    """PCI addresses of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order (None: not set); as in /sys.

    Args:
        listed: nvidia-smi's rows of `FIELDS`.
        chosen: value of the variable: numbers or starts of UUIDs.
    """
    places = {row["index"]: nvidia.pci_address(row["pci.bus_id"]) for row in listed}
    if chosen is None:
        return list(places.values())
    devices = []
    for word in (part.strip() for part in chosen.split(",")):
        index = next((row["index"] for row in listed if word and row["uuid"].startswith(word)), word)
        if index not in places:
            break  # CUDA ignores everything from the first invalid entry on
        devices.append(places[index])
    return devices


def device(address: str, pci: Path = PCI, adapters: Path = ADAPTERS) -> GpuLocation:
    """A GPU's place, from /sys; without cores where the kernel does not say."""
    folder = pci / address
    numa = _read(folder / "numa_node")
    return GpuLocation(
        address,
        frozenset(parse_ranges(_read(folder / "local_cpulist"))),
        int(numa) if numa.isdecimal() else None,  # -1: none
        tuple(_nearest(folder, adapters)),
    )


def siblings(cpus: Path = CPUS) -> dict[int, int]:
    """The first hardware thread of the core of each logical CPU."""
    threads = {}
    for file in cpus.glob("cpu[0-9]*/topology/thread_siblings_list"):
        for cpu in (together := parse_ranges(_read(file))):
            threads[cpu] = together[0]
    return threads


def parse_ranges(text: str) -> list[int]:
    """Numbers of a list such as `0-3,8`."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return sorted(numbers)


def ranges(numbers: Sequence[int]) -> str:
    """The opposite of `parse_ranges`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _nearest(gpu: Path, adapters: Path) -> Iterator[str]:
    """Adapters behind the same PCIe switch; none if the paths have only the root in common."""
    own = gpu.resolve().parts
    shared = {}
    for adapter in sorted(adapters.glob("*")):
        parts = (adapter / "device").resolve().parts
        shared[adapter.name] = sum(1 for _ in _common(own, parts))
    best = max(shared.values(), default=0)
    root = next((number for number, part in enumerate(own, 1) if part.startswith("pci")), len(own))
    yield from (name for name, depth in shared.items() if depth == best and depth > root)


def _common(one: Sequence[str], other: Sequence[str]) -> Iterator[str]:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return
        yield left


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


def _prefer_memory(node: int) -> bool:
    """Prefer this memory node for allocations; glibc has no function for it. False if the kernel refuses."""
    number = SET_MEMPOLICY.get(platform.machine())
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    if number is None or node >= bits:
        return False
    mask = ctypes.c_ulong(1 << node)
    library = ctypes.CDLL(None)
    # The kernel reads one bit less than it is told.
    length = ctypes.c_ulong(bits + 1)
    return int(library.syscall(ctypes.c_long(number), MPOL_PREFERRED, ctypes.byref(mask), length)) == 0
