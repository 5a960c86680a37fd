"""`llmrecipes bench fabric`: perftest's programs are doubles here; tests/fabric runs the real ones over soft-RoCE."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from llmrecipes.bench.fabric import perftest
from llmrecipes.bench.fabric.meeting import FabricRendezvous, Outcome, meet, require_sensible
from llmrecipes.bench.fabric.node import Limits
from llmrecipes.bench.fabric.transfers import Report, Transfer, judge, rounds
from llmrecipes.cli.app import run
from llmrecipes.cli.benchmarking import fabric_report
from llmrecipes.doctor.check_result import Finding, fail
from llmrecipes.hardware import nics
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.nics import Port
from llmrecipes.launch import rendezvous
from llmrecipes.launch.rendezvous import joined
from tests.refusals import refused, require_message

IB = load_profile("h100-ib")
SECRET = b"the secret of one job"
HEAD = """\
---------------------------------------------------------------------------------------
                    Send Latency Test
 Dual-port       : OFF		Device         : rxe0
 GID index       : 1
 Data ex. method : Ethernet
---------------------------------------------------------------------------------------
"""
LATENCY = (
    HEAD
    + """\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 8       200          187.98         23369.38      3567.61  	       4508.08     	4234.97		22685.00 		23369.38
---------------------------------------------------------------------------------------
"""  # noqa: E501
)
BANDWIDTH = (
    HEAD
    + """\
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      679              0.00               0.12   		   0.000226
---------------------------------------------------------------------------------------
"""
)
DOUBLE = """\
#!{python} -IS
import os, socket, sys, time
words = sys.argv[1:]
tcp, device = (words[words.index(option) + 1] for option in ("-p", "-d"))
peer = words[-1] if words[-1].startswith("127.") else None
if peer is None:
    connection = socket.create_server(("", int(tcp))).accept()[0]
    if device == "cut0":
        time.sleep(60)
    connection.sendall(b"x")
else:
    connection = socket.create_connection((peer, int(tcp)))
    if device == "cut0" or connection.recv(1) != b"x":
        time.sleep(60)
mark = sys.argv[0] + ".busy"
if peer is not None and os.path.exists(mark):
    os.remove(mark)
    print("Correlation coefficient r^2: 0.31 < 0.9", file=sys.stderr)
    print({output!r}.replace("3567.61", "inf"), end="")
else:
    print({output!r}, end="")
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles of perftest that print what the real ones did; over the device cut0 nothing arrives."""
    for name, output in (("ib_send_lat", LATENCY), ("ib_write_bw", BANDWIDTH)):
        program = tmp_path / name
        program.write_text(DOUBLE.format(python=sys.executable, output=output))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def port(device: str, state: str = "ACTIVE", **counters: int) -> Port:
    return Port(f"{device}/1", state, 50.0, "InfiniBand", counters)


def meet_all(
    tcp: int, count: int, *, here: int | None = None, limit: float = 20, patience: float = 20
) -> list[Outcome]:
    """The outcome of each node; all are threads of this process, and addresses of this machine.

    Args:
        tcp: port of the first node.
        count: nodes of the job.
        here: of these, how many there are.
        limit, patience: seconds.
    """
    hosts = tuple(f"127.0.0.{number}" for number in range(1, count + 1))
    found: dict[int, Outcome] = {}

    def take_part(number: int) -> None:
        found[number] = meet(FabricRendezvous(hosts, number, tcp, patience, Limits(3, limit), SECRET), None)

    threads = [threading.Thread(target=take_part, args=(n,), name=hosts[n]) for n in range(here or count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[number] for number in range(len(threads))]


def ports_of(monkeypatch: pytest.MonkeyPatch, found: Callable[[str], list[Port]]) -> None:
    """Each node's ports, by its host name (the first one takes part in a thread of its own)."""

    def own() -> list[Port]:
        name = threading.current_thread().name
        return found(name if name.startswith("127.") else "127.0.0.1")

    monkeypatch.setattr(nics, "ports", own)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 2048])
def test_all_nodes_measure_at_once_in_a_few_rounds(count: int) -> None:
    numbers = [10 + number for number in range(count)]
    found = rounds(numbers)
    assert len(found) <= 4
    for _, pairs in found:
        assert max(Counter(number for pair in pairs for number in pair).values()) == 1
    ring = [pair for kind, pairs in found if kind == "neighbours" for pair in pairs]
    assert sorted(sender for sender, _ in ring) == sorted(receiver for _, receiver in ring) == numbers
    assert rounds([7]) == rounds([]) == []


