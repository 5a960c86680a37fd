"""Which network NCCL uses, by logs in its real formats, and what a run makes of it.

The lines come from logs in public issues and pages, with other host names: NVIDIA/nccl issues 707 (InfiniBand with
GPUDirect), 1537 (RoCE without), 952 (fallback to sockets), 1597 (aws-ofi-nccl 1.14 on two p5en), nccl-tests 185 (RoCE),
and logs of NCCL 2.19 to 2.31 with HPC-X's plugin, on NVL72 and with `comm … nRanks` at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmrecipes.cli import app as cli
from llmrecipes.hardware.adapters import Port
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.nccl_log import fault, log_of, read, warnings_of
from llmrecipes.launch.environment import FABRIC, environment
from llmrecipes.train import network
from llmrecipes.train.network import Report, judge, report
from tests.refusals import refused
from tests.unit.test_clusters import plan_on

INFINIBAND = """\
gpu-1:2017630:2017669 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
gpu-1:2017630:2017669 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB ib0:192.168.11.1<0>
gpu-1:2017630:2017669 [0] NCCL INFO Using non-device net plugin version 0
gpu-1:2017630:2017669 [0] NCCL INFO Using network IB
gpu-1:2017630:2017669 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
gpu-1:2017630:2017669 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [receive] via NET/IB/0/GDRDMA
gpu-1:2017630:2017669 [0] NCCL INFO Channel 01/0 : 0[0] -> 15[7] via P2P/IPC
gpu-1:2017630:2017669 [0] NCCL INFO Channel 04/0 : 13[5] -> 4[4] [send] via NET/IB/5(3)/GDRDMA
gpu-1:2017630:2017669 [0] NCCL INFO Channel 05/0 : 12[d6] -> 0[d6] [receive] via NET/IB/2/GDRDMA comm 0x9 nRanks 9
"""
HPCX = """\
gpu-1:986:1254 [6] NCCL INFO NET/IB : Made virtual device [0] name=mlx5_bond_0 speed=200000 ndevs=1
gpu-1:986:1254 [6] NCCL INFO NET/IB : Using [0]mlx5_bond_0:1/RoCE [1]mlx5_bond_1:1/RoCE [RO]; OOB eth0:10.0.4.19<0>
gpu-1:986:1254 [6] NCCL INFO P2P plugin v9 IBext_v9
gpu-1:986:1254 [6] NCCL INFO NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 0 'mlx5_bond_0'
gpu-1:986:1254 [6] NCCL INFO Channel 03/0 : 11[3] -> 3[3] [send] via NET/NCCL RDMA Plugin v9/3/GDRDMA
gpu-1:986:1254 [6] NCCL INFO Channel 03/0 : 3[3] -> 11[3] [receive] via NET/NCCL RDMA Plugin v9/3/GDRDMA(PCI)/Shared
"""
NO_GDR = """\
hostname1:25668:27396 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB bond0:10.10.10.10<0>
hostname1:25668:27396 [0] NCCL INFO Using network IB
hostname1:25668:27396 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
hostname1:25668:27396 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0
hostname1:25668:27396 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0
"""
EFA = """\
ip-172-31-3-90:188:706 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.14.0
ip-172-31-3-90:188:706 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
ip-172-31-3-90:188:706 [0] NCCL INFO NET/OFI NIC group 7 device #0 0000:a3:00.0
ip-172-31-3-90:188:706 [0] NCCL INFO Using network Libfabric
ip-172-31-3-90:188:709 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA/flush=None
ip-172-31-3-90:188:709 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Libfabric/0/GDRDMA
"""
OLD_EFA = """\
new-st-gpu-2:8804:8862 [6] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
new-st-gpu-2:8804:8862 [6] NCCL INFO Using network AWS Libfabric
new-st-gpu-2:8804:8862 [6] NCCL INFO Channel 03 : 15[a01d0] -> 6[a01c0] [receive] via NET/AWS Libfabric/3/GDRDMA
"""
SOCKETS = """\
esm2-worker-0:53:267 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
esm2-worker-0:53:267 [0] NCCL INFO NET/IB : No device found.
esm2-worker-0:53:267 [0] NCCL INFO NET/Socket : Using [0]eth0:10.140.0.7<0>
esm2-worker-0:53:267 [0] NCCL INFO Using network Socket
esm2-worker-0:53:267 [0] NCCL INFO NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'
esm2-worker-0:53:271 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[0] [receive] via NET/Socket/0
esm2-worker-0:53:271 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [send] via NET/Socket/0
"""
TCPX = """\
a3-0:77:99 [0] NCCL INFO Using network GPUDirectTCPX_v7
a3-0:77:99 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/GPUDirectTCPX_v7/0/GDRDMA
"""
MNNVL = """\
gb-0:77:99 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.4.19<0>
gb-0:77:99 [0] NCCL INFO Using network IB
gb-0:77:99 [0] NCCL INFO Channel 00 : 4[0] -> 3[3] via P2P/MNNVL
"""
LIBFABRIC_TCP = EFA.replace("provider is efa, fabric is efa-direct", "provider is tcp, fabric is 10.0.0.0/24")
GLOO = """\
[I1122 19:52:50.918649789 debug.cpp:48] [c10d] The debug level is set to DETAIL.
[I1122 19:52:55.396253406 TCPStore.cpp:271] [c10d - debug] The server has started on port = 29917.
[I1122 19:52:55.400562089 TCPStore.cpp:316] [c10d - debug] TCP client connected to host 127.0.0.1:29917
[I1122 19:52:55.412062806 TCPStoreLibUvBackend.cpp:921] [c10d - trace] get key:/default_pg/0//cpu//0/0
"""
"""What torch 2.13 printed with two processes over gloo, shortened: only at TORCH_DISTRIBUTED_DEBUG=DETAIL."""


@pytest.mark.parametrize(
    ("log", "kind", "described", "connections"),
    [
        (INFINIBAND, "infiniband", "IB with GPUDirect RDMA", 3),
        (HPCX, "roce", "NCCL RDMA Plugin v9 with GPUDirect RDMA", 2),
        (EFA, "efa", "Libfabric with GPUDirect RDMA", 2),
        (OLD_EFA, "efa", "AWS Libfabric with GPUDirect RDMA", 1),
        (MNNVL, "infiniband", "IB", 0),
    ],
)
def test_the_expected_network(log: str, kind: str, described: str, connections: int) -> None:
    found = read(log)
    assert fault(found, kind) is None
    assert (found.described(), found.connections) == (described, connections)


@pytest.mark.parametrize(
    ("log", "kind", "why"),
    [
        (SOCKETS, "infiniband", "Socket"),
        (SOCKETS, "roce", "Socket"),
        (SOCKETS, "efa", "Socket"),
        (NO_GDR, "roce", "IB without GPUDirect RDMA"),
        (INFINIBAND, "roce", "IB over IB"),
        (HPCX, "infiniband", "NCCL RDMA Plugin v9 over RoCE"),
        (INFINIBAND, "efa", "IB"),
        (EFA, "infiniband", "Libfabric"),
        (LIBFABRIC_TCP, "efa", "Libfabric over libfabric's provider tcp"),
        (EFA.replace("/GDRDMA", ""), "efa", "Libfabric without GPUDirect RDMA"),
        (
            INFINIBAND.replace("5(3)/GDRDMA", "5"),
            "infiniband",
            None,
        ),
        (
            INFINIBAND.replace("[receive] via NET/IB/2/GDRDMA", "[receive] via NET/IB/2"),
            "infiniband",
            "IB without GPUD",
        ),
        (TCPX, "infiniband", "GPUDirectTCPX_v7"),
        (GLOO, "infiniband", "a network that NCCL's log does not name"),
        ("", "efa", "a network that NCCL's log does not name"),
    ],
)
def test_anything_else_is_a_fault(log: str, kind: str, why: str | None) -> None:
    found = fault(read(log), kind)
    assert found is None if why is None else found is not None and found.startswith(why)


def reports(tmp_path: Path, kind: str, *logs: str) -> list[Report]:
    """One rank a node, each with its own log."""
    found = []
    for number, log in enumerate(logs):
        (tmp_path / f"nccl-n{number}-{100 + number}.log").write_text(log, "utf-8")
        variables = {"NCCL_DEBUG_FILE": f"{tmp_path}/nccl-%h-%p.log"}
        found.append(report(kind, "nccl", variables, f"n{number}.site.example", 100 + number))
    return found


def test_the_run_says_which_network_each_node_uses(tmp_path: Path) -> None:
    same = reports(tmp_path, "infiniband", INFINIBAND, INFINIBAND)
    assert judge(same, "infiniband", allow_socket=False) == "IB with GPUDirect RDMA on 2 nodes"
    mixed = reports(tmp_path, "infiniband", INFINIBAND, SOCKETS, INFINIBAND)
    said = judge(mixed, "infiniband", allow_socket=True)
    assert "n1.site.example" in said and "Socket without GPUDirect" in said


@pytest.mark.parametrize(
    ("logs", "rule"),
    [
        ((INFINIBAND, SOCKETS), ("inter_node.kind", "n1.site.example", "NET/IB", "NET/Socket", "--allow-socket")),
        ((MNNVL, MNNVL), ("inter_node.kind", "NCCL_DEBUG_SUBSYS")),
        ((INFINIBAND, ""), "n1.site.example"),
    ],
)
def test_another_network_stops_the_run(tmp_path: Path, logs: tuple[str, ...], rule: str | tuple[str, ...]) -> None:
    with refused("network", rule=rule) as caught:
        judge(reports(tmp_path, "infiniband", *logs), "infiniband", allow_socket=False)
    assert caught.value.code == 2 and "--allow-socket" in caught.value.fix
    assert judge(reports(tmp_path, "infiniband", *logs), "infiniband", allow_socket=True)


def test_thousands_of_ranks_are_one_short_message() -> None:
    wrong = [Report(f"n{number // 8}", "Socket", 2, "Socket") for number in range(16_384)]
    with refused("network", rule="16384") as caught:
        judge(wrong, "efa", allow_socket=False)
    assert len(str(caught.value)) < 1_000


def test_the_log_is_found_as_nccl_names_it() -> None:
    assert log_of({"NCCL_DEBUG_FILE": "/tmp/a%%-%h.%p"}, "n1.site", 7) == Path("/tmp/a%-n1.7")
    assert log_of({}, "n1", 7) is None
    assert warnings_of("a NCCL WARN b\nc NCCL INFO d") == ["a NCCL WARN b"]


def test_ranks_log_where_the_site_has_a_fabric_and_the_run_needs_it() -> None:
    found = environment(load_profile("h100-ib"), plan_on("h100-ib", 2), 8)
    assert (found[FABRIC], found["NCCL_DEBUG"], found["NCCL_DEBUG_SUBSYS"]) == ("infiniband", "INFO", "INIT,NET")
    assert "%p" in found["NCCL_DEBUG_FILE"]
    one = environment(load_profile("h100-ib"), plan_on("h100-ib", 1), 8)
    assert FABRIC not in one and one["NCCL_DEBUG"] == "WARN"
    domain = load_profile("gb200-nvl72")
    assert FABRIC not in environment(domain, plan_on("gb200-nvl72", 16), 4)
    assert environment(domain, plan_on("gb200-nvl72", 32), 4)[FABRIC] == "infiniband"
    assert FABRIC not in environment(load_profile("ethernet"), plan_on("ethernet", 4), 4)


@pytest.mark.parametrize(
    ("kind", "user", "value"),
    [
        ("infiniband", None, "=mlx5_0:1,mlx5_3:1"),
        ("roce", None, "=mlx5_1:1"),
        ("infiniband", "mlx5_0", "mlx5_0"),
        ("efa", None, None),
        (None, None, None),
    ],
)
def test_adapters_of_another_link_layer_are_left_out(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, user: str | None, value: str | None
) -> None:
    for name, text in ((FABRIC, kind), ("NCCL_IB_HCA", user)):
        monkeypatch.setenv(name, text or "")  # restored after the test, whatever the code sets
        if text is None:
            monkeypatch.delenv(name)
    layers = {"mlx5_0": "InfiniBand", "mlx5_1": "Ethernet", "mlx5_3": "InfiniBand"}
    network.leave_out_other_adapters([Port(f"{name}/1", "ACTIVE", 50, layer) for name, layer in layers.items()])
    assert os.environ.get("NCCL_IB_HCA") == value
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    network.leave_out_other_adapters([Port("mlx5_0/1", "ACTIVE", 50, "InfiniBand")])
    assert "NCCL_IB_HCA" not in os.environ


@pytest.fixture
def world() -> Iterator[Any]:
    """A world of one over gloo, as a platform that says what it is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda backend: type(
        "Platform", (), {"device": torch.device("cpu"), "backend": backend, "synchronize": lambda _: None}
    )()
    dist.destroy_process_group()


