"""Noticing that a run's directory was deleted while it trains.

The state in memory is all that is left then, so the run saves it where it can, and ends with `ExitCode.STOP`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import StopRequest
from llmrecipes.recipe.load import RESOLVED_NAME
from llmrecipes.tracking.jsonl import METRICS

SECONDS_BETWEEN_LOOKS = 1.0


def stop_when_deleted(run_dir: Path, stop: StopRequest, world: World) -> Callable[[], None]:
    """A function to call after every step, which asks the run to stop once its directory is gone."""
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        if world.is_first and time.monotonic() - looked >= SECONDS_BETWEEN_LOOKS:
            looked = time.monotonic()
            if is_deleted(run_dir):
                stop.signal = stop.signal or signal.SIGTERM

    return look


def require_there(run_dir: Path, world: World, close: Callable[[], None]) -> None:
    """Fail if the directory of the run is gone; all ranks have to call this.

    Args:
        run_dir: the run.
        world: this rank.
        close: called then, before the other ranks end: what takes its time must not keep the message back.

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
            "this directory was deleted while the run was training",
            where=str(run_dir),
            rule="a run keeps its recipe, metrics and checkpoints in its directory",
            fix=saved[0],
            code=ExitCode.STOP,
        )


def is_deleted(run_dir: Path) -> bool:
    """Whether the files that a run has from its first step on are gone; the saver may have made the directory again."""
    return all(_is_missing(run_dir / name) for name in (RESOLVED_NAME, METRICS))


def _left(run_dir: Path) -> str:
    entries = CheckpointStore(run_dir / "checkpoints").entries()
    if not entries:
        return "nothing of the run is left; start a new one with another --run-id"
    return f"its state was saved again, in {entries[-1].path}: the same command with this --run-id resumes from there"


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # a file system that fails is not one that was emptied
    return False
