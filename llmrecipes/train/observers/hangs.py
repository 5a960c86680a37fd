"""The watchdog of a rank in a run: its limits, the folder of its reports, and the note of an earlier hang."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress

from llmrecipes.faults.collectives import last_collectives
from llmrecipes.faults.watchdog import REPORT, HangLimits, RankHeartbeat, watched
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import Note
from llmrecipes.train.agreement import of_first_rank
from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.untrusted import RECORD, read_json

NOTED = "noted.json"
"""Name of a report that is a note of the run."""


LEARNED_SECONDS = 30.0
PROFILED_SECONDS = 600.0
"""The ranks wait in a step while one of them writes its profile, which no step before has shown."""


class Hangs(Observer):
    """The watchdog, and notes of hangs; the report of a start that hung may be written after the next has begun."""

    def begin(self) -> None:
        """Watch this rank; a collective of all ranks."""
        self._heartbeat: RankHeartbeat | None = None
        profiled = bool(self.joined.spec.profile_steps)
        if (wanted := limits(self.loop.plan.recipe, profiled=profiled)) is not None:
            token = of_first_rank(secrets.token_hex(4))  # reports of an earlier start are not those of this one
            folder = self.joined.spec.run.hang(token)
            world = self.loop.world
            self._heartbeat = self.stack.enter_context(
                watched(wanted, folder, rank=world.rank, world_size=world.size, collectives=last_collectives)
            )
        self.end()

    def beat(self, phase: str, step: int | None = None) -> None:
        """Tell the watchdog."""
        if self._heartbeat is not None:
            self._heartbeat(phase, step)

    def written(self, seconds: float) -> None:
        """Tell it too."""
        if self._heartbeat is not None:
            self._heartbeat.written(seconds)

    def after_step(self, done: StepDone) -> None:
        """Look after the first, second, fourth … step of a start."""
        steps = len(self.loop.losses)
        if steps & (steps - 1) == 0:
            self.end()

    def end(self) -> None:
        """Note what there is."""
        if self.loop.world.is_first:
            for note in hangs(self.joined.spec.run, self.loop.progress.step):
                self.loop.tracker.note(note)


def limits(recipe: Recipe, *, profiled: bool = False) -> HangLimits | None:
    """Limits of a recipe's watchdog; None: it has none."""
    least = recipe.faults.rank_heartbeat_timeout
    first = recipe.faults.initial_rank_heartbeat_timeout
    if least == "learned":
        return HangLimits(PROFILED_SECONDS if profiled else LEARNED_SECONDS, first, learned=True)
    return None if least is None else HangLimits(least, first)


def hangs(files: RunFiles, step: int) -> Iterator[Note]:
    """Notes of hangs that ended earlier starts; each once."""
    for path in sorted(files.logs.glob(f"hang-*/{REPORT}")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            report = read_json(path, root=files.path, most=RECORD)
            path.rename(path.with_name(NOTED))
            yield Note(step=step, event="hang", details={"text": str(report["text"])}, alarm=True)
