"""A process beside the first rank of each node that reads what the node does: GPUs, processors, memory, disk, network.

The rank reads the sums from shared memory, so a call into a driver that hangs holds up nothing but this process. It
keeps sums and counts of what it samples, of which the rank forms means over its own intervals.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from llmrecipes.hardware.nics import ports
from llmrecipes.parent import end_with_parent

SECONDS = 5.0
"""Between samples."""
GAUGES = (
    "gpu_use",
    "gpu_memory_bytes",
    "power_watts",
    "sm_clock_mhz",
    "temperature_c",
    "throttled",
    "cpu_use",
    "memory_use",
    "disk_use",
    "disk_bytes_per_second",
    "network_bytes_per_second",
    "infiniband_bytes_per_second",
)
"""Reported as means over an interval."""
TOTALS = ("infiniband_errors", "gpu_joules", "cpu_joules", "codecarbon_joules", "xid_count", "xid_code")
"""Counters since the process began; the last one is a code."""
COLUMNS = (*GAUGES, *TOTALS)
_FORMAT = struct.Struct(f"={1 + 2 * len(GAUGES) + len(TOTALS)}d")
"""Number of samples; of each gauge its sum and its samples; totals. NaN: the node has none."""
POWERCAP = Path("/sys/class/powercap")
IB_ERRORS = ("symbol_error", "port_rcv_errors", "link_downed", "local_link_integrity_errors", "link_error_recovery")
WORDS = {"port_xmit_data": 4, "port_rcv_data": 4}
"""Bytes of a unit of an adapter's counters (InfiniBand Architecture Specification, PortCounters)."""


