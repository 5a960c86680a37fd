"""Ranks on the cores and memory next to their GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmrecipes.hardware.binding import GpuLocation, choose, device, parse_ranges, ranges, visible

ROOT = Path(__file__).parents[2]
# A DGX H100: 2 × 56 cores, hardware threads from 112 on; GPUs 0 to 3 on the first socket.
FIRST, SECOND = frozenset([*range(56), *range(112, 168)]), frozenset([*range(56, 112), *range(168, 224)])
DGX = [GpuLocation(f"0000:{number:02x}:00.0", FIRST if number < 4 else SECOND, number // 4) for number in range(8)]
THREADS = {cpu: cpu % 112 for cpu in range(224)}


def test_ranks_share_the_cores_of_their_socket() -> None:
    all_cores = set(range(224))
    found = [choose(rank, DGX, 8, all_cores, THREADS) for rank in range(8)]
    assert [len(each.cores) for each in found] == [28] * 8
    assert sorted(cpu for each in found for cpu in each.cores) == sorted(all_cores)
    for rank, each in enumerate(found):
        assert set(each.cores) <= (FIRST if rank < 4 else SECOND)
        assert {THREADS[cpu] for cpu in each.cores} == {cpu for cpu in each.cores if cpu < 112}
    assert str(found[1]) == "GPU 0000:01:00.0, cores 14-27,126-139"


def test_a_job_with_part_of_the_node_stays_within_it() -> None:
    found = choose(1, DGX, 2, set(range(8)), THREADS)
    assert found.cores == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("devices", "ranks", "allowed"),
    [
        (DGX[:1], 2, set(range(224))),  # fewer GPUs than ranks
        (DGX, 8, set(range(56))),  # the last rank's GPU is next to cores of another job
        (DGX, 8, {0, 1, 2, 56, 57, 58}),  # four GPUs and three cores
        ([GpuLocation("0000:01:00.0", frozenset(), None)] * 8, 8, {0, 1}),  # a virtual machine without a topology
    ],
)
def test_what_cannot_be_bound_says_why(devices: list[GpuLocation], ranks: int, allowed: set[int]) -> None:
    found = choose(ranks - 1, devices, ranks, allowed, THREADS)
    assert found.cores == () and found.reason
    assert found.reason in str(found)


LISTED = [
    {"index": str(number), "uuid": f"GPU-{number}aaa", "pci.bus_id": f"00000000:{bus}:00.0"}
    for number, bus in enumerate(["18", "2A", "3A", "5D"])
]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ["18", "2a", "3a", "5d"]),
        ("2,0", ["3a", "18"]),
        ("GPU-3,1", ["5d", "2a"]),
        ("1,9,0", ["2a"]),
        ("", []),
    ],
)
def test_the_order_is_that_of_cuda(chosen: str | None, expected: list[str]) -> None:
    assert visible(LISTED, chosen) == [f"0000:{bus}:00.0" for bus in expected]


def test_the_topology_is_read_from_sys(tmp_path: Path) -> None:
    """A GPU and an adapter behind one switch, another adapter behind another, one on another root."""
    root, other = tmp_path / "devices/pci0000:15", tmp_path / "devices/pci0000:a0"
    places = {
        "gpu": root / "0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
        "mlx5_0": root / "0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0",
        "mlx5_1": root / "0000:15:02.0/0000:1a:00.0",
        "mlx5_2": other / "0000:a0:01.0/0000:a1:00.0",
    }
    for place in places.values():
        place.mkdir(parents=True)
    (places["gpu"] / "local_cpulist").write_text("0-3,8-11\n")
    (places["gpu"] / "numa_node").write_text("1\n")
    pci, adapters = tmp_path / "pci", tmp_path / "infiniband"
    pci.mkdir()
    (pci / "0000:18:00.0").symlink_to(places["gpu"])
    for name in ("mlx5_0", "mlx5_1", "mlx5_2"):
        (adapters / name).mkdir(parents=True)
        (adapters / name / "device").symlink_to(places[name])
    found = device("0000:18:00.0", pci, adapters)
    assert found == GpuLocation("0000:18:00.0", frozenset([0, 1, 2, 3, 8, 9, 10, 11]), 1, ("mlx5_0",))
    (places["gpu"] / "numa_node").write_text("-1\n")
    assert device("0000:18:00.0", pci, tmp_path / "none").numa is None
    assert device("0000:99:00.0", pci, adapters).cores == frozenset()


def test_numbers_and_ranges() -> None:
    assert parse_ranges("0-2,7,") == [0, 1, 2, 7]
    assert ranges([7, 0, 1, 2]) == "0-2,7"
    assert parse_ranges("") == []


def test_a_process_is_bound_and_its_memory_where_the_kernel_allows_it() -> None:
    """In a process of its own, because a memory policy stays."""
    code = (
        "import os; from llmrecipes.hardware import binding as b;"
        "b.nvidia.query = lambda *_, **__: [{'index': '0', 'uuid': 'GPU-0', 'pci.bus_id': '00000000:18:00.0'}];"
        "first = min(os.sched_getaffinity(0));"
        "b.device = lambda address: b.GpuLocation(address, frozenset([first]), 0);"
        "found = b.bind(0, 1);"
        "policy = open('/proc/self/numa_maps').read() if found.memory else 'prefer:0';"
        "print(os.sched_getaffinity(0) == {first}, found.cores == (first,), 'prefer' in policy)"
    )
    variables = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
