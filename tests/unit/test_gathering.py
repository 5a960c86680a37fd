"""Which nodes of an elastic run train, which wait, and when the run ends for more of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from llmrecipes.errors import ExitCode
from llmrecipes.launch import gathering
from llmrecipes.launch.gathering import GatheredNode, gathered
from llmrecipes.launch.local.processes import reserved_port
from llmrecipes.launch.ranks import Node
from tests.refusals import refused

TOKEN = b"t" * 32
MOST = 4
SECONDS = 60.0


class Nodes:
    """Nodes of one run, each in a thread; `answers` has those of the others, by their numbers."""

    def __init__(self, port: int) -> None:
        self.port, self.logs = port, list[str]()
        self.answers: Queue[tuple[int, GatheredNode]] = Queue()
        self.growing, self.ended = threading.Event(), threading.Event()
        self.first: Queue[GatheredNode] = Queue()
        self.code = 0

    def lead(self, counts: tuple[int, ...], join_seconds: float) -> threading.Thread:
        def run() -> None:
            with self._gathered(0, counts, join_seconds) as start:
                self.first.put(start)
                assert self.ended.wait(SECONDS)
                start.code = self.code

        return self._thread(run)

    def come(self, number: int) -> None:
        def run() -> None:
            with self._gathered(number, (1,), 0) as start:
                self.answers.put((number, start))

        self._thread(run)

    def answer(self) -> tuple[int, GatheredNode]:
        return self.answers.get(timeout=SECONDS)

    def _gathered(self, number: int, counts: tuple[int, ...], join_seconds: float):  # type: ignore[no-untyped-def]
        node = Node(number, MOST, "127.0.0.1", self.port)
        return gathered(node, counts, TOKEN, join_seconds=join_seconds, grow=self.growing.set, log=self.logs.append)

    def _thread(self, run) -> threading.Thread:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(gathering, "ALIVE_SECONDS", 0.2)
    with reserved_port() as port:
        yield Nodes(port)


def test_all_that_come_train_by_the_order_of_their_numbers(nodes: Nodes) -> None:
    leading = nodes.lead((2, 3), SECONDS)
    nodes.come(3)
    nodes.come(1)
    here = dict(nodes.answer() for _ in range(2))
    numbered = {number: (start.node.number, start.node.nodes) for number, start in here.items() if start.node}
    assert numbered == {1: (1, 3), 3: (2, 3)}, "three of four are as many as the run can use: no wait for the fourth"
    first = nodes.first.get(timeout=SECONDS)
    assert first.node == Node(0, 3, "127.0.0.1", nodes.port)
    nodes.ended.set()
    leading.join(SECONDS)


def test_a_node_too_many_waits_and_ends_as_the_run(nodes: Nodes) -> None:
    nodes.lead((1, 2, 4), 2.0)
    for number in (1, 2):
        nodes.come(number)
    (number, member) = nodes.answer()
    assert member.node is not None and member.node.nodes == 2
    nodes.code = 93
    nodes.ended.set()
    (other, start) = nodes.answer()
    assert {number, other} == {1, 2}
    assert (start.node, start.code) == (None, 93)


def test_the_run_ends_for_nodes_with_which_it_can_grow(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GROW_SECONDS", 0.0)
    nodes.lead((1, 2, 4), 0.0)
    first = nodes.first.get(timeout=SECONDS)
    assert first.node is not None and first.node.nodes == 1
    assert not nodes.growing.is_set()
    nodes.come(2)
    assert nodes.growing.wait(SECONDS)
    nodes.code = int(ExitCode.REQUEUE)
    nodes.ended.set()
    assert nodes.answer() == (2, GatheredNode(None, int(ExitCode.REQUEUE)))


def test_a_node_without_the_first_one_ends_so_that_pods_start_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "FIRST_NODE_SECONDS", 0.5)
    node = Node(1, MOST, "127.0.0.1", nodes.port)
    with (
        refused(f"127.0.0.1:{nodes.port + 1}", code=ExitCode.REQUEUE),
        gathered(node, (1,), TOKEN, join_seconds=0, grow=nodes.growing.set, log=nodes.logs.append),
    ):
        pass
