"""What a node's process reads: the real kernel, and GPUs behind a stub of pynvml, because there is no GPU to ask."""

from __future__ import annotations

import math
import mmap
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llmrecipes.train.observers.node_monitor import SECONDS, Gpus, NodeReadings, NodeSampler, monitored


class NvmlError(Exception):
    """As pynvml's."""


class Nvml:
    """Two GPUs with the functions of pynvml 13 that are called; the second has no energy counter."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, nvmlEventTypeXidCriticalError = 1, 0, 8
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        self.millijoules = 1_000_000
        self.events: deque[int] = deque()

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise NvmlError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-a": 0, "GPU-b": 1}[uuid]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, *_: Any) -> None: ...

    def nvmlEventSetWait(self, _events: object, _milliseconds: int) -> Any:
        if not self.events:
            raise NvmlError
        return SimpleNamespace(eventData=self.events.popleft())

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=(90, 40)[gpu])

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=(10, 20)[gpu])

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return (500_000, 300_000)[gpu]

    def nvmlDeviceGetClockInfo(self, gpu: int, _clock: int) -> int:
        return (1980, 1200)[gpu]

    def nvmlDeviceGetTemperature(self, gpu: int, _sensor: int) -> int:
        return (60, 85)[gpu]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return (0x4, 0x40)[gpu]  # a power cap is how GPUs are run; heat is not

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        if gpu:
            raise NvmlError
        return self.millijoules


def taken(sampler: NodeSampler, memory: mmap.mmap, readings: NodeReadings) -> dict[str, float]:
    data = sampler.sample()
    memory[: len(data)] = data
    return readings.take()


def test_the_gpus_of_a_node_are_shown_by_the_worst_and_faults_and_joules_are_counted(tmp_path: Path) -> None:
    nvml: Any = Nvml()
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    readings = NodeReadings(memory)
    assert readings.take() == {}, "nothing was sampled yet"
    sampler = NodeSampler(tmp_path, Gpus(nvml, None), powercap=tmp_path)
    first = taken(sampler, memory, readings)
    assert (
        first
        | {
            "gpu_use": 0.4,
            "gpu_memory_bytes": 20,
            "power_watts": 800,
            "sm_clock_mhz": 1200,
            "temperature_c": 85,
            "throttled": 0.5,
            "gpu_joules": 0,
            "xid_count": 0,
        }
        == first
    )
    nvml.millijoules += 7_000
    nvml.events.extend([31, 79])
    second = taken(sampler, memory, readings)
    assert (second["gpu_joules"], second["xid_count"], second["xid_code"]) == (7, 2, 79)
    nvml.millijoules = 5  # the driver was loaded again
    third = taken(sampler, memory, readings)
    assert (third["gpu_joules"], third["xid_count"]) == (0, 0)
    assert readings.take()["temperature_c"] == 85, "without a new sample the last one counts"


@pytest.mark.parametrize(
    ("visible", "watts"), [("1", 300), ("0,1", 800), ("GPU-a", 500), ("0,7", 500)], ids=["one", "both", "uuid", "gone"]
)
def test_only_the_gpus_of_the_job_count(visible: str, watts: float) -> None:
    nvml: Any = Nvml()
    totals = dict.fromkeys(("gpu_joules", "xid_count", "xid_code"), math.nan)
    assert Gpus(nvml, visible).sample(totals)["power_watts"] == watts


def test_joules_of_packages_are_added_up_and_their_counter_wraps(tmp_path: Path) -> None:
    for name, microjoules in (("intel-rapl:0", 9_000_000), ("intel-rapl:1", 0), ("intel-rapl:0:0", 5_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    sampler, readings = NodeSampler(tmp_path, None, powercap=tmp_path), NodeReadings(memory)
    assert taken(sampler, memory, readings)["cpu_joules"] == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("2000000\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("4000000\n")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("9000000\n")
    assert taken(sampler, memory, readings)["cpu_joules"] == pytest.approx(3 + 4)


def test_the_process_reads_this_machine_and_ends_with_its_block(tmp_path: Path) -> None:
    seen: dict[str, float] = {}
    before = set(psutil.Process().children())
    with monitored(tmp_path) as readings:
        end = time.monotonic() + 240
        while not seen and time.monotonic() < end:
            seen = readings.take()
            time.sleep(0.05)
        samples, asked = readings._read()[0], time.monotonic()
        for _ in range(2):
            readings.refresh(60)
        assert readings._read()[0] >= samples + 2
        assert time.monotonic() - asked < SECONDS, "at once, not when the next ones are due"
    assert set(psutil.Process().children()) == before
    assert 0 < seen["memory_use"] <= 1
    assert 0 < seen["disk_use"] <= 1
