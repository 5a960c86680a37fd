"""Tasks: processes, on any number of nodes, that encode the shards of a recipe's data, and join them.

A task claims a shard, or an item of the joining, by creating a folder, and renews a lease in it. One whose task has
ended, or has not renewed its lease for `LEASE_SECONDS` by the clock of who waits, is taken over. Were two tasks to do
the same, both would publish the same bytes by a rename: leases save work, the result does not stand on them.
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from llmrecipes.data import pipeline
from llmrecipes.data.executor import live_with_parent
from llmrecipes.data.shard_files import new_token
from llmrecipes.data.shards import Shards
from llmrecipes.errors import UserError
from llmrecipes.hardware.process import Watch, start_ticks
from llmrecipes.launch import lease as leases

_POLL_SECONDS = 1.0
TAKEN_OVER = "another task took over the shard, because this one did not renew its lease; leaving the shard to it"


class Stage(Protocol):
    """Items of work that any task may do, in any order; an item twice is published twice, with the same bytes."""

    def needed(self) -> list[int]:
        """Numbers of the items that are missing; none once the shards are deleted, because the data is published."""
        ...

    def claim(self, number: int) -> Path:
        """The folder whose creation claims an item."""
        ...

    def work(self, number: int, token: str, lost: Callable[[], bool]) -> object:
        """Do an item and publish it, if it is complete and `lost` is not true before."""
        ...


def encode_shards(shards: Shards, count: int, log: Callable[[str], None]) -> None:
    """Encode all shards, and join them where tasks can, with `count` processes, together with those of other calls.

    It returns when nothing is missing.

    Raises:
        UserError: a shard cannot be read or written, or all processes were killed.
    """
    if not _left(shards):
        return
    done, total = len(shards.published()), len(shards.shards)
    missing = len(shards.needed())
    log(f"{done:,} of {total:,} shards are encoded, {missing:,} are missing; tasks on this machine: {count:,}")
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    running: list[tuple[BaseProcess, Connection]] = []
    killed = 0
    try:
        for _ in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_task, args=(shards, there))
            process.start()
            there.close()
            running.append((process, here))
        while running:
            wait([process.sentinel for process, _ in running])
            for ended in [task for task in running if not task[0].is_alive()]:
                running.remove(ended)
                task, failures = ended
                task.join()
                if failures.poll() and (failure := _received(failures)):
                    raise failure
                if task.exitcode:
                    killed += 1
                    log(f"a task failed (exit code {task.exitcode}); the others take over its shard")
    finally:
        for task, _ in running:
            task.kill()
            task.join()
    if _left(shards):
        raise UserError(
            f"all {killed} tasks were killed, usually by the kernel because memory ran out",
            where="--tasks",
            fix=f"run it again to continue with the missing shards, with fewer than --tasks {count} or more memory",
        )
    log(f"all shards are encoded and joined, after {time.monotonic() - began:.1f} s")


def _left(shards: Shards) -> bool:
    """Whether something is to do."""
    return any(stage.needed() for stage in pipeline.rounds(shards))


def _received(failures: Connection) -> UserError | None:
    try:
        what, where, rule, fix = failures.recv()
    except EOFError:
        return None
    return UserError(what, where=where, rule=rule, fix=fix)


def _task(shards: Shards, failures: Connection) -> None:
    live_with_parent()
    try:
        for stage in pipeline.rounds(shards):
            run(stage)
    except UserError as error:
        failures.send((error.what, error.where, error.rule, error.fix))
    except OSError as error:
        what = f"cannot write prepared data: {error.strerror or error}"
        fix = "free some disk space, or choose another --data-dir; shards that are encoded are kept"
        failures.send((what, str(error.filename or shards.folder), "", fix))


def run(stage: Stage) -> None:
    """Do what a stage needs until nothing is missing.

    Raises:
        UserError: a source or a shard cannot be read.
        OSError: something cannot be written.
    """
    watch, token = Watch(), new_token()
    while missing := stage.needed():
        try:
            number = next((number for number in missing if _claimed(stage.claim(number), token, watch)), None)
            if number is None:
                time.sleep(_POLL_SECONDS)  # others do all that is missing
            else:
                _do(stage, number, token)
        except FileNotFoundError:
            if stage.needed():
                raise
            # Others have done the rest, published the data and deleted the shards.


def _do(stage: Stage, number: int, token: str) -> None:
    claim, lost = stage.claim(number), threading.Event()
    try:
        with leases.held(claim, token, lost.set, lost.set, TAKEN_OVER):
            if number in stage.needed():  # not published between the look and the claim
                stage.work(number, token, lost.is_set)
    finally:
        if not lost.is_set():
            shutil.rmtree(claim, ignore_errors=True)


def _claimed(claim: Path, token: str, watch: Watch) -> bool:
    """Whether a shard is now this task's: nobody had it, or who had it has ended."""
    try:
        claim.mkdir()
    except FileExistsError:
        held = leases.read(claim)
        if held is not None and held.machine.is_this:
            pid, started = held.token.split("-")[:2]
            if str(start_ticks(int(pid))) == started:
                return False
        elif watch.unchanged(claim, None if held is None else held.stamp) < leases.LEASE_SECONDS:
            return False
        if not claim.is_dir():  # published, or given up, since
            return False
        for part in claim.parent.glob(f".{claim.stem}-*.part"):  # what the task that has ended had written
            part.unlink(missing_ok=True)
    leases.take(claim, token)
    return True