def test_output_of_perftest_on_soft_roce() -> None:
    found = perftest.parse("latency", LATENCY)
    assert found == perftest.PerftestResult(latency_us=3567.61, latency_99_us=22685.0)
    bandwidth = perftest.parse("bandwidth", BANDWIDTH)
    assert bandwidth is not None and bandwidth.gb_per_s == pytest.approx(0.0148, rel=0.01)
    assert perftest.parse("bandwidth", HEAD) is None
    assert perftest.parse("latency", f"{HEAD} #bytes #iterations\n Completion with error\n") is None
    busy = LATENCY.replace("3567.61", "inf").replace("22685.00", "inf")
    assert perftest.parse("latency", busy) is None
    assert perftest.parse("bandwidth", BANDWIDTH.replace("0.000226", "0.000000")) is None
    assert perftest.failure(f"Correlation coefficient r^2: 0.31 < 0.9\n{busy}") == perftest.NO_CLOCK
    refusal = "Couldn't connect to 10.9.0.1:18600\nUnable to open file descriptor for socket connection\n----\n"
    assert perftest.failure(refusal).startswith("Unable to open file descriptor")


def test_a_port_is_measured_at_its_address_and_on_the_cores_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roce = perftest.Local(Port("mlx5_3/2", "ACTIVE", 25.0, "Ethernet"), 3)
    words = perftest.command("bandwidth", roce, 5, 4000, "n1")
    options = "-d mlx5_3 -i 2 -x 3 -p 4000 -s 65536 -D 5"
    assert options in " ".join(words) and words[-1] == "n1"
    lossless = perftest.command("latency", perftest.Local(roce.port, 3, "106", "1"), 5, 4000, None)
    assert {"--tclass=106", "-S", "1"} <= set(lossless)
    plain = perftest.command("latency", perftest.Local(port("mlx5_3"), None), 5, 4000, None)
    assert plain[0] == "ib_send_lat" and "-x" not in plain
    (tmp_path / "mlx5_3/device").mkdir(parents=True)
    (tmp_path / "mlx5_3/device/local_cpulist").write_text("4-7,12\n")
    monkeypatch.setattr(perftest, "allowed_cpus", lambda: {0, 5, 6})
    assert perftest._near(roce.port, tmp_path) == ["taskset", "--cpu-list", "5-6"]
    monkeypatch.setattr(perftest, "allowed_cpus", lambda: {0})
    assert perftest._near(roce.port, tmp_path) == []


