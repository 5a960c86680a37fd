"""The doctor on damaged outputs, files and programs: it neither crashes, nor passes a node that it could not check, nor
drains a healthy one."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli.app import run
from llmrecipes.doctor import examine, fabric, gpus, nodes
from llmrecipes.doctor.check_result import Finding
from llmrecipes.hardware import nvidia
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.nics import ports
from llmrecipes.launch import rendezvous
from tests.refusals import has_token, refused
from tests.unit.test_doctor import adapter, report, said
from tests.unit.test_doctor_hardware import KMSG

H100, ROCE = load_profile("h100-ib"), load_profile("a100-roce")
LINKS = "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))
NVLINKS = "".join(f"GPU {gpu}: NVIDIA H100 (UUID: GPU-1)\n{LINKS}" for gpu in range(8))
SEEDS = range(60)
TOKEN = b"the secret of one job"


def connected(port: int) -> socket.socket:
    """A connection to a program that is about to listen."""
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), 30)
        time.sleep(0.01)


def mangled(text: str, seed: int) -> str:
    """The text cut off, with bytes that are no UTF-8, values replaced, or lines lost, doubled and swapped."""
    chance = random.Random(seed)
    data = bytearray(text.encode())
    for _ in range(chance.randrange(1, 4)):
        at, kind = chance.randrange(max(len(data), 1)), chance.randrange(5)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at : at + 1] = bytes([chance.choice((0, 0x1B, 0x80, 0xFF, 0x3C, 0x26))])
        elif kind == 2:
            word = chance.choice(("N/A", "[GPU is lost]", "-1", "1e999", "²", "..", "9" * 400, ""))
            data[at : at + chance.randrange(1, 20)] = word.encode()
        else:
            lines = data.split(b"\n")
            number = chance.randrange(len(lines))
            lines[number : number + 1] = [] if kind == 3 else [lines[number]] * 2
            data = bytearray(b"\n".join(lines))
    return data.decode("utf-8", "replace")


def findings_of_gpus(text: str) -> list[Finding]:
    try:
        return list(gpus.check(gpus.parse(text)[1], H100))
    except gpus.UnreadableReport as error:
        return [gpus.unreadable(text, error, H100)]


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_outputs_of_programs_are_findings(seed: int) -> None:
    found = findings_of_gpus(mangled(report(), seed))
    assert found
    list(gpus.check_nvlink(gpus.parse_nvlink(mangled(NVLINKS, seed)), H100))
    list(gpus.check_kernel_log(mangled(KMSG, seed).splitlines(), 8000.0))
    list(examine.check_versions({"torch": "2.13.0"}, mangled("580.95.05", seed), 8, {}, mangled("13.0", seed)))


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files_of_the_kernel_are_findings(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for number in range(8):
        adapter(tmp_path, f"mlx5_{number}", counters={"symbol_error": 1, "link_downed": 0})
    files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    for file in chance.sample(files, 3):
        file.write_bytes(mangled(file.read_text("ascii"), chance.randrange(1000)).encode("latin-1", "replace"))
    chance.choice(files).unlink(missing_ok=True)
    for profile in (H100, ROCE, None):
        list(fabric.check(ports(tmp_path), profile, {}))
        list(fabric.check_roce(ports(tmp_path), profile, {}, tmp_path, tmp_path))


def test_a_report_that_is_cut_off_is_no_pass() -> None:
    whole = report()
    for length in (0, 1, len(whole) // 2, len(whole) - 3):
        with pytest.raises(gpus.UnreadableReport) as caught:
            gpus.parse(whole[:length])
        assert gpus.unreadable(whole[:length], caught.value, H100).status == "fail"
        assert gpus.unreadable(whole[:length], caught.value, None).status == "warn"


def test_what_is_beside_a_report_does_not_fail_a_node() -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:1B:00.0"
    text = f'<?xml version="1.0" ?>\n{report()}\n{warning}\n'
    assert said(gpus.check(gpus.parse(text)[1], H100)) == {}
    assert said(gpus.damaged(text)) == {"warn GPUs": warning}


def test_another_jobs_process_does_not_make_the_report_unreadable() -> None:
    process = "<process_info><pid>N/A</pid><process_name>a <b> & \x1b[0m c</process_name></process_info>"
    _, states = gpus.parse(report({"processes": process}))
    assert said(gpus.check(states, H100)) == {}


def test_an_xid_of_a_gpu_that_was_reset_or_is_another_jobs_does_not_fail_the_node() -> None:
    log, now = KMSG.splitlines(), 7_980.0
    assert "fail kernel log" in said(gpus.check_kernel_log(log, now))
    assert set(said(gpus.check_kernel_log(log, now, {"0000:18:00"}))) == {"warn kernel log"}
    assert nvidia.pci_address("00000000:1B:00.0") == "0000:1b:00.0"
    action = "<gpu_recovery_action>Drain and Reset</gpu_recovery_action>"
    asks = report().replace("<product_name>", f"{action}<product_name>", 1)
    assert "Drain and Reset" in said(gpus.check(gpus.parse(asks)[1], H100))["fail gpu 0"]


def test_bridges_between_some_gpus_do_not_fail_a_site_without_nvlink() -> None:
    links = [(4, 4), (4, 4), (0, 4), (0, 4)]
    assert [each.status for each in gpus.check_nvlink(links, load_profile("ethernet"))] == ["warn", "warn"]
    assert [each.status for each in gpus.check_nvlink(links, H100)] == ["fail", "fail"]
    assert list(gpus.check_nvlink(links, H100, own_gpus={0, 1})) == []


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a program in place of nvidia-smi."""

    def make(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n", "ascii")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


def test_a_driver_in_which_nothing_dies_is_not_waited_for(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a driver that hangs, nvidia-smi is in the kernel and SIGKILL has no effect."""
    program("exec sleep 20")
    started: list[subprocess.Popen[bytes]] = []

    def kill(process: subprocess.Popen[bytes]) -> None:
        started.append(process)

    real = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        nvidia.report("-q", "-x", timeout=0.2)
    assert time.monotonic() - began < 10
    real(started[0])
    started[0].wait()


def test_bytes_that_are_no_text_and_a_damaged_inforom_are_reports(program: Callable[[str], None]) -> None:
    program(r"printf 'name \377\n'; exit 14")
    assert nvidia.report("-q", timeout=20) == "name �\n"
    program("exit 15")
    with pytest.raises(subprocess.CalledProcessError):
        nvidia.report("-q", timeout=20)


@pytest.mark.parametrize("script", [r"printf '\377<gpu'", "kill -9 $$"])
def test_a_node_whose_driver_says_nothing_useful_fails(
    script: str, program: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(script)
    words = ["--cluster", "h100-ib", "--json", "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)]
    assert run(["doctor", *words]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [each["status"] for each in found if each["check"] == "GPUs"] == ["fail"]


def test_names_that_dns_does_not_permit_are_a_finding() -> None:
    assert fabric.check_name("n" * 64, several=True).status == "fail"
    assert fabric.check_name("n" * 64, several=False).status == "warn"


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_folder_of_a_server_that_is_gone_fails_and_is_not_taken_for_its_parent(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gone = Path.stat, tmp_path / "mount"

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.is_relative_to(gone):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert [each.status for each in examine.check_directory(gone / "runs", "runs")] == ["fail"]


def test_mount_points_with_unusual_names(tmp_path: Path) -> None:
    (tmp_path / "a b\\c é").mkdir()
    mounts = tmp_path / "mounts"
    lines = (b"/dev/sda1 / ext4 rw 0 0", b"x /mnt/\xff\\xzz nfs rw 0 0", b"short")
    here = str(tmp_path / "a b\\c é").replace("\\", r"\134").replace(" ", r"\040")
    mounts.write_bytes(b"\n".join((*lines, f"fs {here} lustre rw 0 0".encode())))
    assert examine._file_system(tmp_path / "a b\\c é" / "runs", mounts) == "lustre"
    assert examine._file_system(tmp_path, mounts) == "ext4"


def test_a_first_node_that_cannot_write_does_not_fail_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    meeting = nodes.NodeRendezvous(("n0", "n1"), 1, 12000, tmp_path / "file" / "runs", b"")
    mark = nodes._write_mark(meeting)
    assert [each.status for each in nodes._shared(meeting, mark)] == ["skip"]


def test_a_linux_of_any_name(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_bytes(b"NVRM version: NVIDIA UNIX Open Kernel Module \xff\n")
    for release, kernel_version in (("6", (6, 0)), ("6.8.0-rc1+", (6, 8)), ("custom", (0, 0))):
        assert fabric.support(tmp_path, driver, release).kernel == kernel_version


NUMBERED = [
    b'{"number": %s, "ports": [], "findings": []}\n' % number for number in (b'"x"', b"0", b"1", b"7", b"1e999")
]
STRANGERS = [
    b"\xff\xfe\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"[]\n",
    b"[" * 100000 + b"\n",
    b"[" * (8 << 20),
    b"\n",
    *NUMBERED,
]


def test_strangers_at_the_first_nodes_port_are_ignored_and_counted(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are silent: they take all places in which nodes are authenticated."""
    hosts = ("127.0.0.1", "127.0.0.2")
    failed: list[object] = []
    met: dict[int, nodes.GatheredFindings] = {}
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "MOST_PENDING", 4)

    def take_part(number: int) -> None:
        met[number] = nodes.meet(nodes.NodeRendezvous(hosts, number, unused_port, tmp_path, TOKEN, 60), [])

    first = threading.Thread(target=take_part, args=(0,))
    first.start()
    with ExitStack() as stack:
        for words in STRANGERS:
            stranger = stack.enter_context(connected(unused_port))
            with suppress(ConnectionResetError, BrokenPipeError):
                stranger.sendall(words)
                while stranger.recv(1 << 10):
                    pass
        for _ in range(6):
            stack.enter_context(connected(unused_port))
        with refused(f"127.0.0.1:{unused_port}"):
            nodes.meet(nodes.NodeRendezvous(hosts, 1, unused_port, tmp_path, b"of another job", 0.1), [])
        take_part(1)
    first.join(60)
    assert (met[0].bad, met[1].bad, failed) == ([], [], [])
    [ignored] = [finding for finding in met[0].findings or [] if finding.check == "rendezvous"]
    assert (ignored.status, ignored.node) == ("warn", hosts[0])
    assert int(ignored.what.split()[1]) >= len(STRANGERS) + 5


def test_no_node_can_say_that_another_one_is_bad(tmp_path: Path, unused_port: int) -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    met: dict[int, nodes.GatheredFindings] = {}

    def take_part(number: int) -> None:
        own = [Finding("gpu 0", "fail", "lost", "", hosts[0])] * number
        met[number] = nodes.meet(nodes.NodeRendezvous(hosts, number, unused_port, tmp_path, TOKEN, 60), own)

    threads = [threading.Thread(target=take_part, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (met[0].bad, met[1].bad) == ([hosts[1]], [hosts[1]])


def test_the_first_node_names_those_that_it_waits_for(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SECONDS_BETWEEN_LINES", 0.01)
    hosts = ("127.0.0.1", "127.0.0.2")
    lines: list[str] = []
    waiting = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        waiting.set()

    meeting = nodes.NodeRendezvous(hosts, 0, unused_port, tmp_path, TOKEN, 60, log)
    first = threading.Thread(target=nodes.meet, args=(meeting, []))
    first.start()
    assert waiting.wait(60)
    nodes.meet(nodes.NodeRendezvous(hosts, 1, unused_port, tmp_path, TOKEN, 60), [])
    first.join(60)
    assert has_token(lines[0], hosts[1]) and has_token(lines[0], "1 of 2")
    assert not first.is_alive()


REPORTS: list[dict[str, Any]] = [
    {},
    {"findings": 1},
    {"findings": [{"check": 1, "status": [], "what": {}}]},
    {"findings": [{"check": "gpu", "status": "bad", "what": "x"}]},
    {"findings": [{"check": "gpu", "status": "fail", "what": "x", "node": 7}]},
]


def test_nodes_of_another_version_have_not_reported(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tuple(f"127.0.0.{number + 1}" for number in range(len(REPORTS) + 1))
    met: list[nodes.GatheredFindings] = []
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    meeting = nodes.NodeRendezvous(hosts, 0, unused_port, tmp_path, TOKEN, 1)
    first = threading.Thread(target=lambda: met.append(nodes.meet(meeting, [])))
    first.start()
    with ExitStack() as stack:
        channels = [
            stack.enter_context(rendezvous.joined(hosts, number, unused_port, TOKEN, 30))
            for number in range(1, len(hosts))
        ]
        for channel in channels:
            channel.send({})
            assert {"time", "mark"} <= channel.receive(30).keys()
        for channel, report in zip(channels, REPORTS, strict=True):
            assert channel.receive(30) == {"go": True}
            channel.send(report)
        first.join(30)
    absent = [finding.node for finding in met[0].findings or [] if finding.check == "node"]
    assert (absent, failed) == (list(hosts[1:]), [])
