"""The doctor on this machine, on machines made of files, and on several nodes that talk over real sockets."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli.app import run
from llmrecipes.doctor import examine, fabric, gpus, nodes
from llmrecipes.doctor.check_result import Finding
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.nics import ports
from llmrecipes.hardware.profile import Adapters, Link, Profile
from llmrecipes.launch.rendezvous import TOKEN, job_hosts, own_number
from llmrecipes.recipe.load import load
from llmrecipes.stores import StoreFile
from tests.helpers import tiny_on, write_recipe
from tests.refusals import refused, require_message

H100 = load_profile("h100-ib")
LAPTOP = load_profile("laptop")


def said(findings: Iterable[Finding]) -> dict[str, str]:
    """What is wrong or doubtful, by check; every such finding has a fix."""
    found = [finding for finding in findings if finding.status in ("warn", "fail")]
    assert all(finding.fix for finding in found)
    return {f"{finding.status} {finding.check}": finding.what for finding in found}


# -- versions --------------------------------------------------------------------------------------------------------

GOOD = {"torch": "2.13.0+cu130", "megatron-core": "0.19.2", "nvidia-nccl-cu13": "2.28.3"}


def problems(
    driver: str | None = "580.95.05",
    gpus: int = 8,
    cuda: str | None = "13.0",
    **changes: str,
) -> Any:
    installed = {**GOOD, **{name.replace("_", "-"): version for name, version in changes.items()}}
    return said(examine.check_versions(installed, driver, gpus, {"torch": "2.13.0"}, cuda))


def test_compatible_versions_pass() -> None:
    assert problems() == {}
    assert problems(driver=None, gpus=0, cuda=None, torch="2.13.0+cpu") == {}


def test_nvidias_build_is_a_cuda_build() -> None:
    """In nvcr.io/nvidia/pytorch torch has no local version `cu130`, and no nvidia-cuda-runtime package beside it."""
    image = {"torch": "2.13.0a0+8145d630e8.nv26.06", "megatron-core": "0.19.2"}
    found = list(examine.check_versions(image, "580.95.05", 8, {}, "13.0"))
    assert said(found) == {}
    assert "CUDA 13.0" in next(each.what for each in found if each.check == "CUDA driver")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (problems(driver="535.104.05"), "535.104.05"),
        (problems(cuda=None, torch="2.13.0+cpu"), "8 GPUs"),
        (problems(cuda=None, torch="2.13.0"), "8 GPUs"),  # built from source without CUDA
        (problems(megatron_core="0.16.1"), "0.16.1, tested with 0.19"),
        (problems(nvidia_nccl_cu12="2.27.5"), "nvidia-nccl-cu12 2.27.5"),
        (problems(transformer_engine="2.9.0", transformer_engine_torch="2.8.0"), "its packages differ"),
        (problems(torch="2.12.1+cu130"), "torch 2.12.1+cu130 (lock 2.13.0)"),
        (said(examine.check_versions({}, None, 0, {}, None)), "not installed"),
    ],
)
def test_incompatible_versions_are_reported(wrong: dict[str, str], words: str) -> None:
    assert words in " ".join(wrong.values())


# -- GPUs: a report in the form of nvidia-smi -q -x ------------------------------------------------------------------

GPU = """
<gpu id="{id}"><product_name>NVIDIA H100 80GB HBM3</product_name>
  <pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width>
    <current_link_width>{lanes}x</current_link_width></link_widths></pci_gpu_link_info></pci>
  <fb_memory_usage><total>81559 MiB</total><used>{used} MiB</used></fb_memory_usage>
  <ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
    <dram_uncorrectable>{ecc}</dram_uncorrectable></volatile></ecc_errors>
  <remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
    <remapped_row_failure>No</remapped_row_failure></remapped_rows>
  <temperature><gpu_temp>{heat} C</gpu_temp></temperature>
  <clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
  <fabric><state>{fabric}</state></fabric>
  <processes>{processes}</processes></gpu>
