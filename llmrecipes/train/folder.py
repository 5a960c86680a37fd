"""Detecting that the run directory was deleted during training.

Only the state in memory is left then, so the run saves it if it can, and ends with `ExitCode.STOP`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from llmrecipes.engine.base import World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StopRequest
from llmrecipes.rundir import Run

SECONDS_BETWEEN_CHECKS = 1.0


def stop_when_deleted(run_dir: Path, stop: StopRequest, world: World) -> Callable[[], None]:
    """A function to call after every step, which stops the run if its directory was deleted."""
    checked = time.monotonic()

    def check() -> None:
        nonlocal checked
        if world.is_first and time.monotonic() - checked >= SECONDS_BETWEEN_CHECKS:
            checked = time.monotonic()
            if is_deleted(run_dir):
                stop.signal = stop.signal or signal.SIGTERM

    return check


def require_exists(run_dir: Path, world: World, close: Callable[[], None]) -> None:
    """Fail if the run directory was deleted; a collective of all ranks.

    Args:
        run_dir: the run.
        world: this rank.
        close: called in that case, before the other ranks exit, so that a slow close does not delay the message.

    Raises:
        UserError: on every rank, with `ExitCode.STOP`.
    """
    saved: list[str | None] = [None]
    if world.is_first and is_deleted(run_dir):
        saved = [_left(run_dir)]
        close()
    dist.broadcast_object_list(saved, src=0)
    if saved[0] is not None:
        raise UserError(
            "the run directory was deleted during training",
            where=str(run_dir),
            rule="a run keeps its recipe, metrics and checkpoints in its directory",
            fix=saved[0],
            code=ExitCode.STOP,
        )


def is_deleted(run_dir: Path) -> bool:
    """Whether the files that every run has are gone; the saver may have created the directory again."""
    return all(_is_missing(path) for path in (Run(run_dir).recipe_file, Run(run_dir).metrics))


def _left(run_dir: Path) -> str:
    entries = Run(run_dir).store().entries()
    if not entries:
        return "nothing of the run is left; start a new run with another --run-id"
    return f"its state was saved again, in {entries[-1].path}: the same command with this --run-id resumes from there"


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # an I/O error does not mean that the file was deleted
    return False
