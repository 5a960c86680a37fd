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
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.nccl_log import fault, log_of, proving, read, shown
from llmrecipes.hardware.nics import Port
from llmrecipes.launch.environment import FABRIC, environment
from llmrecipes.train import fabric_check
from llmrecipes.train.fabric_check import NetworkReport, judge, report
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
        (GLOO, "infiniband", "a network not named in NCCL's log"),
        ("", "efa", "a network not named in NCCL's log"),
    ],
)
def test_anything_else_is_a_fault(log: str, kind: str, why: str | None) -> None:
    found = fault(read(log), kind)
    assert found is None if why is None else found is not None and found.startswith(why)


def reports(kind: str, *logs: str) -> list[NetworkReport]:
    """One rank a node, each with its own log."""
    hosts = (f"n{number}.site.example" for number in range(len(logs)))
    return [report(kind, "nccl", log, host, f"{host}:/tmp/nccl.log") for host, log in zip(hosts, logs, strict=True)]


def test_the_run_says_which_network_each_node_uses() -> None:
    same = reports("infiniband", INFINIBAND, INFINIBAND)
    assert judge(same, "infiniband", allow_socket=False) == "IB with GPUDirect RDMA on 2 nodes"
    mixed = reports("infiniband", INFINIBAND, SOCKETS, INFINIBAND)
    said = judge(mixed, "infiniband", allow_socket=True)
    assert "n1.site.example" in said and "Socket without GPUDirect" in said


@pytest.mark.parametrize(
    ("logs", "rule"),
    [
        ((INFINIBAND, SOCKETS), ("inter_node.kind", "n1.site.example", "NET/IB", "NET/Socket", "--allow-socket")),
        ((MNNVL, MNNVL), "inter_node.kind"),
        ((INFINIBAND, ""), ("n1.site.example", "/tmp/nccl.log")),
    ],
)
def test_another_network_stops_the_run(logs: tuple[str, ...], rule: str | tuple[str, ...]) -> None:
    with refused("network", rule=rule) as caught:
        judge(reports("infiniband", *logs), "infiniband", allow_socket=False)
    assert caught.value.code == 2 and "--allow-socket" in caught.value.fix
    assert judge(reports("infiniband", *logs), "infiniband", allow_socket=True)


def test_thousands_of_ranks_are_one_short_message() -> None:
    wrong = [NetworkReport(f"n{number // 8}", "Socket", 2, "Socket") for number in range(16_384)]
    with refused("network", rule="16384") as caught:
        judge(wrong, "efa", allow_socket=False)
    assert len(str(caught.value)) < 1_000


def test_the_log_is_found_as_nccl_names_it() -> None:
    assert log_of({"NCCL_DEBUG_FILE": "/tmp/a%%-%h.%p"}, "n1.site", 7) == Path("/tmp/a%-n1.7")
    assert log_of({}, "n1", 7) is None


WARNING = "n1:1:2 [0] socket.cc:441 NCCL WARN socketFinalizeAccept: wrong type 4 != 3"


@pytest.mark.parametrize(
    ("user", "level", "subsystems", "seen"),
    [
        ({}, "INFO", "INIT,NET", 1),
        ({"NCCL_DEBUG": "WARN"}, "INFO", "INIT,NET", 1),
        ({"NCCL_DEBUG": "version", "NCCL_DEBUG_SUBSYS": "COLL"}, "INFO", "INIT,NET", 1),
        ({"NCCL_DEBUG": "INFO"}, "INFO", "INIT,BOOTSTRAP,ENV,NET", 10),
        ({"NCCL_DEBUG": "Trace", "NCCL_DEBUG_SUBSYS": "coll,net"}, "Trace", "COLL,NET,INIT", 10),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"}, "INFO", "ALL,INIT,NET", 10),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^NET,COLL"}, "INFO", "^COLL", 10),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^INIT"}, "INFO", "ALL", 10),
    ],
)
def test_a_users_level_is_kept_for_what_is_shown(user: dict[str, str], level: str, subsystems: str, seen: int) -> None:
    assert proving(user) == {"NCCL_DEBUG": level, "NCCL_DEBUG_SUBSYS": subsystems}
    assert len(shown([*INFINIBAND.splitlines(), WARNING], user.get("NCCL_DEBUG"))) == seen


