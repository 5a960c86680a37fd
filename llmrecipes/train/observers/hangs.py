"""The watchdog of a rank in a run: its limits, the folder of its reports, and the note of an earlier hang."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
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


LEARNED_SECONDS = 30.0
PROFILED_SECONDS = 600.0
"""The ranks wait in a step while one of them writes its profile, which no step before has shown."""


def limits(recipe: Recipe, *, profiled: bool = False) -> HangLimits | None:
    """Of a recipe's watchdog; None: it has none."""
    least, first = recipe.faults.rank_heartbeat_timeout, recipe.faults.initial_rank_heartbeat_timeout
    if least == "learned":
        return HangLimits(PROFILED_SECONDS if profiled else LEARNED_SECONDS, first, learned=True)
    return None if least is None else HangLimits(least, first)


@contextmanager
def watchdog(
    recipe: Recipe, files: RunFiles, world: World, *, profiled: bool = False
) -> Iterator[tuple[Beat, Callable[[float], None]]]:
    """Watch this rank while the block runs, a collective of all ranks.

    Yields what the rank calls at each phase, and with the seconds of each save that was written.
    """
    wanted = limits(recipe, profiled=profiled)
    if wanted is None:
        yield unwatched, lambda seconds: None
        return
    token = [secrets.token_hex(4)]  # reports of an earlier start are not those of this one
    dist.broadcast_object_list(token, src=0)
    folder = files.hang(token[0])
    with watched(wanted, folder, rank=world.rank, world_size=world.size, collectives=last_collectives) as beat:
        yield beat, beat.written


def hangs(files: RunFiles, step: int) -> Iterator[Note]:
    """Notes of hangs that ended earlier starts; each once."""
    for path in sorted(files.logs.glob(f"hang-*/{REPORT}")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            report = read_json(path, root=files.path, most=RECORD)
            path.rename(path.with_name(NOTED))
            yield Note(step=step, event="hang", details={"text": str(report["text"])}, alarm=True)
