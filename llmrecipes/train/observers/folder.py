"""Detecting that the run directory was deleted or renamed during training.

Only the state in memory is left of a deleted one, so the run saves it if it can, and ends with `ExitCode.STOP`. Saves
go to the old name of a renamed one, and are moved to the new one.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.rundir import Run
from llmrecipes.train.agreement import of_first_rank
from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.train.spec import RunSpec

SECONDS_BETWEEN_CHECKS = 1.0


class RunFolder(Observer):
    """The directory of a run, which somebody may delete or rename while it trains."""

    def __init__(self, spec: RunSpec) -> None:
        self._run_dir = spec.run_dir

    def begin(self) -> None:
        """Open it, so that it is found under another name."""
        self._checked = time.monotonic()
        self._handle: int | None = None
        if self.loop.world.is_first:
            self._handle = os.open(self._run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self.stack.callback(os.close, self._handle)

    def after_step(self, done: StepDone) -> None:
        """Stop the run if its directory is gone."""
        if self.loop.world.is_first and time.monotonic() - self._checked >= SECONDS_BETWEEN_CHECKS:
            self._checked = time.monotonic()
            if is_deleted(self._run_dir):
                self.loop.stop.signal = self.loop.stop.signal or signal.SIGTERM

    def end(self) -> None:
        """Fail if the directory is gone; a collective of all ranks.

        Raises:
            UserError: on every rank, with `ExitCode.STOP`.
        """
        gone = None
        if self.loop.world.is_first and is_deleted(self._run_dir):
            # Before the other ranks exit, so that a slow close does not delay the message.
            self.loop.tracker.close("FAILED")
            if (moved := self._moved()) is None:
                gone = "deleted", _left(self._run_dir)
            else:
                gone = "renamed", _moved_to(self._run_dir, moved)
        if (told := of_first_rank(gone)) is not None:
            what, fix = told
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
