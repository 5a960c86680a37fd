"""What this machine is said to have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmrecipes.hardware import cluster
from llmrecipes.hardware.cluster import FIELDS, detect, peak_tflops, select_gpus
from llmrecipes.hardware.nvidia import rows
from llmrecipes.units import MIB

LISTING = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 80000
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 500
2, GPU-cccc, Tesla T4, [N/A], [N/A]
"""


LISTED = rows(LISTING, FIELDS)


def test_gpus_of_a_listing_and_what_the_environment_leaves() -> None:
    both = select_gpus(LISTED, None)
    assert [gpu.memory_free_bytes // MIB for gpu in both] == [80000, 500]
    assert both[0].peak_tflops == 989.4
    assert [gpu.memory_free_bytes // MIB for gpu in select_gpus(LISTED, "1,0")] == [500, 80000]
    assert select_gpus(LISTED, "GPU-bb") == both[1:]
    assert select_gpus(LISTED, "0,7,1") == both[:1]
    assert select_gpus(LISTED, "") == select_gpus(LISTED, "-1") == ()


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.4), ("NVIDIA H100 PCIe", 756.4), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A10G", 70.0),
     ("Tesla V100-SXM2-16GB", 125.0), ("NVIDIA GeForce RTX 4090", 165.2), ("Tesla T4", 65.0), ("Quadro P400", None),
     ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GH200 480GB", None)],
)  # fmt: skip
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_this_machine() -> None:
    here = detect()
    assert 0 < here.cpu_cores <= (os.cpu_count() or 1)
    assert 0 < here.memory_available_bytes <= here.memory_bytes


def test_affinity_counts() -> None:
    one = min(os.sched_getaffinity(0))
    code = "from llmrecipes.hardware.cluster import detect; print(detect().cpu_cores)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
    )  # fmt: skip
    assert float(done.stdout) <= 1


@pytest.mark.parametrize("version", [1, 2])
def test_control_group_limits_count_at_every_level(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    root = tmp_path / "cgroup"
    if version == 2:
        own.write_text("0::/job/step\n")
        outer, inner = root / "job", root / "job/step"
        inner.mkdir(parents=True)
        (outer / "memory.max").write_text(f"{100 * MIB}\n")
        (outer / "memory.current").write_text(f"{60 * MIB}\n")
        (outer / "memory.stat").write_text(f"anon 1\ninactive_file {20 * MIB}\n")
        (inner / "memory.max").write_text("max\n")
        (inner / "memory.current").write_text("1\n")
        (inner / "cpu.max").write_text("50000 100000\n")
    else:
        own.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/x\n")
        memory, cpu = root / "memory/job", root / "cpu/job"
        memory.mkdir(parents=True)
        cpu.mkdir(parents=True)
        (memory / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
        (memory / "memory.usage_in_bytes").write_text(f"{60 * MIB}\n")
        (memory / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {20 * MIB}\n")
        (cpu / "cpu.cfs_quota_us").write_text("50000\n")
        (cpu / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(cluster, "_CGROUP_ROOT", root)
    monkeypatch.setattr(cluster, "_OWN_CGROUPS", own)
    here = detect()
    assert here.cpu_cores == 0.5
    assert (here.memory_bytes, here.memory_available_bytes) == (100 * MIB, 60 * MIB)


@pytest.mark.parametrize(
    ("text", "has_bf16"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("flags\t\t: fpu avx512_bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("Features\t: fp bf16\n", True),
        ("cpu\t: POWER9\n", True),
        (None, True),
    ],
)
def test_a_cpu_that_emulates_bf16_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, has_bf16: bool
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cluster, "_CPUINFO", tmp_path / "cpuinfo")
    assert detect().cpu_has_bf16 is has_bf16
