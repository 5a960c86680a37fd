"""Local checkpoints of a rank: written in the background, copied to a neighbour node, chosen at a start.

A rank sends its part to the same local rank of one other node, over a gloo group of two (three where the number of
nodes is odd), whatever the number of ranks: the files as they are, which the receiver writes and, when it needs them,
compares with their hashes.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from llmrecipes.checkpoint.local_parts import LocalPart, LocalParts, newest_complete
from llmrecipes.checkpoint.manifest import CheckpointInfo, Entry
from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.state_format import CheckpointFormat, StateDict
from llmrecipes.errors import UserError
from llmrecipes.io import sync, write_atomic
from llmrecipes.units import MIB
from llmrecipes.untrusted import RECORD, read_json

logger = logging.getLogger(__name__)

LONGEST_COPY = timedelta(minutes=30)
"""Timeout of a rank that waits for a part of its neighbour."""
CHUNK = 16 * MIB
"""Bytes of a message."""


class Peers:
    """A gloo group of a few ranks that send files to each other.

    Args:
        name: name of the group, the same on its ranks and used once.
        place: place of this rank in it.
        size: size of the group.
    """

    def __init__(self, name: str, place: int, size: int) -> None:
        store = dist.PrefixStore(f"llmrecipes/{name}", dist.distributed_c10d._get_default_store())
        self.place, self.size = place, size
        self._gloo: Any = dist.ProcessGroupGloo(store, place, size, LONGEST_COPY)

    def send(self, files: list[Path], to: int) -> None:
        """Send files; an empty list says that there are none."""
        sizes = json.dumps([[path.name, path.stat().st_size] for path in files]).encode()
        self._send(torch.tensor([len(sizes)]), to)
        self._send(torch.frombuffer(bytearray(sizes), dtype=torch.uint8), to)
        for path in files:
            with path.open("rb") as stream:
                while data := stream.read(CHUNK):
                    self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)

    def receive(self, folder: Path, sender: int) -> bool:
        """Write what a rank sends into a new folder, synced; False if it has nothing.

        Raises:
            OSError: it could not be written; everything was received.
        """
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, sender)
        text = torch.empty(int(length), dtype=torch.uint8)
        self._receive(text, sender)
        files: list[tuple[str, int]] = json.loads(text.numpy().tobytes())
        failed: OSError | None = None
        try:
            folder.mkdir()
        except OSError as error:
            failed = error
        for name, size in files:
            # A sender does not wait for a disk that is full on this side.
            failed = self._receive_file(folder / Path(name).name, size, sender, failed)
        if failed is not None:
            raise failed
        return bool(files)

    def _receive_file(self, path: Path, size: int, sender: int, failed: OSError | None) -> OSError | None:
        data = torch.empty(min(size, CHUNK), dtype=torch.uint8)
        left = size
        with ExitStack() as opened:
            try:
                stream = opened.enter_context(path.open("wb")) if failed is None else None
            except OSError as error:
                stream, failed = None, error
            while left:
                part = data[: min(left, CHUNK)]
                self._receive(part, sender)
                left -= len(part)
                try:
                    if stream is not None and failed is None:
                        stream.write(part.numpy().data)
                        stream.flush()
                        if not left:
                            sync(path)
                except OSError as error:
                    failed = error
        return failed

    def _send(self, data: torch.Tensor, to: int) -> None:
        self._gloo.send([data], to, 0).wait()

    def _receive(self, into: torch.Tensor, sender: int) -> None:
        self._gloo.recv([into], sender, 0).wait()


def neighbours(rank: int, ranks: int, per_node: int) -> list[int]:
    """The ranks that keep copies of each other's parts: one of each of two neighbouring nodes, or of three.

    Args:
        rank: one of them.
        ranks: ranks of all nodes, in their order.
        per_node: ranks of a node.
    """
    nodes = ranks // per_node
    node = rank // per_node
    local = rank % per_node
    if nodes == 1:
        return [rank]
    first = min(node // 2 * 2, nodes - 2 - nodes % 2)
    last = nodes if nodes % 2 and first == nodes - 3 else first + 2
    return [node * per_node + local for node in range(first, last)]


class LocalSaver:
    """Local checkpoints of this rank.

    Creating it and `newest` are collectives of all ranks; saving is one of a group of neighbours.

    Args:
        parts: parts of this node.
        group: all ranks; used at the start only.
        per_node: ranks of a node.
        layout: parallel degrees, which the parts must have to be used.
    """

    def __init__(self, parts: LocalParts, group: Ranks, per_node: int, layout: Mapping[str, int]) -> None:
        self._parts, self._group, self._per_node, self._layout = parts, group, per_node, dict(layout)
        self._rank, self._ranks = group.rank, group.size
        token = group.broadcast(secrets.token_hex(4) if self._rank == 0 else None)
        self._token: str = token
        together = neighbours(self._rank, self._ranks, per_node)
        self._sources = [rank for rank in together if rank != self._rank]
        self._peers: Peers | None = None
        if self._sources:
            name = f"local/{token}/{together[0]}"
            self._peers = Peers(name, together.index(self._rank), len(together))
            self._before = together[self._peers.place - 1]
        parts.discard_unfinished([self._rank, *self._sources])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-checkpoint")
        self._running: Future[None] | None = None
        self._warned = ""
        self.waited = 0.0
        """Seconds that the loop waited for the last save."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        # After an error others may be gone: nobody waits for a copy, which nothing depends on.
        self._thread.shutdown(wait=error is None, cancel_futures=True)

    def newest(self, after: int) -> tuple[Entry, list[int]] | None:
        """The newest complete step, with the parts that were lost fetched from their copies.

        Args:
            after: a step; only newer ones are of use.

        Returns:
            This rank's part, and the ranks whose part was lost; None: no step is complete.
        """
        reports = self._group.gather([part for part in self._of_local_rank() if part.ranks == self._ranks])
        candidates: list[tuple[int, str]] = []
        holders: dict[LocalPart, list[int]] = {}
        if reports is not None:
            for reporter, report in enumerate(reports):
                for part in report:
                    holders.setdefault(part, []).append(reporter)
            candidates = [candidate for candidate in newest_complete(holders) if candidate[0] > after]
        while True:
            candidate = self._group.broadcast(
                (candidates.pop(0) if candidates else (after, "")) if self._rank == 0 else None
            )
            step, token = candidate
            if not token:
                self._delete_behind(step)
                return None
            part = LocalPart(step, token, self._rank, self._ranks)
            entry = self._parts.valid(part, self._layout)
            lost = self._fetched(part, entry is not None, holders)
            if lost is None:
                continue
            if self._rank in lost:
                entry = self._parts.valid(part, self._layout)
            complete = self._group.gather(entry is not None)
            if self._group.broadcast(None if complete is None else all(complete)) and entry is not None:
                self._delete_behind(step)
                return entry, lost

    def _of_local_rank(self) -> list[LocalPart]:
        """Parts on this node of ranks with the number in their node that this one has, whatever start wrote them."""
        local = self._rank % self._per_node
        return [part for part in self._parts.all() if part.rank % self._per_node == local]

    def _delete_behind(self, step: int) -> None:
        """Delete the parts of later steps, which are not complete: `prune` would keep them, and not those to come."""
        self._parts.delete(part for part in self._of_local_rank() if part.step > step)

    def _fetched(self, part: LocalPart, valid: bool, holders: Mapping[LocalPart, list[int]]) -> list[int] | None:
        """Fetch parts that are lost from those who have a copy; None if a part has none."""
        known = self._group.gather(valid)
        plan: list[tuple[int, int]] = []
        possible = False
        if known is not None:
            lost = [rank for rank, good in enumerate(known) if not good]
            copies = {rank: set(holders.get(replace(part, rank=rank), ())) - {rank} for rank in lost}
            if possible := all(copies.values()):
                plan = [(rank, min(holding)) for rank, holding in copies.items()]
        possible, plan = self._group.broadcast((possible, plan) if self._rank == 0 else None)
        if not possible:
            return None
        for rank, holder in plan:
            if self._rank not in (rank, holder):
                continue
            wanted = replace(part, rank=rank)
            peers = Peers(f"local/{self._token}/{wanted}", int(self._rank == rank), 2)
            try:
                if self._rank == holder:
                    peers.send(self._files(wanted), to=1)
                else:
                    self._receive(peers, wanted, 0)
            except (OSError, RuntimeError) as error:  # of a disk, or because the other one had such an error
                logger.warning("%s could not be fetched: %s", wanted, error)
        return [rank for rank, _ in plan]

    def _files(self, part: LocalPart) -> list[Path]:
        """Files of a part to send; none if its manifest is damaged, which the receiver then hears at once."""
        try:
            return self._parts.files(part)
        except OSError as error:
            logger.warning("the copy %s is damaged: %s", part, error)
            return []

    def save(self, files: CheckpointFormat, state: StateDict, info: CheckpointInfo) -> None:
        """Take a snapshot, and write and copy it in the background; waits for the save before.

        Args:
            files: the engine's format of parts.
            state: what this rank needs.
            info: for the manifest.
        """
        started = time.perf_counter()
        self.wait()
        taken = files.snapshot(state)
        self.waited = time.perf_counter() - started
        self._running = self._thread.submit(self._write, files, taken, info)

    def wait(self) -> None:
        """Wait for the save that is being written. A disk or neighbour that fails costs a local checkpoint only."""
        if self._running is None:
            return
        running = self._running
        self._running = None
        try:
            running.result()
        except (OSError, RuntimeError) as error:
            if str(error) != self._warned:
                logger.warning("rank %d has no local checkpoint of this step: %s", self._rank, error)
            self._warned = str(error)

    def forget(self) -> None:
        """Delete the parts that this rank has written or keeps for others: the run has ended, or went back."""
        self.wait()
        self._parts.forget([self._rank, *self._sources])

    def _write(self, files: CheckpointFormat, taken: StateDict, info: CheckpointInfo) -> None:
        part = LocalPart(info.step, self._token, self._rank, self._ranks)
        failed: OSError | None = None
        temporary = self._parts.temporary(part)
        try:
            self._parts.directory.mkdir(parents=True, exist_ok=True)
            prepared = files.prepare(taken, temporary, self._rank)
            written = files.write(prepared, temporary, self._rank)
            self._parts.publish(temporary, part, info, files.versions(), written.files)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            failed = error
        if self._peers is not None:
            self._exchange(self._peers, part, failed is None)
        self._parts.prune(self._rank)
        if failed is not None:
            raise failed

    def _exchange(self, peers: Peers, part: LocalPart, written: bool) -> None:
        """To the next of the neighbours, from the one before; the first sends first, so that not all wait."""
        mine = self._parts.files(part) if written else []
        theirs = LocalPart(part.step, part.token, self._before, part.ranks)
        following = (peers.place + 1) % peers.size
        before = (peers.place - 1) % peers.size
        if peers.place == 0:
            peers.send(mine, following)
        try:
            self._receive(peers, theirs, before)
        finally:
            if peers.place != 0:
                peers.send(mine, following)
        self._parts.prune(self._before)

    def _receive(self, peers: Peers, part: LocalPart, sender: int) -> None:
        temporary = self._parts.temporary(part)
        try:
            if peers.receive(temporary, sender):
                self._parts.rename(temporary, part)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def run_token(path: Path, group: Ranks) -> str:
    """The token of a run that its parts are kept under, made at its first start; a collective of all ranks.

    A run that was deleted, or began from scratch, never finds parts of an earlier one of its name.

    Args:
        path: path of the file with the token, in the run directory.
        group: all ranks.
    """
    token: str | None = None
    if group.rank == 0:
        try:
            values = read_json(path, root=path.parent, most=RECORD)
            token = values["token"] if isinstance(values, dict) else None
        except (OSError, ValueError, KeyError, UserError):
            token = None
        if not isinstance(token, str) or not token.isalnum():
            token = secrets.token_hex(8)
            write_atomic(path, json.dumps({"token": token, "resumed": 0}) + "\n")
    shared: str = group.broadcast(token)
    return shared
