"""Resources of a machine, or of several identical nodes: GPUs, CPU, memory, disk.

Detection uses the operating system and nvidia-smi, not torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmrecipes.hardware import nvidia
from llmrecipes.units import MIB

Fact = TypeVar("Fact")

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
"""Names of the instructions that multiply or convert bf16, in the kernel's lists for x86 and Arm."""

# Peak dense bf16 (V100, T4: fp16) tensor-core TFLOP/s from NVIDIA's data sheets, without sparsity. The first entry
# whose words are all in nvidia-smi's name counts, so the more specific comes first.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),  # GB200 NVL72 data sheet: 360 PFLOP/s bf16 with sparsity over 72
    ("B200", 2250.0),  # DGX B200 data sheet: 36 PFLOP/s dense fp8 by 8, half for bf16
    ("H200", 989.4),  # H200 data sheet
    ("H100 NVL", 835.5),  # H100 data sheet
    ("H100 PCIe", 756.4),
    ("H100", 989.4),
    ("A100", 312.0),  # A100 data sheet
    ("A10G", 70.0),  # AWS G5: an A10 with a lower clock
    ("A10", 125.0),  # A10 data sheet
    ("L40S", 362.05),  # L40S data sheet
    ("RTX 4090", 165.2),  # Ada whitepaper, fp16 with fp32 accumulation
    ("V100", 125.0),  # V100 data sheet, SXM2
    ("T4", 65.0),  # T4 data sheet
)

COMPUTE_CAPABILITY: tuple[tuple[str, tuple[int, int]], ...] = (
    ("GB200", (10, 0)), ("B200", (10, 0)), ("H200", (9, 0)), ("H100", (9, 0)), ("A100", (8, 0)), ("A10", (8, 6)),
    ("L40S", (8, 9)), ("RTX 4090", (8, 9)), ("V100", (7, 0)), ("T4", (7, 5)),
)  # fmt: skip
"""Of the same GPUs, from developer.nvidia.com/cuda-gpus."""


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU: nvidia-smi's name, memory in bytes, and dense peak in TFLOP/s (None: not in the table)."""

    name: str
    memory_bytes: int
    memory_free_bytes: int
    peak_tflops: float | None


