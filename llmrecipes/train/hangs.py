"""The watchdog of a rank in a run: its limits, the folder of its reports, and the note of an earlier hang."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from llmrecipes.engine.base import World
from llmrecipes.faults.collectives import last_collectives
from llmrecipes.faults.watchdog import REPORT, Beat, HangLimits, unwatched, watched
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import Note
from llmrecipes.untrusted import RECORD, read_json

NOTED = "noted.json"
"""Name of a report that is a note of the run."""


def limits(recipe: Recipe) -> HangLimits | None:
    """Of a recipe's watchdog; None: it has none."""
    least = recipe.faults.rank_heartbeat_timeout
    return None if least is None else HangLimits(least, recipe.faults.initial_rank_heartbeat_timeout)


@contextmanager
def watchdog(recipe: Recipe, files: RunFiles, world: World) -> Iterator[Beat]:
    """Watch this rank while the block runs, and yield what it calls at each phase; a collective of all ranks."""
    wanted = limits(recipe)
    if wanted is None:
        yield unwatched
        return
    token = [secrets.token_hex(4)]  # reports of an earlier start are not those of this one
    dist.broadcast_object_list(token, src=0)
    folder = files.hang(token[0])
    with watched(wanted, folder, rank=world.rank, world_size=world.size, collectives=last_collectives) as beat:
        yield beat


def hangs(files: RunFiles, step: int) -> Iterator[Note]:
    """Notes of hangs that ended earlier starts; each once."""
    for path in sorted(files.logs.glob(f"hang-*/{REPORT}")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            report = read_json(path, root=files.path, most=RECORD)
            path.rename(path.with_name(NOTED))
            yield Note(step=step, event="hang", details={"text": str(report["text"])}, alarm=True)