def test_ranks_prove_their_network_where_the_site_has_a_fabric_and_the_run_needs_it() -> None:
    found = environment(load_profile("h100-ib"), plan_on("h100-ib", 2), 8)
    assert (found[FABRIC], found["NCCL_DEBUG"]) == ("infiniband", "WARN")
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
    fabric_check.leave_out_other_adapters([Port(f"{name}/1", "ACTIVE", 50, layer) for name, layer in layers.items()])
    assert os.environ.get("NCCL_IB_HCA") == value
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    fabric_check.leave_out_other_adapters([Port("mlx5_0/1", "ACTIVE", 50, "InfiniBand")])
    assert "NCCL_IB_HCA" not in os.environ


@pytest.fixture
def world() -> Iterator[Any]:
    """A world of one over gloo, as a platform that says what it is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda backend: type(
        "Platform", (), {"device": torch.device("cpu"), "backend": backend, "synchronize": lambda _: None}
    )()
    dist.destroy_process_group()


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a site with InfiniBand, whose node keeps logs in `tmp_path`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(FABRIC, "infiniband")
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)


def say(text: str) -> None:
    """What NCCL does at its first line."""
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(text, "utf-8")


def test_nothing_is_proven_without_a_fabric(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FABRIC, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with fabric_check.nccl_output() as output:
        assert fabric_check.require_fabric(world("gloo"), output, allow_socket=False) is None
        assert os.environ["NCCL_DEBUG"] == "WARN"


@pytest.mark.usefixtures("fabric")
def test_ranks_prove_their_network_at_the_start(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site that exports WARN is not refused: INFO goes to a file, WARN is what is seen."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with refused("network", rule="inter_node.kind"), fabric_check.nccl_output() as output:
        fabric_check.require_fabric(world("gloo"), output, allow_socket=False)
    with fabric_check.nccl_output() as output:
        assert output is not None
        assert fabric_check.require_fabric(world("gloo"), output, allow_socket=True) == "sockets (gloo) on 1 nodes"
    with fabric_check.nccl_output() as output:
        assert output is not None
        assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET")
        capsys.readouterr()
        say(f"{INFINIBAND}{WARNING}\nhalf a li")
        assert (
            fabric_check.require_fabric(world("nccl"), output, allow_socket=False)
            == "IB with GPUDirect RDMA on 1 nodes"
        )
        assert os.environ["NCCL_DEBUG"] == "WARN" and "NCCL_DEBUG_FILE" not in os.environ
    assert capsys.readouterr().out == f"{WARNING}\n"
    assert len(list(tmp_path.iterdir())) == 1  # of the refused one


@pytest.mark.usefixtures("fabric")
def test_warnings_are_shown_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as those of NCCL's asynchronous InfiniBand events, where the user wants them."""
    monkeypatch.setattr(fabric_check, "SECONDS", 0.01)
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/mine-%p")
    os.mkfifo(tmp_path / f"mine-{os.getpid()}")
    reader = os.open(tmp_path / f"mine-{os.getpid()}", os.O_RDWR)
    with fabric_check.nccl_output() as output:
        assert output is not None and os.environ["NCCL_DEBUG_FILE"] == str(output.path)
        say(f"{INFINIBAND}{WARNING}\n")
        assert os.read(reader, 1000).decode() == f"{WARNING}\n"  # waits for the thread
    os.close(reader)


@pytest.mark.usefixtures("fabric")
def test_after_an_error_nccls_warnings_come_first_and_its_log_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), fabric_check.nccl_output() as output:
        assert output is not None
        with fabric_check.report_on_error(output):
            say(f"{INFINIBAND}{WARNING}\n")
            raise RuntimeError("NCCL error")
    assert output is not None
    printed = capsys.readouterr()
    assert printed.out.count(WARNING) == 1 and printed.err.count(str(output.path)) == 1
    assert output.path.read_text("utf-8").startswith(INFINIBAND)


@pytest.mark.usefixtures("fabric")
def test_a_node_without_room_for_the_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with refused("TMPDIR", rule=str(tmp_path / "none")), fabric_check.nccl_output():
        pass


def test_sockets_are_allowed_by_an_option_of_every_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["submit", "gpt-7b", "--cluster", "h100-ib", "--nodes", "2", "--dry-run", "--allow-socket"]
    assert cli.run([*asked, "--to", "slurm"]) == 0
    assert "--allow-socket yes" in capsys.readouterr().out
    assert cli.run([*asked, "--to", "k8s", "--image", f"x@sha256:{'7' * 64}"]) == 0
    assert "- --allow-socket" in capsys.readouterr().out