def test_ranks_prove_their_network_at_the_start(tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.prove(world("gloo"), allow_socket=False) is None  # no fabric is expected
    monkeypatch.setenv(FABRIC, "infiniband")
    with refused("network", rule="inter_node.kind"):
        network.prove(world("gloo"), allow_socket=False)
    assert network.prove(world("gloo"), allow_socket=True) == "sockets (gloo) on 1 nodes"
    log = tmp_path / f"nccl-{os.getpid()}.log"
    log.write_text(INFINIBAND, "utf-8")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/nccl-%p.log")
    assert network.prove(world("nccl"), allow_socket=False) == "IB with GPUDirect RDMA on 1 nodes"


def test_nccls_warnings_are_printed_after_an_error_and_its_log_is_removed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(INFINIBAND + "n1:1:2 [0] socket.cc:441 NCCL WARN socketFinalizeAccept: wrong type 4 != 3\n", "utf-8")
    monkeypatch.setenv(FABRIC, "infiniband")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(log))
    with pytest.raises(RuntimeError), network.nccl_log(), network.nccl_log():
        raise RuntimeError("NCCL error")
    assert capsys.readouterr().err.count("NCCL WARN socketFinalizeAccept") == 1 and log.exists()
    with network.nccl_log():
        pass
    assert log.exists()  # the user's
    monkeypatch.setattr(network, "NCCL_LOG", str(log))
    with network.nccl_log():
        pass
    assert not log.exists()


def test_sockets_are_allowed_by_an_option_of_every_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["submit", "gpt-7b", "--cluster", "h100-ib", "--nodes", "2", "--dry-run", "--allow-socket"]
    assert cli.run([*asked, "--to", "slurm"]) == 0
    assert "--allow-socket yes" in capsys.readouterr().out
    assert cli.run([*asked, "--to", "k8s", "--image", f"x@sha256:{'7' * 64}"]) == 0
    assert "- --allow-socket" in capsys.readouterr().out