@pytest.mark.usefixtures("programs")
def test_ports_of_the_same_place_are_measured_with_each_other(
    unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(host: str) -> list[Port]:
        return [port("mlx5_0"), port("mlx5_1", "DOWN" if host == "127.0.0.2" else "ACTIVE"), port("mlx5_2")]

    ports_of(monkeypatch, found)
    first, second = meet_all(unused_port, 2)
    assert first.report is not None and second.report is None
    rails = [(transfer.sender, transfer.sender_port, transfer.receiver_port) for transfer in first.report.transfers]
    names = ("mlx5_0/1", "mlx5_2/1")
    assert rails == [(host, name, name) for host in ("127.0.0.1", "127.0.0.2") for name in names]
    for each in first.report.transfers:
        assert (each.latency_us, each.error) == (3567.61, "")
        assert each.gb_per_s == pytest.approx(0.0148, rel=0.01)
    assert [(finding.node, finding.check) for finding in first.report.findings] == [("127.0.0.2", "adapter mlx5_1/1")]


@pytest.mark.usefixtures("programs")
def test_a_node_that_was_too_busy_to_measure_is_measured_again(
    unused_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine of `make test-fabric`: perftest ended well, with a latency of inf and 0 GB/s."""
    (tmp_path / "ib_send_lat.busy").touch()
    ports_of(monkeypatch, lambda _: [port("mlx5_0")])
    report = meet_all(unused_port, 2)[0].report
    assert not (tmp_path / "ib_send_lat.busy").exists()
    assert report is not None and [transfer.latency_us for transfer in report.transfers] == [3567.61] * 2
    assert all(transfer.gb_per_s is not None and not transfer.error for transfer in report.transfers)


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_a_transfer_that_never_ends_is_ended_and_the_right_end_is_named(
    unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a pulled cable: soft-RoCE sends again without end, and perftest waits."""
    ports_of(monkeypatch, lambda host: [port("cut0" if host == "127.0.0.3" else "mlx5_0")])
    started = time.monotonic()
    outcomes = meet_all(unused_port, 3, limit=4)
    assert time.monotonic() - started < 60
    assert [outcome.bad for outcome in outcomes] == [["127.0.0.3"]] * 3
    report = outcomes[0].report
    assert report is not None
    failed = [finding for finding in report.findings if finding.status == "fail"]
    assert [(each.node, each.check) for each in failed] == [("127.0.0.3", "adapter cut0/1")]
    worked = {(transfer.sender, transfer.receiver) for transfer in report.transfers if not transfer.error}
    assert worked == {("127.0.0.1", "127.0.0.2")}


@pytest.mark.usefixtures("programs")
def test_a_link_that_goes_down_meanwhile_is_named(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[str] = Counter()

    def found(host: str) -> list[Port]:
        looks[host] += 1
        later = looks[host] > 1
        return [port("mlx5_0", link_downed=2 + 3 * later * (host == "127.0.0.2"), symbol_error=5 * later)]

    ports_of(monkeypatch, found)
    report = meet_all(unused_port, 2)[0].report
    assert report is not None and report.bad_nodes == ["127.0.0.2"]
    flapped = next(finding for finding in report.findings if finding.status == "fail")
    assert "3 times" in flapped.what
    assert [finding.what.split()[-2:] for finding in report.findings if finding.status == "warn"] == [
        ["symbol_error", "5"]
    ] * 2


def test_a_node_that_never_appears_and_missing_programs(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ports_of(monkeypatch, lambda _: [port("mlx5_0")])
    monkeypatch.setenv("PATH", "/nowhere")
    report = meet_all(unused_port, 2, here=1, patience=1)[0].report
    assert report is not None and not report.transfers
    assert {(finding.node, finding.check) for finding in report.findings} == {
        ("127.0.0.1", "perftest"),
        ("127.0.0.2", "node"),
    }
    assert "ib_write_bw" in report.findings[0].what and "perftest" in report.findings[0].fix


def test_a_first_node_that_never_appears(unused_port: int) -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    with refused(f"127.0.0.1:{unused_port}"):
        meet(FabricRendezvous(hosts, 1, unused_port, 0.1, Limits(3, 5), SECRET), None)


def test_a_stranger_at_the_port_is_no_node(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends a byte now and then, and one without the secret that introduces itself as a node."""
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.5)
    ports_of(monkeypatch, lambda _: [])
    found: list[Report | None] = []
    hosts = ("127.0.0.1", "127.0.0.2")
    own = threading.Thread(
        target=lambda: found.append(meet(FabricRendezvous(hosts, 0, unused_port, 2, Limits(3, 5), SECRET), None).report)
    )
    own.start()
    cut_off = threading.Event()

    def drip() -> None:
        with connected(unused_port) as stranger, suppress(ConnectionError):
            while not cut_off.wait(0.05):
                stranger.sendall(b" ")
        cut_off.set()

    slow = threading.Thread(target=drip, daemon=True)
    slow.start()
    for word in (b"GET / HTTP/1.1\r\n\r\n", b'{"number": 1, "ports": [["mlx5_0", true]], "findings": []}\n'):
        with connected(unused_port) as made:
            made.sendall(word)
    own.join(30)
    assert found[0] is not None and cut_off.wait(30)
    assert [finding.node for finding in found[0].findings if finding.check == "node"] == ["127.0.0.2"]
    [ignored] = [finding for finding in found[0].findings if finding.check == "rendezvous"]
    assert (ignored.status, ignored.what.split()[1]) == ("warn", "3")


def connected(tcp: int) -> socket.socket:
    """A connection to a program that is about to listen."""
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", tcp), 30)
        time.sleep(0.01)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("answer", [{"findings": 1}, {"findings": [{"check": [1]}]}, {"listening": 7}, {"values": [1]}])
def test_a_node_that_answers_in_another_form_is_named(
    answer: dict[str, object], unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports_of(monkeypatch, lambda _: [port("mlx5_0")])
    hosts = ("127.0.0.1", "127.0.0.2")
    found: list[Outcome] = []
    meeting = FabricRendezvous(hosts, 0, unused_port, 30, Limits(3, 5), SECRET)
    first = threading.Thread(target=lambda: found.append(meet(meeting, None)))
    first.start()
    with joined(hosts, 1, unused_port, SECRET, 30) as channel, suppress(rendezvous.Disconnected):
        channel.send({"ports": [["mlx5_0/1", True]], "findings": []})
        while True:
            channel.receive(30)
            channel.send(answer)
    first.join(60)
    assert found[0].bad == ["127.0.0.2"]


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files", "programs")
def test_many_nodes_meet_although_few_files_may_be_open(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual soft limit is 1,024, and the first node has a connection from each."""
    ports_of(monkeypatch, lambda _: [port("mlx5_0")])
    hosts = tuple(f"n{number}" for number in range(200))
    found: list[Outcome] = []
    first = threading.Thread(
        target=lambda: found.append(meet(FabricRendezvous(hosts, 0, unused_port, 30, Limits(3, 5), SECRET), None))
    )
    first.start()
    with ExitStack() as stack:
        channels = []
        for number in range(1, len(hosts)):
            made = joined(("127.0.0.1", *hosts[1:]), number, unused_port, SECRET, 30)
            channels.append(stack.enter_context(made))
            channels[-1].send({"ports": [["mlx5_0/1", False]], "findings": []})
        for channel in channels:
            assert channel.receive(30) == {"do": "report"}
            channel.send({"findings": []})
        assert all(channel.receive(30) == {"bad": []} for channel in channels)
    first.join(30)
    assert found[0].report is not None
    assert (found[0].report.nodes, found[0].report.measured_nodes, found[0].bad) == (200, 1, [])


def transfer(sender: str, receiver: str, gb_per_s: float | None = 45.0, error: str = "") -> Transfer:
    return Transfer("neighbours", sender, "mlx5_0/1", receiver, "mlx5_0/1", 2.0, 3.0, gb_per_s, error)


def judged(transfers: list[Transfer], *known: Finding) -> set[tuple[str, str]]:
    return {(each.status, each.node) for each in judge(transfers, 50.0, "h100-ib", known)}


def test_a_port_is_slow_if_it_is_slow_with_both_neighbours() -> None:
    ring = [transfer("n1", "n2", 39.0), transfer("n2", "n3", 30.0), transfer("n3", "n1", 41.0)]
    assert judged(ring) == {("warn", "n2")}
    assert judged([transfer("n1", "n2", 41.0)]) == set()
    assert judge([transfer("n1", "n2", 1.0)], None, None, []) == []


def test_a_failure_is_blamed_on_the_port_that_failed_with_all() -> None:
    ring = [transfer("n1", "n2", None, "late"), transfer("n2", "n3", None, "late"), transfer("n3", "n1")]
    assert judged(ring) == {("fail", "n2")}
    between = [transfer("n1", "n2", None, "late"), transfer("n2", "n3"), transfer("n3", "n1")]
    assert judged(between) == {("fail", "n1")}
    down = Finding("adapter mlx5_0/1", "fail", "port went DOWN", "", "n2")
    assert judged([transfer("n1", "n2", None, "late"), transfer("n2", "n1", None, "late")], down) == set()
    assert judged([transfer("n1", "n2", 0.001)], down) == set()
    gone = Finding("node", "fail", "no answer", "", "n2")
    assert judged([transfer("n1", "n2", None, "late")], gone) == set()


def test_the_output_of_a_large_job_is_bounded() -> None:
    many = [transfer(f"n{number}", f"n{number + 1}", 40.0 + number / 1000) for number in range(2000)]
    found = [Finding(**{**fail("adapter mlx5_0/1", "broken", "").as_dict(), "node": f"n{n}"}) for n in range(500)]
    printed = "\n".join(map(str, fabric_report(Report("h100-ib", 50.0, 2000, 2000, many, found)))).splitlines()
    assert len(printed) < 70
    assert "40" in printed[2].split() and "80%" in printed[2].split()
    assert "500" in printed[-1].split() and "2000" in printed[-1].split()


def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "fabric"]) == 2
    require_message(capsys.readouterr().err, "--nodes", rule="--ntasks-per-node=1")
    assert run(["bench", "fabric", "--cluster", "ethernet", "--nodes", "n1,n2"]) == 2
    require_message(capsys.readouterr().err, "--cluster")
    with refused("--cluster"):
        require_sensible(("n1", "n2"), load_profile("aws-p5-efa"))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with refused("srun", rule="--ntasks-per-node=1"):
        require_sensible(("n1", "n2"), IB)


def test_receivers_of_one_node_listen_on_different_ports() -> None:
    assert len(set(perftest.free_ports(64))) == 64


def test_it_starts_without_torch() -> None:
    script = "import sys, llmrecipes.bench.fabric.meeting, llmrecipes.cli.benchmarking; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
