"""The nodes of a run that may start with fewer (`train.elastic`): who has come, and which of them train.

The first node decides. It waits for the others for a while, numbers as many as the run can use, and listens as long as
the run lasts. A node that comes later, or is one too many, waits beside the run. When enough of them wait for the next
size, the first node has the run saved and ended, so that all begin again together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch.ranks import Node
from llmrecipes.launch.rendezvous import Channel, Disconnected, FirstNode, joined

ALIVE_SECONDS = 5.0
"""Between messages to a node that waits, so that both sides notice when the other is gone."""
SILENT_SECONDS = 60.0
"""Without a message, after which the first node is gone."""
FIRST_NODE_SECONDS = 600.0
"""For which the other nodes wait for the first one; then they end, and leave their machines to it."""
GROW_SECONDS = 600.0
"""That a start lasts at least before it is ended for more nodes: a restart costs minutes of all of them."""
LINE_SECONDS = 60.0


@dataclass
class GatheredNode:
    """This node in this start. `node` is None for one that was not needed, which ends with `code`."""

    node: Node | None
    code: int = int(ExitCode.REQUEUE)
    """How the run ended, on the first node: set it in the block. Nodes that wait end alike."""


@contextmanager
def gathered(
    node: Node,
    counts: Sequence[int],
    token: bytes,
    *,
    join_seconds: float,
    grow: Callable[[], None],
    log: Callable[[str], None],
) -> Iterator[GatheredNode]:
    """Agree on the nodes of this start; the block is the run.

    Args:
        node: this one, among as many as there may be at most.
        counts: numbers of nodes that the run allows, ascending.
        token: secret of the job, the same on all nodes.
        join_seconds: for which the first node waits for the others; for the least of `counts` it waits on.
        grow: called in a thread of the first node, once, when enough nodes wait for a larger count.
        log: receives a line now and then.

    Raises:
        UserError: with `ExitCode.REQUEUE`: the first node does not come, or is lost.
    """
    port = node.master_port + 1
    hosts = (node.master_addr, *(f"node {number}" for number in range(1, node.nodes)))
    if node.number:
        yield _followed(node, hosts, port, token)
        return
    first = _First(node, counts, grow, log)
    with FirstNode(hosts, port, token, first.serve):
        run = GatheredNode(Node(0, first.number_nodes(join_seconds), node.master_addr, node.master_port))
        threading.Thread(target=first.watch, daemon=True).start()
        try:
            yield run
        finally:
            first.end(run.code)


class _First:
    """The first node: which others have come and wait, and which of them train."""

    def __init__(self, node: Node, counts: Sequence[int], grow: Callable[[], None], log: Callable[[str], None]) -> None:
        self._counts = counts
        self._grow = grow
        self._log = log
        self._most, self._first = node.nodes, node.master_addr
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._numbers: dict[int, int] | None = None
        """Of the others that train: their number in this start, by that among all; None: not decided."""
        self._ended: int | None = None

    def serve(self, number: int, channel: Channel) -> None:
        """Tell a node what to do, and until then that it has to wait; in a thread of its own."""
        with self._changed:
            self._waiting.add(number)
            self._changed.notify_all()
        try:
            answer: dict[str, int] = {}
            while not answer:
                with self._changed:
                    self._changed.wait_for(lambda: self._answer(number), ALIVE_SECONDS)
                    answer = self._answer(number)
                channel.send(answer)
        finally:
            with self._changed:
                self._waiting.discard(number)
                self._changed.notify_all()
        channel.close()

    def number_nodes(self, seconds: float) -> int:
        """Wait for the others, and decide which of them train; returns how many nodes that are with this one."""
        end = time.monotonic() + seconds
        line = time.monotonic() + LINE_SECONDS
        with self._changed:
            while (here := 1 + len(self._waiting)) < self._counts[-1]:
                now = time.monotonic()
                if now >= end and here >= self._counts[0]:
                    break
                if now >= line:
                    self._log(f"{here} of {self._most} nodes have joined; at least {self._counts[0]} are needed")
                    line = now + LINE_SECONDS
                self._changed.wait(min(ALIVE_SECONDS, max(0.01, end - now)) if now < end else ALIVE_SECONDS)
            size = self._largest(here)
            chosen = sorted(self._waiting)[: size - 1]
            self._numbers = {number: place for place, number in enumerate(chosen, 1)}
            self._changed.notify_all()
        self._log(f"{size} of {self._most} nodes train; {here - size} wait")
        return size

    def watch(self) -> None:
        """Call `grow` when enough nodes wait, but not soon after the start."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None, GROW_SECONDS)
            self._changed.wait_for(lambda: self._ended is not None or self._could_grow())
            if self._ended is not None:
                return
        self._log("more nodes have joined: saving the run and restarting with them")
        self._grow()

    def end(self, code: int) -> None:
        """Have the nodes that wait end as the run."""
        with self._changed:
            self._ended = code
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, ALIVE_SECONDS)

    def _answer(self, number: int) -> dict[str, int]:
        """What a node does now; empty: it waits."""
        if self._numbers is not None and number in self._numbers:
            return {"number": self._numbers[number], "nodes": len(self._numbers) + 1}
        return {} if self._ended is None else {"end": self._ended}

    def _could_grow(self) -> bool:
        size = 1 + len(self._numbers or ())
        more = self._waiting - (self._numbers or {}).keys()
        return self._largest(size + len(more)) > size

    def _largest(self, here: int) -> int:
        return max(count for count in self._counts if count <= here)


def _followed(node: Node, hosts: tuple[str, ...], port: int, token: bytes) -> GatheredNode:
    """What the first node has another one do."""
    try:
        with joined(hosts, node.number, port, token, FIRST_NODE_SECONDS) as channel:
            while not (answer := channel.receive(SILENT_SECONDS)):
                continue
            return _understood(node, answer)
    except UserError as error:
        # Not a mistake of the user: pods start again, the first one before the others.
        raise UserError(
            error.what, where=error.where, fix="see the log of the first node", code=ExitCode.REQUEUE
        ) from error


def _understood(node: Node, answer: dict[str, int]) -> GatheredNode:
    number, nodes, end = (answer.get(name) for name in ("number", "nodes", "end"))
    if isinstance(end, int):
        return GatheredNode(None, end if end in tuple(ExitCode) else int(ExitCode.REQUEUE))
    if not (isinstance(number, int) and isinstance(nodes, int) and 0 < number < nodes <= node.nodes):
        raise Disconnected("sent an unexpected answer")
    return GatheredNode(Node(number, nodes, node.master_addr, node.master_port))
