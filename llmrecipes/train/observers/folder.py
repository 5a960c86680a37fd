"""Detecting that the run directory was deleted or renamed during training.

Only the state in memory is left of a deleted one, so the run saves it if it can, and ends with `ExitCode.STOP`. Saves
go to the old name of a renamed one, and are moved to the new one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch.distributed as dist

from llmrecipes.engine.base import World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StopRequest
from llmrecipes.rundir import Run

SECONDS_BETWEEN_CHECKS = 1.0


class RunFolder:
    """The directory of a run, which somebody may delete or rename while it trains; a context manager.

    Args:
        run_dir: the run.
        stop: set when it is gone.
        world: this rank.
    """

    def __init__(self, run_dir: Path, stop: StopRequest, world: World) -> None:
        self._run_dir, self._stop, self._world = run_dir, stop, world
        self._checked = time.monotonic()
        self._handle = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if world.is_first else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def check(self) -> None:
        """Stop the run if its directory is gone; to be called after every step."""
        if self._world.is_first and time.monotonic() - self._checked >= SECONDS_BETWEEN_CHECKS:
            self._checked = time.monotonic()
            if is_deleted(self._run_dir):
                self._stop.signal = self._stop.signal or signal.SIGTERM

    def require_exists(self, close: Callable[[], None]) -> None:
        """Fail if the directory is gone; a collective of all ranks.

        Args:
            close: called in that case, before the other ranks exit, so that a slow close does not delay the message.

        Raises:
            UserError: on every rank, with `ExitCode.STOP`.
        """
        gone: list[tuple[str, str] | None] = [None]
        if self._world.is_first and is_deleted(self._run_dir):
            close()
            if (moved := self._moved()) is None:
                gone = [("deleted", _left(self._run_dir))]
            else:
                gone = [("renamed", _moved_to(self._run_dir, moved))]
        dist.broadcast_object_list(gone, src=0)
        if gone[0] is not None:
            what, fix = gone[0]
            raise UserError(
                f"the run directory was {what} during training",
                where=str(self._run_dir),
                rule="a run keeps its recipe, metrics and checkpoints in its directory",
                fix=fix,
                code=ExitCode.STOP,
            )

    def _moved(self) -> Path | None:
        """The directory under its new name; None: it is deleted."""
        if self._handle is None:
            return None
        path = Path(f"/proc/self/fd/{self._handle}").readlink()  # the kernel adds ` (deleted)` to one that is
        try:
            return path if os.path.samestat(path.stat(), os.fstat(self._handle)) else None
        except OSError:
            return None


def is_deleted(run_dir: Path) -> bool:
    """Whether the files that every run has are gone; the saver may have created the directory again."""
    return all(_is_missing(path) for path in (Run(run_dir).recipe_file, Run(run_dir).metrics))


def _left(run_dir: Path) -> str:
    entries = Run(run_dir).store().entries()
    if not entries:
        return "nothing of the run is left; start a new run with another --run-id"
    return f"its state was saved again, in {entries[-1].path}: the same command with this --run-id resumes from there"


def _moved_to(run_dir: Path, moved: Path) -> str:
    """Move what was saved under the old name to the run; what to do next."""
    saved = ""
    for entry in Run(run_dir).store().entries():
        target = Run(moved).store().path(entry.step)
        try:
            entry.path.rename(target)
        except OSError as error:
            return f"it is now {moved}; move {entry.path} to {target} ({error.strerror}), and train with its new name"
        saved = f", with the state of step {entry.step}"
    for path in (Run(run_dir).status_file, run_dir / "mlflow.json"):  # written while the run was closed
        with suppress(OSError):
            path.rename(moved / path.name)
    for left in (Run(run_dir).checkpoints, run_dir):
        with suppress(OSError):  # it has something else in it
            left.rmdir()
    return f"it is now {moved}{saved}: the same command with --run-id {moved.name} resumes from there"


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # an I/O error does not mean that the file was deleted
    return False