@dataclass(frozen=True)
class Cluster:
    """The machine a run would use: this one, or some nodes of a site.

    All figures except `nodes` are totals over all nodes. `cpu_cores` may be fractional if a control group limits CPU
    time. `memory_available_bytes` is what new processes can allocate without swapping; `disk_free_bytes` is that of
    the working directory. `name` is the site's profile, empty for this machine. `nvlink_domain` is the number of GPUs
    connected by NVLink if that is more than a node's. `cpu_has_bf16` is False if the CPU is known to emulate bf16.
    """

    gpus: tuple[DetectedGpu, ...]
    cpu_cores: float
    memory_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    nodes: int = 1
    name: str = ""
    nvlink_domain: int | None = None
    cpu_has_bf16: bool = True

    @property
    def gpus_per_domain(self) -> int:
        """GPUs connected well enough for tensor parallelism: those of a node, or of an NVLink domain."""
        return min(self.nvlink_domain or len(self.gpus) // self.nodes, len(self.gpus))

    def times(self, nodes: int) -> Cluster:
        """So many times the nodes."""
        return self.with_nodes(self.nodes * nodes)

    def with_nodes(self, nodes: int) -> Cluster:
        """So many nodes like these."""
        return replace(
            self,
            gpus=self.gpus[: len(self.gpus) // self.nodes] * nodes,
            cpu_cores=self.cpu_cores / self.nodes * nodes,
            memory_bytes=self.memory_bytes // self.nodes * nodes,
            memory_available_bytes=self.memory_available_bytes // self.nodes * nodes,
            nodes=nodes,
        )

    def emptied(self) -> Cluster:
        """The same with all memory free: what it is like without the run that is on it, and in the next one."""
        gpus = tuple(replace(gpu, memory_free_bytes=gpu.memory_bytes) for gpu in self.gpus)
        return replace(self, gpus=gpus, memory_available_bytes=self.memory_bytes)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """`cuda` where there is a GPU, else `cpu`."""
        return "cuda" if self.gpus else "cpu"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def detect(directory: Path | None = None) -> Cluster:
    """This machine as far as this process may use it: by affinity, control groups and CUDA_VISIBLE_DEVICES."""
    total, available = _memory()
    return Cluster(
        gpus=visible_gpus(),
        cpu_cores=cpu_cores(),
        memory_bytes=total,
        memory_available_bytes=available,
        disk_free_bytes=shutil.disk_usage(directory or Path()).free,
        cpu_has_bf16=_has_bf16(),
    )


def _has_bf16() -> bool:
    """Whether the CPU has instructions for bf16; True where the kernel does not list them."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return True
    # `flags` on x86, `Features` on Arm.
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not _BF16_FLAGS.isdisjoint(flags)


def peak_tflops(name: str) -> float | None:
    """Dense bf16 peak of a GPU by its nvidia-smi name, in TFLOP/s; None if unknown."""
    return _by_name(PEAK_TFLOPS, name)


def compute_capability(name: str) -> tuple[int, int] | None:
    """That of a GPU by its nvidia-smi name; None if unknown."""
    return _by_name(COMPUTE_CAPABILITY, name)


OTHER_CHIPS = frozenset({"LAPTOP", "MAX-Q", "MOBILE", "D"})
"""Words in the names of GPUs that are slower than the one whose name they add to."""


def is_named(key: str, name: str) -> bool:
    """Whether a GPU's name, in words between spaces and hyphens, has all words of a key and none of another chip."""
    words = set(name.upper().replace("_", "-").split())
    parts = words | {part for word in words for part in word.split("-")}
    return set(key.upper().split()) <= parts and not OTHER_CHIPS & parts


def _by_name(table: Sequence[tuple[str, Fact]], name: str) -> Fact | None:
    return next((fact for key, fact in table if is_named(key, name)), None)


FIELDS = ("index", "uuid", "name", "memory.total", "memory.free")


def visible_gpus() -> tuple[DetectedGpu, ...]:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves; none if the driver does not answer."""
    return select_gpus(nvidia.query(*FIELDS, timeout=20), os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_gpus(listed: Sequence[Mapping[str, str]], visible: str | None) -> tuple[DetectedGpu, ...]:
    """GPUs of nvidia-smi's listing of `FIELDS` that CUDA_VISIBLE_DEVICES leaves, in its order (None: not set)."""
    gpus: dict[str, DetectedGpu] = {}
    uuids: dict[str, str] = {}
    for row in listed:
        index, uuid, name, total, free = (row[field] for field in FIELDS)
        if not (total.isdecimal() and free.isdecimal()):
            continue
        gpus[index] = DetectedGpu(name, int(total) * MIB, int(free) * MIB, peak_tflops(name))
        uuids[uuid] = index
    if visible is None:
        return tuple(gpus.values())
    chosen: list[DetectedGpu] = []
    for word in (part.strip() for part in visible.split(",")):
        match = next((index for uuid, index in uuids.items() if word and uuid.startswith(word)), word)
        if match not in gpus:
            break  # CUDA ignores everything from the first invalid entry on
        chosen.append(gpus[match])
    return tuple(chosen)


def allowed_cpus() -> set[int]:
    """Numbers of the logical CPUs that this process may run on, by its affinity."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_cores() -> float:
    """CPU cores that this process may use: by its affinity, and by the limits of its control groups."""
    cores: float = len(allowed_cpus())
    for group in _cgroups("cpu"):
        quota = _words(group / "cpu.max")  # version 2: "quota period" or "max period"
        if not quota:
            quota = [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]) > 0:
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def _memory() -> tuple[int, int]:
    """Total and available bytes, the smallest of the machine's and of the control groups' around this process."""
    fields = {line.partition(":")[0]: line.split() for line in _text(_MEMINFO).splitlines()}
    if "MemAvailable" in fields:
        total, available = (int(fields[name][1]) * 1024 for name in ("MemTotal", "MemAvailable"))
    else:  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _cgroups("memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _words(group / limit_file), _words(group / usage_file)
            if limit and usage and limit[0].isdecimal() and int(limit[0]) < 1 << 60:
                total = min(total, int(limit[0]))
                available = min(available, max(0, int(limit[0]) - int(usage[0]) + _file_cache(group)))
    return total, available


def _file_cache(group: Path) -> int:
    """Bytes of cached file pages: counted as used, but freed by the kernel on demand."""
    stat = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, innermost first, for version 2 and for version 1."""
    for line in _text(_OWN_CGROUPS).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
        group = root / name.lstrip("/")
        # Inside a container the path is the host's and may not exist here: the root is then the container's own.
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _words(path: Path) -> Sequence[str]:
    return _text(path).split()