class NodeReadings:
    """The rank's side: means and differences since it last looked.

    Args:
        memory: that the other process writes.
        wake: event on which it takes a sample at once; None: there is none.
    """

    def __init__(self, memory: mmap.mmap, wake: int | None = None) -> None:
        self._memory = memory
        self._wake = wake
        self._before = (0.0,) * (2 * len(GAUGES))
        self._totals: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Gauges, and what counters have grown by; absent ones are left out, and gauges repeated without a sample."""
        values = self._read()
        if not values[0]:
            return {}
        sums = values[1 : 1 + 2 * len(GAUGES)]
        totals = dict(zip(TOTALS, values[1 + 2 * len(GAUGES) :], strict=True))
        for index, name in enumerate(GAUGES):
            grown, count = (sums[2 * index + part] - self._before[2 * index + part] for part in (0, 1))
            if count:
                self._last[name] = grown / count
        self._before = sums
        grown_by = {
            name: value if name == "xid_code" else value - self._totals.get(name, 0.0)
            for name, value in totals.items()
            if not math.isnan(value)
        }
        self._totals = totals
        return self._last | grown_by

    def refresh(self, within: float) -> None:
        """Have a new sample taken, and wait for it, but not in a driver that hangs.

        Args:
            within: seconds.
        """
        if self._wake is None:
            return
        samples = self._read()[0]
        end = time.monotonic() + within
        os.eventfd_write(self._wake, 1)
        while self._read()[0] == samples and time.monotonic() < end:
            time.sleep(0.001)

    def _read(self) -> tuple[float, ...]:
        # The other process may be writing: two equal readings are whole.
        for _ in range(3):
            data = self._memory[: _FORMAT.size]
            if data == self._memory[: _FORMAT.size]:
                break
        return _FORMAT.unpack(data)


@contextmanager
def monitored(folder: Path, *, model: Literal["codecarbon"] | None = None) -> Iterator[NodeReadings]:
    """Read this node while the block runs.

    Args:
        folder: on the file system whose use is reported.
        model: model of the energy of processors and memory; None: only counters are read.
    """
    file = os.memfd_create("node")
    os.ftruncate(file, _FORMAT.size)
    memory = mmap.mmap(file, _FORMAT.size)
    wake = os.eventfd(0)
    command = [sys.executable, "-m", __name__, *map(str, (os.getpid(), file, wake, folder)), model or ""]
    # In a Slurm job codecarbon would run scontrol, on every node at the same time.
    environment = {name: value for name, value in os.environ.items() if name not in ("SLURM_JOB_ID", "SLURM_JOBID")}
    process = subprocess.Popen(command, pass_fds=(file, wake), stdin=subprocess.DEVNULL, env=environment)
    try:
        yield NodeReadings(memory, wake)
    finally:
        process.kill()
        # In a driver that hangs it does not even die of SIGKILL.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        memory.close()
        os.close(file)
        os.close(wake)


class NodeSampler:
    """Samples this node.

    Args:
        folder: on the file system whose use is reported.
        gpus: NVML's side; None: no GPU, driver or nvidia-ml-py.
        model: model of processors and memory; None: only counters are read.
    """

    def __init__(
        self, folder: Path, gpus: Gpus | None, powercap: Path = POWERCAP, model: Modelled | None = None
    ) -> None:
        self._folder = folder
        self._gpus = gpus
        self._powercap = powercap
        self._model = model
        self._sums = dict.fromkeys(GAUGES, 0.0)
        self._counts = dict.fromkeys(GAUGES, 0)
        self._samples = 0
        self._totals = dict.fromkeys(TOTALS, math.nan)
        self._counters: dict[str, float] = {}
        self._at = 0.0
        psutil.cpu_percent()  # the first call has nothing to compare with

    def sample(self) -> bytes:
        """One more sample; the record of all of them."""
        now = time.monotonic()
        gauges = {
            "cpu_use": psutil.cpu_percent() / 100 if self._samples else math.nan,
            "memory_use": psutil.virtual_memory().percent / 100,
        }
        with suppress(OSError):
            gauges["disk_use"] = psutil.disk_usage(str(self._folder)).percent / 100
        for name, total in self._traffic().items():
            if self._samples and name in self._counters:
                gauges[name] = (total - self._counters[name]) / max(now - self._at, 1e-3)
            self._counters[name] = total
        if self._gpus is not None:
            gauges |= self._gpus.sample(self._totals)
        self._joules()
        if self._model is not None:
            watts = self._model.watts(processors=math.isnan(self._totals["cpu_joules"]))
            used = watts * (now - self._at) if self._samples else 0.0
            self._totals["codecarbon_joules"] = used + (self._totals["codecarbon_joules"] if self._samples else 0.0)
        for name, value in gauges.items():
            if not math.isnan(value):
                self._sums[name] += value
                self._counts[name] += 1
        self._samples = self._samples + 1
        self._at = now
        pairs = (value for name in GAUGES for value in (self._sums[name], float(self._counts[name])))
        return _FORMAT.pack(float(self._samples), *pairs, *(self._totals[name] for name in TOTALS))

    def _traffic(self) -> dict[str, float]:
        rates: dict[str, float] = {}
        disks = psutil.disk_io_counters()
        if disks is not None:
            rates["disk_bytes_per_second"] = float(disks.read_bytes + disks.write_bytes)
        cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        rates["network_bytes_per_second"] = float(sum(card.bytes_sent + card.bytes_recv for card in cards))
        adapters = ports()
        if adapters:
            sent = (port.counters.get(name, 0) * size for port in adapters for name, size in WORDS.items())
            rates["infiniband_bytes_per_second"] = float(sum(sent))
            errors = float(sum(port.counters.get(name, 0) for port in adapters for name in IB_ERRORS))
            self._grow("infiniband_errors", errors)
        return rates

    def _joules(self) -> None:
        """Joules of the processors, where the kernel lets this user read them (RAPL)."""
        for package in self._powercap.glob("intel-rapl:*"):
            if package.name.count(":") > 1:  # a part of a package
                continue
            with suppress(OSError, ValueError):
                joules = int((package / "energy_uj").read_text()) / 1e6
                wraps = int((package / "max_energy_range_uj").read_text()) / 1e6
                self._grow("cpu_joules", joules, package.name, wraps)

    def _grow(self, total: str, counter: float, source: str = "", wraps: float = 0.0) -> None:
        key = f"{total}{source}"
        before = self._counters.get(key, counter)
        self._counters[key] = counter
        grown = counter - before if counter >= before else counter - before + wraps
        self._totals[total] = (0.0 if math.isnan(self._totals[total]) else self._totals[total]) + max(0.0, grown)


class Modelled:
    """Power of processors and memory by codecarbon, for a node without counters: by the load, and by the memory's size.

    Only its models are used: its tracker would read a configuration, take a lock, start threads and write files.
    """

    def __init__(self) -> None:
        import logging

        from codecarbon.core.cpu import TDP
        from codecarbon.core.util import count_physical_cpus
        from codecarbon.external.hardware import CPU, MODE_CPU_LOAD
        from codecarbon.external.ram import RAM

        logging.getLogger("codecarbon").setLevel(logging.ERROR)
        processor = TDP()
        # For a processor that it does not know it takes 4 W for each thread of the node: of all sockets already.
        known = processor.tdp is not None and processor._get_cpu_power_from_registry(processor.model) is not None
        most = processor.tdp * count_physical_cpus() if known else processor.tdp
        self._processors = CPU.from_utils("", MODE_CPU_LOAD, processor.model, most)
        self._processors.start()
        self._memory = RAM()

    def watts(self, *, processors: bool) -> float:
        """Mean power since the last call.

        Args:
            processors: without a counter, so that they are modelled, too.
        """
        memory = self._memory.total_power().W
        return float(memory + (self._processors.total_power().W if processors else 0.0))


class Gpus:
    """The GPUs of this node through NVML (nvidia-ml-py).

    Args:
        nvml: the module pynvml, initialised.
        visible: CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, nvml: Any, visible: str | None) -> None:
        self._nvml = nvml
        self._handles = list(self._chosen(visible))
        self._joules: dict[int, float] = {}
        self._events: Any = None
        with suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            for handle in self._handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    @classmethod
    def find(cls) -> Gpus | None:
        """None without a GPU, a driver or nvidia-ml-py."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            gpus = cls(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except pynvml.NVMLError:
            return None
        return gpus if gpus._handles else None

    def sample(self, totals: dict[str, float]) -> dict[str, float]:
        """The gauges of all GPUs: the least busy, the fullest, the slowest, the hottest, and their power together.

        Args:
            totals: counters, to which joules and Xid are added.
        """
        nvml = self._nvml
        read: dict[str, tuple[Callable[[list[float]], float], Callable[[Any], float]]] = {
            "gpu_use": (min, lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
            "gpu_memory_bytes": (max, lambda gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).used)),
            "power_watts": (sum, lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            "sm_clock_mhz": (min, lambda gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))),
            "temperature_c": (max, lambda gpu: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))),
            "throttled": (_mean, self._is_throttled),
        }
        gauges = {}
        for name, (join, value) in read.items():
            values = []
            for gpu in self._handles:
                with suppress(nvml.NVMLError):  # this GPU does not have it, or is lost
                    values.append(value(gpu))
            if values:
                gauges[name] = join(values)
        for index, gpu in enumerate(self._handles):
            with suppress(nvml.NVMLError):
                joules = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
                # It is 0 again when the driver is loaded again.
                grown = max(0.0, joules - self._joules.get(index, joules))
                self._joules[index] = joules
                totals["gpu_joules"] = (0.0 if math.isnan(totals["gpu_joules"]) else totals["gpu_joules"]) + grown
        self._faults(totals)
        return gauges

    def _faults(self, totals: dict[str, float]) -> None:
        nvml = self._nvml
        if self._events is None:
            return
        if math.isnan(totals["xid_count"]):
            totals |= {"xid_count": 0.0, "xid_code": 0.0}
        with suppress(nvml.NVMLError):  # the time is up: no event
            while True:
                event = nvml.nvmlEventSetWait(self._events, 0)
                totals["xid_count"] += 1
                totals["xid_code"] = float(event.eventData)

    def _is_throttled(self, gpu: Any) -> float:
        nvml = self._nvml
        bad = (
            nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        return float(bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & bad))

    def _chosen(self, visible: str | None) -> Iterator[Any]:
        nvml = self._nvml
        everyone = range(nvml.nvmlDeviceGetCount())
        for word in [str(gpu) for gpu in everyone] if visible is None else visible.split(","):
            with suppress(nvml.NVMLError):
                index = word.strip()
                yield (
                    nvml.nvmlDeviceGetHandleByIndex(int(index))
                    if index.isdecimal()
                    else nvml.nvmlDeviceGetHandleByUUID(index)
                )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main(arguments: list[str]) -> None:
    """The process."""
    pid, file, wake = map(int, arguments[:3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # those of a scheduler or terminal are for the rank
    end_with_parent(pid)
    memory = mmap.mmap(file, _FORMAT.size)
    waiting = select.poll()
    rank = os.pidfd_open(pid)
    for event in (rank, wake):
        waiting.register(event, select.POLLIN)
    sampler = NodeSampler(Path(arguments[3]), Gpus.find(), model=Modelled() if arguments[4] else None)
    while True:
        memory[: _FORMAT.size] = sampler.sample()
        events = [event for event, _ in waiting.poll(SECONDS * 1000)]
        if rank in events:
            return
        if wake in events:
            os.eventfd_read(wake)


if __name__ == "__main__":
    main(sys.argv[1:])