"""
HEALTHY = {"lanes": 16, "used": 4, "ecc": 0, "pending": "No", "heat": 31, "hot": "Not Active", "fabric": "Completed",
           "processes": ""}  # fmt: skip


def report(*changes: dict[str, Any], count: int = 8) -> str:
    each = [*changes, *[{}] * (count - len(changes))]
    entries = "".join(GPU.format(**{**HEALTHY, "id": number, **change}) for number, change in enumerate(each))
    return f"<nvidia_smi_log><driver_version>580.95.05</driver_version>{entries}</nvidia_smi_log>"


def test_healthy_gpus_are_fine() -> None:
    driver, states = gpus.parse(report())
    assert driver == "580.95.05"
    assert said(gpus.check(states, H100)) == {}


def test_another_jobs_gpus_are_not_checked_on_a_shared_node() -> None:
    _, states = gpus.parse(report({}, {"used": 60_000}, count=8))
    assert "fail gpu 1" in said(gpus.check(states, H100))
    assert said(gpus.check(states, H100, own_gpus={0, 3})) == {}
    assert "fail gpu 1" in said(gpus.check(states, H100, own_gpus={1}))
    assert said(gpus.check(states, H100, own_gpus=())) == {}
    assert "fail GPUs" in said(gpus.check(states[:7], H100, own_gpus=()))  # one that is missing is no other job's


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        ({"used": 71000, "processes": "<process_info><pid>4711</pid></process_info>"}, "fail gpu 0", "process 4711"),
        ({"ecc": 3}, "fail gpu 0", "3"),
        ({"pending": "Yes"}, "fail gpu 0", ""),
        ({"hot": "Active", "heat": 92}, "fail gpu 0", "92 °C: hw_thermal_slowdown"),
        ({"lanes": 8}, "warn gpu 0", "8 of 16 lanes"),
        ({"fabric": "In Progress"}, "fail gpu 0", "NVLink"),
    ],
)
def test_an_unhealthy_gpu_is_reported(change: dict[str, Any], check: str, words: str) -> None:
    assert words in said(gpus.check(gpus.parse(report(change))[1], H100))[check]


def test_a_missing_or_different_gpu_is_reported() -> None:
    assert said(gpus.check(gpus.parse(report(count=7))[1], H100)) == {"fail GPUs": "7 of 8"}
    assert "but h200-ib has" in said(gpus.check(gpus.parse(report())[1], load_profile("h200-ib")))["warn GPUs"]


def test_a_driver_that_does_not_answer_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n", "ascii")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert run(["doctor", "--json", "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)]) == 1
    found = [finding for finding in json.loads(capsys.readouterr().out)["findings"] if finding["status"] == "fail"]
    (gpus_do_not_respond,) = [each for each in found if each["check"] == "GPUs"]
    assert gpus_do_not_respond["fix"]
    assert "CalledProcessError" in gpus_do_not_respond["what"]


# -- adapters and limits ---------------------------------------------------------------------------------------------


def adapter(
    folder: Path, name: str, rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE", layer: str = "InfiniBand",
    counters: dict[str, int] | None = None, kind: str = "counters",
) -> None:  # fmt: skip
    """Files as of drivers/infiniband/core/sysfs.c: `state` and `rate` with these words, a number in each counter."""
    port = folder / name / "ports" / "1"
    (port / kind).mkdir(parents=True)
    for file, text in {"state": state, "rate": rate, "link_layer": layer}.items():
        (port / file).write_text(f"{text}\n", "ascii")
    for file, value in (counters or {"link_downed": 0}).items():
        (port / kind / file).write_text(f"{value}\n", "ascii")


def on(folder: Path, profile: Profile | None = H100, **user: str) -> list[Finding]:
    return list(fabric.check(ports(folder), profile, user))


def statuses(findings: Iterable[Finding], check: str = "adapters") -> list[str]:
    return [finding.status for finding in findings if finding.check == check]


def eight(folder: Path, *, but: int = 0) -> None:
    for number in range(8 - but):
        adapter(folder, f"mlx5_{number}")


def test_the_ports_of_a_healthy_node(tmp_path: Path) -> None:
    eight(tmp_path)
    assert said(on(tmp_path)) == {} and statuses(on(tmp_path)) == ["ok"]
    assert said(on(tmp_path, None)) == {} and statuses(on(tmp_path, None)) == ["ok"]
    nothing = tmp_path / "nothing"
    assert list(said(on(nothing))) == ["fail adapters"]
    assert said(on(nothing, LAPTOP)) == {}


def test_a_port_that_is_down_slow_or_missing_fails_and_is_not_ok_too(tmp_path: Path) -> None:
    eight(tmp_path, but=3)
    found = on(tmp_path)
    assert "5 of 8" in said(found)["fail adapters"] and statuses(found) == ["fail"]
    adapter(tmp_path, "mlx5_5", state="1: DOWN")
    adapter(tmp_path, "mlx5_6", rate="100 Gb/sec (4X EDR)")
    adapter(tmp_path, "mlx5_7", counters={"link_downed": 99})
    found = on(tmp_path)
    wrong = said(found)
    assert "DOWN" in wrong["fail adapter mlx5_5/1"]
    assert wrong["fail adapter mlx5_6/1"] == "12.5 GB/s, but h100-ib has 50 a port"
    assert "99 times" in wrong["warn adapter mlx5_7/1"]
    assert "6 of 8" in wrong["fail adapters"] and statuses(found) == ["fail"]


def test_ports_for_storage_do_not_fail_a_node(tmp_path: Path) -> None:
    """DGX H100 has two more ConnectX-7 for storage, which are called mlx5_ too."""
    eight(tmp_path)
    adapter(tmp_path, "mlx5_8", layer="Ethernet", rate="100 Gb/sec (4X EDR)", state="1: DOWN")
    assert said(on(tmp_path)) == {} and statuses(on(tmp_path)) == ["ok"]
    adapter(tmp_path, "mlx5_9", rate="200 Gb/sec (4X HDR)", counters={"symbol_error": 10**6})
    found = on(tmp_path)
    assert "fail" not in {each.status for each in found} and statuses(found) == ["skip"]
    assert any("adapters.names" in each.fix for each in found if each.check == "adapter mlx5_9/1")
    names = [f"mlx5_{number}" for number in range(8)]
    named = H100.model_copy(update={"adapters": Adapters(ports=8, gb_per_s=50, names=tuple(names))})
    assert said(on(tmp_path, named)) == {} and statuses(on(tmp_path, named)) == ["ok"]
    missing = H100.model_copy(update={"adapters": Adapters(ports=8, gb_per_s=50, names=(*names[:7], "mlx5_12"))})
    assert "fail adapter mlx5_12" in said(on(tmp_path, missing))


def test_efa_has_more_ports_than_gpus(tmp_path: Path) -> None:
    """p5.48xlarge: rdmap79s0 and 31 more; the EFA driver reports 100 Gb/s a port and no link layer."""
    efa = load_profile("aws-p5-efa")
    for number in range(32):
        adapter(tmp_path, f"rdmap{number}s0", "100 Gb/sec (4X EDR)", layer="Unknown", counters={"tx_bytes": 1})
    assert said(on(tmp_path, efa)) == {} and statuses(on(tmp_path, efa)) == ["ok"]
    shutil.rmtree(tmp_path / "rdmap7s0")
    assert "31 of 32" in said(on(tmp_path, efa))["fail adapters"]


def test_the_users_choice_of_adapters_wins_and_is_shown(tmp_path: Path) -> None:
    eight(tmp_path, but=4)
    for number in range(4):
        adapter(tmp_path, f"rocep{number}s0")
    found = on(tmp_path, NCCL_IB_HCA="mlx5")
    assert "4 of 8" in said(found)["warn adapters"] and "NCCL_IB_HCA=mlx5 " in found[-1].what
    assert "fail" not in {each.status for each in found}
    every = on(tmp_path, NCCL_IB_HCA="mlx5,rocep")
    assert said(every) == {} and "NCCL_IB_HCA=mlx5,rocep " in every[-1].what
    assert "fail adapter mlx5_9" in said(on(tmp_path, NCCL_IB_HCA="=mlx5_0,mlx5_9:1"))
    assert "1 of 8" in said(on(tmp_path, NCCL_IB_HCA="=mlx5_0:1,mlx5_1:2"))["warn adapters"]
    assert "4 of 8" in said(on(tmp_path, NCCL_IB_HCA="^mlx5"))["warn adapters"]


def test_link_flaps_are_read_from_hw_counters_too(tmp_path: Path) -> None:
    """Soft-RoCE has no `counters` folder (drivers/infiniband/sw/rxe/rxe_hw_counters.c)."""
    flaps = {"link_downed": 14, "sent_pkts": 201, "rcvd_pkts": 12, "completer_retry_err": 3}
    adapter(tmp_path, "rxe0", "2.5 Gb/sec (1X SDR)", layer="Ethernet", counters=flaps, kind="hw_counters")
    assert "14 times" in said(on(tmp_path, None))["warn adapter rxe0/1"]
    roce = LAPTOP.model_copy(update={"inter_node": Link(kind="roce", gb_per_s=0.3)})
    assert "14 times" in said(on(tmp_path, roce))["warn adapter rxe0/1"]


def test_adapters_by_another_name_are_named_and_so_is_what_was_looked_for(tmp_path: Path) -> None:
    adapter(tmp_path, "rxe0", "200 Gb/sec (4X HDR)", layer="Ethernet")
    mellanox = H100.model_copy(update={"environment": {"NCCL_IB_HCA": "mlx5"}})
    for profile, user, sought in (
        (load_profile("a100-roce"), {"NCCL_IB_HCA": "=mlx5_0"}, "NCCL_IB_HCA==mlx5_0 of your environment"),
        (mellanox, {}, "NCCL_IB_HCA=mlx5 of h100-ib"),
        (H100, {}, "link layer InfiniBand"),
    ):
        finding = next(each for each in on(tmp_path, profile, **user) if each.check == "adapters")
        assert finding.status == "fail" and sought in finding.what and "rxe0/1 (Ethernet)" in finding.what
        assert "adapters.names" in finding.fix and "rxe0" in finding.fix
    (nothing,) = (each for each in on(tmp_path / "none") if each.check == "adapters")
    assert "/dev/infiniband" in nothing.fix


def test_error_counters_of_a_port(tmp_path: Path) -> None:
    eight(tmp_path, but=2)
    adapter(tmp_path, "mlx5_6", counters={"symbol_error": 10**6, "port_rcv_errors": 7})
    adapter(tmp_path, "mlx5_7", counters={"link_error_recovery": 60, "port_rcv_data": 10**12})
    found = said(on(tmp_path))
    assert found == {
        "fail adapter mlx5_6/1": "symbol_error 1,000,000",
        "warn adapter mlx5_7/1": "link_error_recovery 60",
    }


def test_too_low_limits_are_reported() -> None:
    low = fabric.NetworkLimits(memlock_bytes=64 << 10, shared_bytes=64 << 20, open_files=256)
    found = said(fabric.check_limits(low, H100, 8))
    assert found["fail locked memory"].startswith("64 KiB")
    assert "0.1 GiB in /dev/shm for 8 ranks" in found["warn shared memory"]
    assert "256" in found["warn open files"]
    high = fabric.NetworkLimits(memlock_bytes=None, shared_bytes=64 << 30, open_files=1 << 20)
    assert said(fabric.check_limits(high, H100, 8)) == {}


def test_limits_are_those_of_this_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))  # not fewer, of which a worker may have more open
    try:
        here = fabric.read_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert here.open_files == soft - 1
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY or fabric._may_lock(fabric.PROCESS)
    assert here.memlock_bytes == (None if unlimited else locked)
    free = shutil.disk_usage("/dev/shm").free
    assert here.shared_bytes == pytest.approx(free, abs=256 << 20)  # other processes use it at the same time


# -- network and storage ---------------------------------------------------------------------------------------------


def test_names_and_ports(unused_port: int) -> None:
    assert fabric.check_name("no-such-host.invalid", several=True).status == "fail"
    assert fabric.check_name("localhost", several=True).status == "fail"
    assert fabric.check_name("localhost", several=False).status == "ok"

    assert fabric.free_port(unused_port).status == "ok"
    with socket.create_server(("", unused_port)):
        assert fabric.free_port(unused_port).status == "fail"
    found = said(fabric.check_network(unused_port, False, {"GLOO_SOCKET_IFNAME": "lo,ib9"}))
    assert "ib9" in found["fail interfaces"]


@pytest.mark.parametrize(
    ("addresses", "status"),
    [
        (["127.0.1.1", "10.0.0.7"], "ok"),  # one that other nodes can reach is enough
        (["10.0.0.7", "::1"], "ok"),
        (["127.0.1.1", "::1"], "fail"),
        (["fe80::1%eth0"], "ok"),
    ],
)
def test_a_name_with_several_addresses_is_refused_only_if_all_are_loopback(
    addresses: list[str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a resolver answers, which no test can arrange on this machine without changing /etc/hosts."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert fabric.check_name("node1", several=True).status == status


def test_directories(tmp_path: Path) -> None:
    found = list(examine.check_directory(tmp_path / "not" / "yet", "runs"))
    assert not [finding for finding in found if finding.status == "fail"]
    assert not list(tmp_path.iterdir()), "something was left behind"
    assert "fail runs" in said(examine.check_directory(tmp_path, "runs", 1 << 50))
    assert "fail runs" in said(examine.check_directory(Path("/proc/self"), "runs"))


def test_data_that_is_missing_or_unequal(tmp_path: Path) -> None:
    recipe = tiny_on(tmp_path / "nowhere")
    found = said(examine.check_data(recipe, tmp_path))
    assert "warn data" in found
    assert any(name.startswith("fail source") for name in found)
    for number, lines in enumerate((1, 1, 200)):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "words"}\n' * lines, "utf-8")
    sources = {"sources": [{"type": "jsonl", "path": f"{tmp_path}/*.jsonl"}]}
    found = said(examine.check_data(tiny_on(tmp_path, data=sources), tmp_path))
    assert any("200 times the median size" in what for what in found.values())


def test_files_in_a_store_have_the_size_that_it_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrecipes.data.sources.sources.files", lambda _source: [StoreFile("s3://b/x.jsonl", 5 << 20)])
    found = examine.check_data(tiny_on(tmp_path), tmp_path)
    assert any(each.status == "ok" and "5.0 MiB" in each.what for each in found)


# -- several nodes ---------------------------------------------------------------------------------------------------


def node(
    number: int, hosts: list[str], port: int, runs: Path, patience: float = 30, verdict: str = "ok('own', 'fine')"
) -> subprocess.Popen[str]:
    """`llmrecipes doctor` on one of several nodes, which are addresses of this machine."""
    program = (
        "import sys; from pathlib import Path; from llmrecipes.doctor.nodes import NodeRendezvous, meet;"
        "import json; from llmrecipes.doctor.check_result import Finding, ok;"
        f"m = NodeRendezvous({tuple(hosts)!r}, {number}, {port}, Path({str(runs)!r}), b'of this job', {patience});"
        f"found = meet(m, [{verdict}]);"
        "print(json.dumps([[each.as_dict() for each in found.findings or []], found.bad]))"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def answers(processes: list[subprocess.Popen[str]]) -> list[dict[str, str]]:
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    told = [json.loads(output) for output in outputs]
    assert not any(findings for findings, _ in told[1:]), "the first node prints for all"
    assert len({str(bad) for _, bad in told}) == 1, "every node knows which ones are bad"
    found: list[dict[str, str]] = told[0][0]
    return found


HOSTS = [f"127.0.0.{number}" for number in range(1, 5)]


def test_healthy_nodes_pass(tmp_path: Path, unused_port: int) -> None:
    found = answers([node(number, HOSTS, unused_port, tmp_path) for number in range(4)])
    assert not [each for each in found if each["status"] != "ok"]
    checks = {(each["node"], each["check"]) for each in found}
    for host in HOSTS[1:]:
        assert {(host, check) for check in ("clock", "shared directory", "ports between nodes")} <= checks
    assert sum(check == "own" for _, check in checks) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_node_with_a_different_directory_and_an_absent_one_are_reported(tmp_path: Path, unused_port: int) -> None:
    folders = [tmp_path / "shared", tmp_path / "shared", tmp_path / "own"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    processes = [node(number, HOSTS, unused_port, folders[number], patience=20) for number in range(3)]
    found = [answer for answer in answers(processes) if answer["status"] == "fail"]
    wrong = {(each["node"], each["check"]) for each in found}
    assert ("127.0.0.3", "shared directory") in wrong
    assert ("127.0.0.4", "node") in wrong
    assert any(
        check == "ports between nodes" and "127.0.0.4" in each["what"] for each in found for check in [each["check"]]
    )
    assert ("127.0.0.2", "shared directory") not in wrong


def test_no_node_of_a_job_starts_beside_a_bad_one(tmp_path: Path, unused_port: int) -> None:
    """Ranks of pods start by themselves: without the verdict of all, the good ones would wait for the bad one."""
    broken = "Finding('own', 'fail', 'a GPU is missing', 'drain it', '127.0.0.2')"
    processes = [
        node(number, HOSTS[:2], unused_port, tmp_path, verdict=verdict)
        for number, verdict in enumerate(("ok('own', 'fine')", broken))
    ]
    outputs = [json.loads(process.communicate(timeout=240)[0]) for process in processes]
    assert [bad for _, bad in outputs] == [["127.0.0.2"], ["127.0.0.2"]]


def test_jobs_that_start_at_once_do_not_take_each_others_file_for_their_own(tmp_path: Path) -> None:
    files = {
        nodes._mark_file(nodes.NodeRendezvous((f"{run}-0", f"{run}-1"), 0, 12000, tmp_path, b""))
        for run in ("one", "two")
    }
    assert len(files) == 2


def test_clock_skew_is_reported() -> None:
    assert "60 s" in said(nodes._clock(remote=1000.0, sent=1060.0, received=1060.1))["fail clock"]
    assert said(nodes._clock(remote=1000.05, sent=1000.0, received=1000.1)) == {}


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: Path) -> None:
    recipe = write_recipe(tiny_on(corpus), tmp_path)
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
    code = run(["doctor", recipe, *paths, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is (code == 0)
    checks = {finding["check"] for finding in answer["findings"]}
    assert {"GPUs", "locked memory", "shared memory", "host name", "port", "runs", "data", "version of torch"} <= checks
    assert "runs speed" in checks
    assert run(["doctor", *paths, "--cluster", "h100-ib", "--quiet"]) == 1
    printed = capsys.readouterr().out
    assert "0 of 8" in printed
    assert "fix: " in printed


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("a,b", ("a", "b")),
        ("run-[0-2].run", ("run-0.run", "run-1.run", "run-2.run")),
        ("n[08-10],m", ("n08", "n09", "n10", "m")),
    ],
)
def test_nodes_are_named_one_by_one_or_as_a_range(nodes: str, hosts: tuple[str, ...]) -> None:
    assert job_hosts(nodes) == hosts


@pytest.mark.parametrize("nodes", ["a,a", "", "n[0-1],n1", "n[3-1]", "n[0-999999999]"])
def test_other_lists_of_nodes_are_refused(nodes: str) -> None:
    with refused("--nodes"):
        job_hosts(nodes)


def test_a_pod_finds_its_place_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the node's network its host name is not the pod's."""
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert own_number(("run-0.run", "run-1.run")) == 1


