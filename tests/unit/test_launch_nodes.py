"""Which of several machines this is, and the ranks that it starts."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from llmrecipes.launch.local import run_ranks
from llmrecipes.launch.ranks import Node, Rank, node
from llmrecipes.launch.rendezvous import Channel, Disconnected, FirstNode, joined
from tests.refusals import refused

PROGRAM = """
import json, os, sys
from pathlib import Path
(Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
print("rank", os.environ["RANK"], flush=True)
"""


def test_options_say_it() -> None:
    assert node(4, 2, "node-0:29500", {}) == Node(2, 4, "node-0", 29500)
    assert node(2, 0, "[fd00::1]:29500", {}).master_addr == "fd00::1"


def test_a_pod_knows_it() -> None:
    job = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "run-0.run", "MASTER_PORT": "29500"}
    assert node(2, None, None, job) == Node(1, 2, "run-0.run", 29500)
    trainer = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-node-0-0.run", "PET_MASTER_PORT": "29400"}
    assert node(2, None, None, {**trainer, "JOB_COMPLETION_INDEX": "0"}) == Node(1, 2, "run-node-0-0.run", 29400)
    assert node(2, 0, "here:1", job) == Node(0, 2, "here", 1), "what is said wins"


@pytest.mark.parametrize(
    ("number", "rendezvous", "where"),
    [
        (None, "a:1", "--node-rank"),
        (2, "a:1", "--node-rank"),
        (-1, "a:1", "--node-rank"),
        (0, None, "--rdzv"),
        (0, "a", "--rdzv"),
        (0, ":1", "--rdzv"),
        (0, "a:99999", "--rdzv"),
        (0, "a:b", "--rdzv"),
    ],
)
def test_what_is_missing_or_wrong_is_named(number: int | None, rendezvous: str | None, where: str) -> None:
    with refused(where):
        node(2, number, rendezvous, {"JOB_COMPLETION_INDEX": "x"})


def test_ranks_count_over_the_nodes() -> None:
    assert Node(1, 3, "a", 7).ranks(2) == [Rank(2, 6, 0, 2, "a", 7), Rank(3, 6, 1, 2, "a", 7)]


def test_a_node_starts_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    here = Node(1, 2, "node-0", 29500)
    assert run_ranks("rank_program", [str(tmp_path)], world_size=4, threads=1, logs=tmp_path, node=here) == 0
    started = sorted(path.stem for path in tmp_path.glob("*.json"))
    assert started == ["2", "3"]
    found = json.loads((tmp_path / "3.json").read_text())
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"], found["WORLD_SIZE"]) == ("1", "2", "4")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node-0", "29500")
    assert "GLOO_SOCKET_IFNAME" not in found, "the other nodes are not on the loopback interface"
    assert capfd.readouterr().out == "rank 2\n"
    assert (tmp_path / "rank-3.log").read_text() == "rank 3\n"


# -- the rendezvous of a check's nodes ---------------------------------------------------------------------------------

HOSTS = ("127.0.0.1", "127.0.0.2")
SECRET = b"the secret of one job"


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """Both ends of an authenticated connection, and the raw socket of the second one."""
    ends = socket.socketpair()
    first, node = (Channel(end) for end in ends)
    first.secure(b"key", b"first", b"node")
    node.secure(b"key", b"node", b"first")
    yield first, node, ends[1]
    first.close()
    node.close()


def test_the_secret_is_never_sent_and_the_first_node_proves_that_it_has_it(unused_port: int) -> None:
    """Whoever listens on the port of the first node learns nothing, and gives no orders."""
    heard: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        with server.accept()[0] as connection, connection.makefile("rb") as stream:
            connection.sendall(b"llmrecipes 1 " + b"0" * 64 + b"\n")
            heard.append(stream.readline())
            connection.sendall(heard[0].split()[-1] + b"\n")  # its own proof, sent back

    with socket.create_server(("127.0.0.1", unused_port)) as server:
        impostor = threading.Thread(target=pretend, args=(server,))
        impostor.start()
        with refused(f"127.0.0.1:{unused_port}"):
            joined(HOSTS, 1, unused_port, SECRET, 0).__enter__()
        impostor.join(30)
    assert heard[0].startswith(b"1 ") and SECRET not in heard[0] and SECRET.hex().encode() not in heard[0]


def test_a_node_is_let_in_once_and_only_with_the_secret(unused_port: int) -> None:
    seen: list[int] = []
    done = threading.Event()

    def serve(number: int, channel: Channel) -> None:
        seen.append(number)
        channel.send({"time": 1})
        done.wait(30)

    with FirstNode((*HOSTS, "127.0.0.3"), unused_port, SECRET, serve) as first:
        with joined(HOSTS, 1, unused_port, SECRET, 30) as channel:
            assert channel.receive(30) == {"time": 1}
            for token, number in ((SECRET, 1), (SECRET, 0), (SECRET, 3), (SECRET + b"x", 2)):
                with refused(f"127.0.0.1:{unused_port}"):
                    joined(("127.0.0.1",) * 4, number, unused_port, token, 0).__enter__()
            done.set()
        assert (seen, first.ignored) == ([1], 4)


def test_messages_of_others_are_not_taken(channels: tuple[Channel, Channel, socket.socket]) -> None:
    first, node, raw = channels
    node.send({"number": 1})
    line = first.receive_line(1 << 10, 1)
    for sent in (line, line, line.replace(b"1}", b"2}")):
        raw.sendall(sent + b"\n")
    assert first.receive(1) == {"number": 1}
    for _ in ("a second time", "changed"):
        with pytest.raises(Disconnected):
            first.receive(1)
    first.send({"number": 1})
    raw.sendall(raw.recv(1 << 10))
    with pytest.raises(Disconnected):  # its own, sent back
        first.receive(1)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[]", b"{", b'"x"', b"\xff"])
def test_messages_that_are_none(text: bytes, channels: tuple[Channel, Channel, socket.socket]) -> None:
    first, _, raw = channels
    proof = hmac.new(b"key", b"node 0 " + text, hashlib.sha256).hexdigest().encode()
    raw.sendall(proof + b" " + text + b"\n")
    with pytest.raises(Disconnected):
        first.receive(5)


def test_one_byte_after_the_other_does_not_extend_a_wait(channels: tuple[Channel, Channel, socket.socket]) -> None:
    first, _, raw = channels
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            raw.sendall(b" ")

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with pytest.raises(Disconnected):
        first.receive(0.3)
    stop.set()
    dripping.join(30)
    assert time.monotonic() - began < 5


def test_a_long_line_is_not_kept(channels: tuple[Channel, Channel, socket.socket]) -> None:
    first, _, raw = channels

    def send() -> None:
        with suppress(OSError):
            raw.sendall(b"x" * (1 << 20))

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(Disconnected):
        first.receive_line(256, 30)
    first.close()
    sending.join(30)
    assert len(first._buffer) < 1 << 18
