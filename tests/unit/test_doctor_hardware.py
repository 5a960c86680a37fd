"""The doctor's checks of GPUs, links and nodes, on outputs in the formats of the programs and files that they read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from llmrecipes.doctor import ethernet, examine, fabric, gpus, nodes
from llmrecipes.doctor.check_result import Finding, ok
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.nics import Port
from llmrecipes.units import GIB

H100 = load_profile("h100-ib")
ROCE = load_profile("a100-roce")
LAPTOP = load_profile("laptop")
ETHERNET = load_profile("ethernet")


def said(findings: Iterable[Finding]) -> dict[str, str]:
    """What is wrong or doubtful, by check; every such finding has a fix."""
    found = [finding for finding in findings if finding.status in ("warn", "fail")]
    assert all(finding.fix for finding in found)
    return {f"{finding.status} {finding.check}": finding.what for finding in found}


# -- the kernel's log ------------------------------------------------------------------------------------------------

KMSG = """\
6,812,2345678,-;nvidia: loading out-of-tree module taints kernel.
4,1339,7200000000,-;NVRM: Xid (PCI:0000:18:00): 31, pid=1234, name=python3, Ch 00000008, intr 00000000. MMU Fault
 SUBSYSTEM=pci
3,1340,7260000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
3,1341,7261000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,1342,7262000000,-;NVRM: Xid (PCI:0000:b9:00): 92, pid=2711, High single-bit ECC error rate
"""
"""Records as of Documentation/ABI/testing/dev-kmsg; the messages are those of drivers 535 to 580."""


def test_xid_errors_are_read_from_the_kernels_log(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(KMSG, "utf-8")
    log = gpus.kernel_records(tmp_path / "kmsg")
    found = list(gpus.check_kernel_log(log, now=7_980.0))
    assert [each.status for each in found] == ["fail", "warn"]  # 31 is the program's
    assert all(word in found[0].what for word in ("Xid 79", "0000:18:00", "2 times", "12 min"))
    assert "reboot" in found[0].fix
    assert all(word in found[1].what for word in ("Xid 92", "0000:b9:00"))
    # The log keeps what has been mended since.
    assert {each.status for each in gpus.check_kernel_log(log, now=7_980.0 + 3 * 86400)} == {"warn"}
    assert [each.status for each in gpus.check_kernel_log(["6,1,1,-;usb 1-1: new device"], 10.0)] == ["ok"]


def test_a_kernel_log_that_cannot_be_read_is_no_fault(tmp_path: Path) -> None:
    assert gpus.kernel_records(tmp_path / "none") is None
    assert [each.status for each in gpus.check_kernel_log(None, 10.0)] == ["skip"]


# -- GPUs ------------------------------------------------------------------------------------------------------------

GPU = """
<gpu id="00000000:18:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
 <pci><pci_gpu_link_info><pcie_gen><max_link_gen>{slot}</max_link_gen><current_link_gen>{now}</current_link_gen>
  <device_current_link_gen>{now}</device_current_link_gen><max_device_link_gen>5</max_device_link_gen>
  <max_host_link_gen>5</max_host_link_gen></pcie_gen>
  <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
 </pci_gpu_link_info></pci>
 <performance_state>{state}</performance_state>
 <{section}><power_state>P0</power_state><average_power_draw>70.20 W</average_power_draw>
  <{limit}>{watts}</{limit}><default_power_limit>700.00 W</default_power_limit></{section}>
 <applications_clocks><graphics_clock>{clock}</graphics_clock></applications_clocks>
 <default_applications_clocks><graphics_clock>1980 MHz</graphics_clock></default_applications_clocks></gpu>
