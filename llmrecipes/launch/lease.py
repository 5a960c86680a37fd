"""The lease of a local job, which shows where its process id means nothing (another machine or container) that it runs.

It is a file in the run's directory whose modification time the job renews. A newer job of the run replaces it, which
ends an earlier one that was believed to be lost.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from llmrecipes import untrusted
from llmrecipes.hardware.process import MachineIdentity, this_machine
from llmrecipes.io import write_atomic
from llmrecipes.runfiles import RunFiles

logger = logging.getLogger(__name__)

CANCEL = "cancel-{}"
"""In the folder of the lease, by token: a cancellation from another machine, which cannot send a signal."""
RENEW_SECONDS = 5.0
LEASE_SECONDS = 120.0
"""A lease that has not changed for so long is lost; longer than network file systems cache attributes (60 s)."""
MOST_BYTES = 4096


@dataclass(frozen=True)
class Lease:
    """The local job that holds a run, its machine, and a value that changes with every renewal."""

    token: str
    machine: MachineIdentity
    stamp: tuple[int, int]


def take(run_dir: Path, token: str) -> None:
    """Take a run over for a new job of this machine; an earlier job ends when it sees that."""
    path = RunFiles(run_dir).lease
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"token": token, **this_machine().as_dict()}) + "\n")


def read(run_dir: Path) -> Lease | None:
    """The lease of a run; None if there is none.

    Raises:
        OSError: the directory cannot be read at the moment.
    """
    try:
        with untrusted.open_file(
            RunFiles(run_dir).lease, root=run_dir, most=MOST_BYTES
        ) as file:  # opening it renews what a network file system has cached
            status = os.fstat(file.fileno())
            values = untrusted.parse_json(file.read(MOST_BYTES))
        return Lease(str(values["token"]), MachineIdentity.of(values), (status.st_ino, status.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def request_cancel(run_dir: Path, token: str) -> None:
    """Ask a job of another machine to save and end."""
    RunFiles(run_dir).lease.with_name(CANCEL.format(token)).touch()


@contextmanager
def held(run_dir: Path, token: str, cancelled: Callable[[], None], lost: Callable[[], None]) -> Iterator[None]:
    """Renew the lease of a job while the block runs.

    Args:
        run_dir: of the job.
        token: of the job.
        cancelled: called once if another machine has cancelled the job.
        lost: called if the run has been given to another job; this one must end without writing anything more.
    """
    path = RunFiles(run_dir).lease
    ended = Event()
    request = path.with_name(CANCEL.format(token))

    def renew() -> None:
        was_cancelled = False
        while True:
            with suppress(OSError):  # of a directory that is away: tried again, and lost if it was given away meanwhile
                lease = read(run_dir)
                if lease is not None and lease.token != token:
                    logger.error("%s: another job has taken over the run; this one stops", path)
                    lost()
                if lease is not None:
                    os.utime(path)
                if not was_cancelled and request.exists():
                    was_cancelled = True
                    cancelled()
            if ended.wait(RENEW_SECONDS):
                return

    thread = Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(RENEW_SECONDS)
