"""Warm spares: a process beside each rank that has imported everything, and becomes the rank of the next start.

Imports are most of what a rank does between a fault and its first step. Spares start one after another when the ranks
have done their first step, import at the lowest priority, and then wait without using the processor or a GPU. One that
still imports, has ended, hangs or was stopped is replaced by a new process: its fault is not one of the run, and at the
lowest priority its imports may take minutes on a busy machine.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from llmrecipes.launch.ranks import FIRST_STEP, SPARE_READY, SPARE_TAKEN

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""For spares to answer that they become ranks; new processes would need about as long."""


@dataclass
class Spare:
    """One process that waits."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    ready: bool = False
    """Whether it was seen to have imported everything."""

    def look(self) -> bool:
        """Whether it has imported everything; does not wait."""
        if not self.ready:
            with suppress(OSError):
                self.ready = self.connection.recv(len(SPARE_READY), socket.MSG_DONTWAIT) == SPARE_READY
        return self.ready

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Spares:
    """The spares of this node, over all starts of a run."""

    def __init__(self) -> None:
        self.last = False
        """Whether no start follows this one, so that no spares are needed."""
        self._spares: dict[str, Spare] = {}
        self._began, self.write_end = os.pipe2(os.O_CLOEXEC)
        self.variables = {FIRST_STEP: str(self.write_end)}
        """Of the first rank, which inherits the descriptor."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._spares:
            self._spares.popitem()[1].end()
        os.close(self._began)
        os.close(self.write_end)

    @property
    def pids(self) -> set[int]:
        """Process ids."""
        return {spare.process.pid for spare in self._spares.values()}

    def watch(
        self,
        selector: selectors.BaseSelector,
        ranks: list[str],
        spawn: Callable[[str, socket.socket], subprocess.Popen[bytes]],
    ) -> None:
        """Start spares after the first step of the ranks; keys of the selector have a callable as data.

        Args:
            selector: of the loop that waits for the ranks.
            ranks: of this node.
            spawn: starts the spare of a rank, whose standard input is the socket.
        """
        wanted = list(ranks)

        def begin() -> None:
            os.read(self._began, 1)
            selector.unregister(self._began)
            if not self.last:
                start_next()

        def start_next() -> None:
            if not wanted:
                return
            rank = wanted.pop(0)
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    spare = Spare(spawn(rank, theirs), ours)
                except OSError as error:
                    ours.close()
                    logger.warning("no warm spare for rank %s: %s", rank, error)
                    return
            self._spares[rank] = spare

            def answered() -> None:
                selector.unregister(ours)
                spare.look()  # or it has ended
                start_next()

            selector.register(ours, selectors.EVENT_READ, answered)

        selector.register(self._began, selectors.EVENT_READ, begin)

    def take(self, variables: Mapping[str, Mapping[str, str]]) -> dict[str, subprocess.Popen[bytes]]:
        """Make ranks of the spares; those that are not ready or do not answer are ended, and left out of the result.

        Args:
            variables: of each rank; there may be fewer than spares.
        """
        for rank in self._spares.keys() - variables.keys():
            self._spares.pop(rank).end()
        with selectors.DefaultSelector() as selector:
            for rank, spare in self._spares.items():
                if not spare.look():
                    continue
                with suppress(OSError):
                    spare.connection.setblocking(False)
                    spare.connection.send(json.dumps(dict(variables[rank])).encode() + b"\n")
                    selector.register(spare.connection, selectors.EVENT_READ, rank)
            taken: dict[str, subprocess.Popen[bytes]] = {}
            latest = time.monotonic() + ANSWER_SECONDS
            while selector.get_map() and (left := latest - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    rank = key.data
                    spare = self._spares[key.data]
                    with suppress(OSError):
                        if spare.connection.recv(len(SPARE_TAKEN)) == SPARE_TAKEN:
                            taken[rank] = spare.process
                    selector.unregister(spare.connection)
        for rank, spare in self._spares.items():
            if rank in taken:
                spare.connection.close()
            else:
                spare.end()
                if spare.ready:
                    logger.warning("the warm spare of rank %s did not answer; a new process starts", rank)
        self._spares.clear()
        return taken
