"""The protocol of what watches a training. `OBSERVERS` of `train/observing.py` lists them; loop and stage name none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrecipes.engine.base import Progress, StepResult
from llmrecipes.train.spec import RunSpec

if TYPE_CHECKING:
    from llmrecipes.train.joined import Joined
    from llmrecipes.train.loop import Loop


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A step of the loop that has ended and is reported."""

    before: Progress
    progress: Progress
    result: StepResult
    seconds: float
    steady: bool
    """Whether it neither begins the start nor runs beside a save that is being written."""


class Observer:
    """Hooks around a training, in the order in which they run; all ranks call them, but for those that say otherwise.

    One lives as long as the rank, also where a run has stages, of which each has its own engine.

    Attributes:
        joined: what the stages share; from the first `begin` on.
        loop: the training loop of the stage, with its engine, tracker and progress; not there between stages.
        stack: what is entered here ends with the stage.
    """

    joined: Joined
    loop: Loop
    stack: ExitStack

    def __init__(self, spec: RunSpec) -> None:
        """Before the ranks join; what it refuses is refused at once."""

    @classmethod
    def wanted(cls, spec: RunSpec) -> bool:
        """Whether a start has it."""
        return True

    def begin(self) -> None:
        """The loop of a stage is about to run."""

    def beat(self, phase: str, step: int | None = None) -> None:
        """A phase begins; see `faults.watchdog.Beat`."""

    def fields(self, step: int, seconds: float) -> dict[str, Any]:
        """Fields of `StepMetrics` of a step that has just ended."""
        return {}

    def after_step(self, done: StepDone) -> None:
        """A step is reported. An error ends the run."""

    def catch_up(self, step: int, *, ended: bool) -> bool:
        """Evaluate what the start has missed of the step that it resumes from; the result as of `evaluate`."""
        return True

    def evaluate(self, step: int, *, ended: bool, stopping: bool) -> bool:
        """Evaluate after a step, before it is saved.

        Args:
            ended: the step is the last one by the held-out loss.
            stopping: the run was asked to stop.

        Returns:
            False on every rank: an evaluation that is due is left to the resumed run.
        """
        return True

    def saved(self, step: int) -> bool:
        """A checkpoint is published: on the first rank, by the saver's thread, before older ones are deleted.

        Returns:
            Whether to call `take`.
        """
        return False

    def take(self, step: int) -> None:
        """A checkpoint is published: on every rank, by the saver's thread, which waits for it."""

    def written(self, seconds: float) -> None:
        """A save has ended that took so long to write."""

    def rewind(self) -> None:
        """The run goes back to an earlier step of the stage; the tracker is still that of before."""

    def end(self) -> None:
        """The loop has ended."""

    def finish(self) -> None:
        """The run has ended with its last step, which is saved; the tracker is still open."""

    def lines(self) -> None:
        """Print what the end of a start shows; on the first rank, when the tracker is closed."""

    def close(self) -> None:
        """The rank leaves the run, also after an error."""


class Observers(tuple[Observer, ...]):
    """Those of a start."""

    def begin(self, joined: Joined, loop: Loop, stack: ExitStack) -> None:
        """Begin with a stage; they forget its loop when `stack` closes, so that its engine can be freed."""
        for each in self:
            each.joined = joined
            each.loop = loop
            each.stack = stack
            stack.callback(vars(each).pop, "loop")
            each.begin()

    def beat(self, phase: str, step: int | None = None) -> None:
        """See `Observer.beat`."""
        for each in self:
            each.beat(phase, step)

    def fields(self, step: int, seconds: float) -> dict[str, Any]:
        """The fields of all observers."""
        return {name: value for each in self for name, value in each.fields(step, seconds).items()}

    def saved(self, step: int) -> list[bool]:
        """See `Observer.saved`; the answer of each."""
        return [each.saved(step) for each in self]

    @property
    def shared(self) -> Callable[[int, list[bool]], None] | None:
        """What calls `Observer.take` on a rank; None: no observer has it, and no message to the ranks is needed."""
        return self._take if any(type(each).take is not Observer.take for each in self) else None

    def _take(self, step: int, wanted: list[bool]) -> None:
        for each, is_wanted in zip(self, wanted, strict=True):
            if is_wanted:
                each.take(step)

    def written(self, seconds: float) -> None:
        """See `Observer.written`."""
        for each in self:
            each.written(seconds)