"""
"""Part of `nvidia-smi -q -x`; drivers before 530 say power_readings and power_limit."""
FINE = {
    "slot": "5", "now": "5", "state": "P0", "watts": "700.00 W", "clock": "1980 MHz",
    "section": "gpu_power_readings", "limit": "current_power_limit",
}  # fmt: skip


def gpu(**changes: str) -> list[gpus.GpuState]:
    return gpus.parse(f"<nvidia_smi_log>{GPU.format(**{**FINE, **changes})}</nvidia_smi_log>")[1]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, None),
        ({"now": "1", "state": "P8"}, None),  # an idle GPU saves power
        ({"now": "1"}, "PCIe generation 1 of 5"),
        ({"slot": "4", "now": "4"}, "PCIe generation 4 of 5"),
        ({"watts": "500.00 W"}, "power limit 500 W of 700"),
        ({"watts": "500.00 W", "section": "power_readings", "limit": "power_limit"}, "power limit 500 W of 700"),
        ({"watts": "N/A"}, None),
        ({"clock": "1200 MHz"}, "clock limited to 1200 MHz of 1980"),
        ({"clock": "Requested functionality has been deprecated"}, None),
    ],
)
def test_pcie_generation_power_and_clocks(changes: dict[str, str], what: str | None) -> None:
    assert said(gpus.check(gpu(**changes), None)) == ({} if what is None else {"warn gpu 0": what})


def links(*states: str) -> str:
    """As `nvidia-smi nvlink --status` prints them, with a tab and a blank before each link."""
    report = ""
    for number, state in enumerate(states):
        report += f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-4c0d2d0a-0000-0000-0000-00000000000{number})\n"
        report += "".join(
            f"\t Link {link}: {'26.562 GB/s' if up == '1' else '<inactive>'}\n" for link, up in enumerate(state)
        )
    return report


def test_nvlinks_that_are_down() -> None:
    up, one_down = "1" * 18, "1" * 17 + "0"
    assert said(gpus.check_nvlink(gpus.parse_nvlink(links(up, up)), H100)) == {}
    found = said(gpus.check_nvlink(gpus.parse_nvlink(links(up, one_down)), H100))
    assert list(found) == ["fail gpu 1"] and "17 of 18" in found["fail gpu 1"]
    assert list(said(gpus.check_nvlink(gpus.parse_nvlink(links(one_down, one_down)), H100))) == [
        "warn gpu 0",
        "warn gpu 1",
    ]
    assert "fail NVLink" in said(gpus.check_nvlink(gpus.parse_nvlink(links("0" * 18, "0" * 18)), H100))
    assert said(gpus.check_nvlink(gpus.parse_nvlink(links("0" * 12)), load_profile("ethernet"))) == {}
    unsupported = "GPU 0: NVIDIA RTX A4000 (UUID: GPU-aaaa)\nNVML: Unable to retrieve Nvlink information\n"
    assert gpus.parse_nvlink(unsupported) == [(0, 0)]


# -- GPUDirect -------------------------------------------------------------------------------------------------------

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
"""/proc/driver/nvidia/version of the two kinds of kernel modules."""


@pytest.mark.parametrize(
    ("driver", "release", "module", "status"),
    [
        (PROPRIETARY, "5.15.0-1075-aws", "nvidia_peermem", "ok"),
        (PROPRIETARY, "4.18.0-513.el8.x86_64", "nv_peer_mem", "ok"),
        (OPEN, "5.15.0-1075-aws", "nvidia", "ok"),
        (PROPRIETARY, "6.8.0-41-generic", "nvidia", "fail"),
        (OPEN, "5.4.0-200-generic", "nvidia", "fail"),
        ("", "6.8.0", "nvidia", "skip"),
    ],
)
def test_adapters_reach_gpu_memory_by_peermem_or_dma_buf(
    tmp_path: Path, driver: str, release: str, module: str, status: str
) -> None:
    (tmp_path / "module" / module).mkdir(parents=True)
    version = tmp_path / "version"
    if driver:
        version.write_text(driver, "ascii")
    here = fabric.support(tmp_path / "module", version, release)
    (found,) = fabric.check_gpudirect(here, H100)
    assert found.status == status and (found.fix or status != "fail")
    assert list(fabric.check_gpudirect(here, LAPTOP)) == []


def bridge(port_type: int, acs: int | None) -> bytes:
    """Configuration space of a PCIe bridge (PCI Express base specification, chapter 7), with ACS after AER."""
    config = bytearray(4096)
    config[0x34] = 0x40
    config[0x40:0x44] = bytes((0x01, 0x48, 0, 0))  # power management
    config[0x48:0x4C] = bytes((0x10, 0x00, port_type << 4 | 2, 0))
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    if acs is not None:
        config[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        config[0x14E:0x150] = acs.to_bytes(2, "little")
    return bytes(config)


ON = 0x1D  # SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, as lspci -vvv shows it


@pytest.mark.parametrize(
    ("ports", "status"),
    [
        ([(4, ON), (5, None), (6, ON)], "warn"),
        ([(4, ON), (5, None), (6, 0)], "ok"),  # of a root port it is harmless: traffic of a switch does not pass it
        ([(4, None), (6, None)], "ok"),
    ],
)
def test_access_control_that_redirects_gpudirect(
    tmp_path: Path, ports: list[tuple[int, int | None]], status: str
) -> None:
    folder = tmp_path / "devices" / "pci0000:15"
    for number, (kind, acs) in enumerate(ports):
        folder = folder / f"0000:1{5 + number}:01.0"
        folder.mkdir(parents=True)
        (folder / "config").write_bytes(bridge(kind, acs))
    device = folder / "0000:18:00.0"
    device.mkdir()
    (device / "vendor").write_text("0x10de\n", "ascii")
    (device / "class").write_text("0x030200\n", "ascii")
    listed = tmp_path / "bus"
    listed.mkdir()
    (listed / device.name).symlink_to(device)
    (found,) = fabric.access_control(listed)
    assert found.status == status
    (folder / "config").write_bytes(bridge(*ports[-1])[:64])  # what others than root can read
    assert next(iter(fabric.access_control(listed))).status == "skip"


# -- RoCE ------------------------------------------------------------------------------------------------------------

V2 = ("0000:0000:0000:0000:0000:ffff:0a0c:0015", "RoCE v2")


def test_roce_addresses_and_packet_sizes(tmp_path: Path) -> None:
    """Files as of drivers/infiniband/core/sysfs.c; the GIDs are those of NVIDIA/nccl issue 1510."""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    net = tmp_path / "net" / "net1"
    local = "fe80:0000:0000:0000:9cbb:b7ff:feb3:937a"
    gids = {
        "0": (local, "IB/RoCE v1"), "1": (local, "RoCE v2"), "2": (V2[0], "IB/RoCE v1"), "3": V2,
        "4": (fabric.EMPTY_GID, ""),
    }  # fmt: skip
    for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / name).mkdir(parents=True)
    net.mkdir(parents=True)
    for index, (gid, kind) in gids.items():
        (port / "gids" / index).write_text(f"{gid}\n", "ascii")
        (port / "gid_attrs" / "types" / index).write_text(f"{kind}\n", "ascii")
        (port / "gid_attrs" / "ndevs" / index).write_text("net1\n", "ascii")
    (net / "mtu").write_text("9000\n", "ascii")

    def found(**user: str) -> dict[str, str]:
        ports = [Port("mlx5_0/1", "ACTIVE", 25, "Ethernet")]
        return said(fabric.check_roce(ports, ROCE, user, tmp_path / "infiniband", tmp_path / "net"))

    assert found() == {}  # the profile has index 3
    assert found(NCCL_IB_GID_INDEX="2") == {"fail RoCE mlx5_0/1": "GID 2 is of IB/RoCE v1, not RoCE v2"}
    assert found(NCCL_IB_GID_INDEX="4") == {"fail RoCE mlx5_0/1": "GID 4 is empty"}
    assert "warn RoCE mlx5_0/1" in found(NCCL_IB_GID_INDEX="1")
    (net / "mtu").write_text("1500\n", "ascii")
    assert "1500" in found()["warn RoCE mlx5_0/1"]
    assert said(fabric.check_roce([], H100, {})) == {}


# -- Ethernet --------------------------------------------------------------------------------------------------------


def interface(network: Path, name: str, *, speed: str = "", state: str = "up", **entries: str) -> None:
    """An interface as Documentation/ABI/testing/sysfs-class-net has it; hardware unless it stands on others."""
    (network / name).mkdir(parents=True)
    (network / name / "operstate").write_text(f"{state}\n", "ascii")
    if speed:
        (network / name / "speed").write_text(f"{speed}\n", "ascii")
    for entry, target in (entries or {"device": "."}).items():
        (network / name / entry).symlink_to(network / target)


@pytest.mark.parametrize(
    ("names", "value", "used"),
    [
        ("eth0 lo docker0 virbr0", "", "eth0"),
        ("eth0 ib0 lo", "", "ib0"),
        ("docker0 lo", "", "docker0"),
        ("lo", "", "lo"),
        ("eth0 eth1 ens1", "eth", "eth0 eth1"),
        ("eth1 eth10", "=eth1", "eth1"),
        ("eth0 eth1 lo", "^lo,eth1", "eth0"),
        ("eth1 eth10", "^=eth1", "eth10"),
        ("eth0 eth1", "eth1:4000", "eth1"),
        ("eth0", "ens", ""),
    ],
)
def test_interfaces_are_those_that_nccl_selects(names: str, value: str, used: str) -> None:
    assert ethernet.choose(names.split(), value)[0] == used.split()


def test_ethernet_links_are_compared_with_the_profile(tmp_path: Path) -> None:
    interface(tmp_path, "ens1", speed="100000")
    interface(tmp_path, "ens2", speed="10000")
    interface(tmp_path, "ens3", speed="-1")
    interface(tmp_path, "ens4", speed="100000", state="down")
    interface(tmp_path, "vlan5", speed="100000", lower_ens1="ens1")
    interface(tmp_path, "veth6", speed="10000", lower="lo")
    interface(tmp_path, "br7", lower_veth6="veth6", lower_ens2="ens2")

    def check(*addressed: str, several: bool = True, choice: str = "^docker,lo") -> list[Finding]:
        environment = {"NCCL_SOCKET_IFNAME": choice}
        findings = ethernet.check_ethernet(ETHERNET, several, environment, addressed, tmp_path)
        return list(findings)

    def status(*addressed: str, choice: str = "^docker,lo") -> str:
        return check(*addressed, choice=choice)[0].status

    assert status("ens1", "lo") == "ok"
    assert status("vlan5") == "ok"
    (slow,) = check("ens2")
    assert slow.status == "fail"
    assert all(word in slow.what for word in ("ens2 1.25 GB/s", "12.4 GB/s"))
    assert status("br7") == "fail"  # that of ens2, not the 10 Gb/s that every veth claims
    assert status("ens1", "ens2") == "warn"
    assert status("ens1", "ens2", choice="ens1") == "ok"
    assert status("ens3") == status("ens1", "ens3") == status("veth6") == "skip"
    assert status("ens4") == status() == "fail"
    assert check("ens2", several=False) == []
    for profile in (H100, LAPTOP, None):
        assert list(ethernet.check_ethernet(profile, True, {}, ["ens2"], tmp_path)) == []


# -- several nodes, and storage --------------------------------------------------------------------------------------


def test_versions_that_differ_between_nodes(tmp_path: Path) -> None:
    def on(node: str, **changes: str) -> Finding:
        versions = {"torch": "2.13.0+cu130", "nvidia-nccl-cu13": "2.28.3", "driver": "580.95.05"} | changes
        return replace(ok("software", "; ".join(f"{name} = {text}" for name, text in versions.items())), node=node)

    assert list(nodes.differing([on("n1"), on("n2")])) == []
    odd = on("n3", **{"driver": "535.104.05", "nvidia-nccl-cu13": "2.27.5"})
    found = list(nodes.differing([on("n1"), on("n2"), odd]))
    assert {(each.node, each.status) for each in found} == {("n3", "warn"), ("n3", "fail")}
    assert "driver 535.104.05, but 580.95.05 on 2 of 3 nodes" in said(found)["warn software"]
    for adapter, version in (("mlx5_0", "28.39.1002"), ("mlx5_1", "28.39.1002"), ("mlx5_2", "28.36.1010")):
        (tmp_path / adapter).mkdir()
        (tmp_path / adapter / "fw_ver").write_text(f"{version}\n", "ascii")
    assert nodes.firmware(tmp_path) == ["28.36.1010", "28.39.1002"]
    own = nodes.inventory({"torch": "2.13.0"}, None)
    assert "torch = 2.13.0" in own.what and "Linux = " in own.what


def test_a_shared_file_system_that_is_nearly_full_or_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(examine.check_directory(tmp_path, "runs", measured=True)).keys() <= {
        "warn runs speed",
        "warn runs files",
    }
    monkeypatch.setattr(examine, "_file_system", lambda _: "lustre")
    monkeypatch.setattr(
        examine.shutil, "disk_usage", lambda _: examine.shutil._ntuple_diskusage(900 * GIB, 870 * GIB, 30 * GIB)
    )
    assert "97% full" in said(examine.check_directory(tmp_path, "runs"))["warn runs"]
    monkeypatch.setattr(examine, "FILES_SECONDS", 0.0)
    assert "100 small files" in said(examine.check_directory(tmp_path, "runs", measured=True))["warn runs files"]