def test_the_capability_lifts_the_limit_of_locked_memory(tmp_path: Path) -> None:
    status = tmp_path / "status"
    for effective, may in (("0000000000004000", True), ("0000000000000000", False), ("000001ffffffffff", True)):
        status.write_text(f"Name:\tpython\nCapPrm:\t0\nCapEff:\t{effective}\n")
        assert fabric._may_lock(status) is may
    assert fabric._may_lock(tmp_path / "none") is False


def test_a_pod_of_a_run_that_is_done_waits_for_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other pods of its Job have completed and never come back."""
    run_dir = tmp_path / "gpt-tiny" / "first"
    run_dir.mkdir(parents=True)
    words = ["doctor", "gpt-tiny", "--runs-dir", str(tmp_path), "--nodes", "pod-[0-1].run", "--patience", "1"]
    state = {"state": "finished", "step": load("gpt-tiny").recipe.train.train_iters}
    (run_dir / "status.json").write_text(json.dumps(state))
    assert run([*words, "--run-id", "first"]) == 0
    assert "nothing to check" in capsys.readouterr().out
    assert run(["doctor", "--run-id", "first"]) == 2
    require_message(capsys.readouterr().err, "--run-id")


def test_one_pod_of_a_job_measures_the_storage_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    for index in ("0", "1"):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
        run(["doctor", "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path), "--json"])
        checks = {finding["check"] for finding in json.loads(capsys.readouterr().out)["findings"]}
        assert {"runs", "data"} <= checks
        measured.append("runs speed" in checks)
    assert measured == [True, False]


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        (["--cluster", "h100"], "h100", ()),
        (["--nodes", "a,a"], "--nodes", "'a,a'"),
        (["--gpus", "0,x"], "--gpus", "'0,x'"),
        (["--nodes", "n1,n2"], "--nodes", ("n1", "n2")),
        (["no-recipe"], "no-recipe", ()),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], where: str, rule: str | tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["doctor", *arguments, "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)]) == 2
    require_message(capsys.readouterr().err, where, rule=rule)


@pytest.mark.parametrize("command", [["doctor"], ["bench", "fabric"]])
@pytest.mark.parametrize("token", [None, "", "short-secret"])
def test_several_nodes_need_a_secret_that_no_message_repeats(
    command: list[str], token: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    if token is not None:
        monkeypatch.setenv(TOKEN, token)
    assert run([*command, "--nodes", f"{socket.gethostname()},n2", "--patience", "1"]) == 2
    printed = capsys.readouterr().err
    require_message(printed, TOKEN, rule="16")
    assert not token or token not in printed


def test_a_doctor_that_crashes_does_not_end_as_after_a_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prolog drains the node after 1; a job is stopped by any code that comes without a bad node."""

    def broken(_: object) -> list[Finding]:
        raise ValueError("a bug")

    monkeypatch.setattr("llmrecipes.doctor.examine.examine", broken)
    report = tmp_path / "bad"
    report.touch()
    assert run(["doctor", "--bad-nodes", str(report), "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)]) == 70
    assert "ValueError" in capsys.readouterr().err and not report.read_text()


def test_a_container_without_scontrol_is_told_how_to_name_the_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
    for name, value in {**job, "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert run(["doctor", "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)]) == 2
    require_message(capsys.readouterr().err, "--nodes", rule="n[1-2]")
