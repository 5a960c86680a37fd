"""The protocol of what a recipe adds to a training step. `recipe.step_parts` lists the parts; an engine names none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch

from llmrecipes.engine.core.masters import OwnGradient
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe import step_parts as known

if TYPE_CHECKING:
    from llmrecipes.engine.base import Batch, Platform, Progress
    from llmrecipes.engine.core.checkpoint.slices import ShardedParameter
    from llmrecipes.engine.meters import GradientFault

Summed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Loss of a micro-batch that is gone backward from; what megatron-core divides by, an integer; both as they are
reported, [2] in fp64."""
KindOfPart = TypeVar("KindOfPart")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a part can reach of its engine."""

    plan: Plan
    platform: Platform
    modules: Sequence[Any]
    """This rank's chunks of the model."""
    implementation: str
    """Of their layers."""
    optimizer: Any
    trained: Sequence[ShardedParameter]
    """Parameters that have gradients, in model order."""
    sharded: bool
    """Whether data-parallel ranks have different parts of a gradient."""
    gradients: Callable[[], Iterable[OwnGradient]]
    """What this rank updates with."""
    counted: Callable[[], Iterable[torch.Tensor]] | None = None
    """Those of them that this rank adds to the norm; None: the engine does not know."""
    loss_scale: Callable[[], float] = lambda: 1.0
    """What `gradients` are multiplied by."""
    chunks: Sequence[Any] = ()
    """The modules as megatron-core's schedules take them."""


class Agreed(NamedTuple):
    """What all ranks know after the exchange of a step or of a global batch of an evaluation."""

    loss: float
    """Mean of what it counts."""
    counted: float
    """Tokens that the loss counts, or pairs, times the ranks that have the same ones."""
    stopping: bool
    norm: float
    """Of the gradients, before they are clipped; NaN in an evaluation."""
    more: tuple[float, ...] = ()
    """Other numbers of this device, as the engine asked for them."""


class Part:
    """Hooks around one training step, in the order in which they run. A step that is computed again runs them again.

    The engine deepspeed, whose library reduces, clips and updates by itself, calls those of `DEEPSPEED_HOOKS` only.

    Args:
        step: of the engine that has it.
    """

    size = 0
    """Numbers that it adds to the one exchange of a step."""
    counting = True
    """Whether a step that is computed again is counted again."""
    in_evaluations = False
    """Whether evaluations are counted too, from `start` to `fields`."""
    loss: ClassVar[Callable[..., Summed] | None] = None
    """(part, batch, losses [b, s]) → the loss, in place of the sum over tokens. `counted` follows it."""
    around: ClassVar[Callable[..., Any] | None] = None
    """(part, batches, number, run) → what the passes of a step report, which `run` makes once."""

    def __init__(self, step: Step) -> None:
        """All ranks make it, before the first step."""

    def load(self, weights: Any = None) -> None:
        """Build a frozen model that it has; arguments as `frozen.FrozenModel.load`."""

    def counts(self, step: int) -> bool:
        """Whether a step, from 1, is counted; the same on all ranks."""
        return True

    def start(self) -> None:
        """Count the next step, and forget what was counted before it; the loop calls it where it is due."""

    def batches(self, batches: Iterator[Batch], number: int, *, training: bool) -> Iterator[Batch]:
        """The micro-batches of a step or of an evaluation, `number` of them, in host memory."""
        return batches

    def before_passes(self, step: int, micro_batches: int) -> None:
        """Gradients are zero. The step is counted from 1."""

    def expect(self, batch: Batch) -> None:
        """Take what it needs of this rank's part of the next micro-batch, on the device."""

    def counted(self, batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        """[size] in fp64, of a micro-batch whose tokens' losses [b, s] this rank has; summed over all."""
        return losses.new_zeros(self.size, dtype=torch.float64)

    def add_to(self, totals: torch.Tensor, own: torch.Tensor) -> None:
        """Add what ranks without a loss have to this rank's sums: loss and tokens are the first two, `own` its own."""

    def before_norm(self) -> None:
        """Gradients are complete; what is changed here counts in their norm."""

    def after_norm(self, square: torch.Tensor | None) -> torch.Tensor | None:
        """Numbers of this rank, on the device, that the host reads with the exchange; they are not summed.

        Args:
            square: of the norm; None: it is not known yet.
        """
        return None

    def read(self, own: list[float], local: list[float], agreed: Agreed) -> None:
        """Take its sums over all ranks, and what it returned in `after_norm`. The host has waited for the device."""

    def before_update(self) -> None:
        """The step is accepted. Gradients are not clipped yet."""

    def after_update(self) -> None:
        """The weights are updated."""

    def fields(self, before: Progress) -> dict[str, Any]:
        """Fields of `StepMetrics`, after the step that follows `before`, or an evaluation there. All ranks call it."""
        return {}

    def progress(self) -> dict[str, Any]:
        """Fields of `Progress`, after `fields`: its state in checkpoints."""
        return {}

    def fault(self) -> GradientFault | None:
        """What is wrong with the gradients of the last step, once, the same on all ranks."""
        return None


DEEPSPEED_HOOKS = (
    "counts", "start", "before_passes", "counted", "after_norm", "read", "fields", "progress", "fault", "counting",
    "in_evaluations",
)  # fmt: skip


class Parts(tuple[Part, ...]):
    """Those of a recipe."""

    @classmethod
    def of(cls, step: Step, engine: str) -> Parts:
        """Those that a recipe has on an engine."""
        recipe = step.plan.recipe
        meta = step.platform.device.type == "meta"
        return cls(
            resolve_name(each.part)(step)
            for each in known.PARTS
            if engine in each.engines and each.wanted(recipe) and (each.in_dry_run or not meta)
        )

    def the(self, kind: type[KindOfPart]) -> KindOfPart:
        """The one of a class."""
        return next(part for part in self if isinstance(part, kind))

    @property
    def size(self) -> int:
        """Numbers that they add to the exchange."""
        return sum(part.size for part in self)

    def load(self, weights: Any = None) -> None:
        """See `Part.load`."""
        for part in self:
            part.load(weights)

    def counted(self, batch: Batch, losses: torch.Tensor) -> list[torch.Tensor]:
        """Numbers of each part that counts some."""
        return [part.counted(batch, losses) for part in self if part.size]

    def add_to(self, totals: torch.Tensor) -> None:
        """Add to this rank's sums: loss, tokens, and the numbers of each part."""
        for part, own in zip(self, totals[2:].split([part.size for part in self]), strict=True):
            part.add_to(totals, own)

    def after_norm(self, square: torch.Tensor | None) -> dict[Part, torch.Tensor]:
        """Numbers of the parts that have some then."""
        found = {part: part.after_norm(square) for part in self}
        return {part: local for part, local in found.items() if local is not None}

    def read(self, numbers: list[float], local: Mapping[Part, torch.Tensor], agreed: Agreed) -> None:
        """Give each its numbers: the sums of all, then those of `after_norm`."""
        left = iter(numbers)
        sums = [list(islice(left, part.size)) for part in self]
        for part, own in zip(self, sums, strict=True):
            part.read(own, list(islice(left, local[part].numel() if part in local else 0)), agreed)

    def start(self, step: int | None = None) -> None:
        """Count what is due in a step; None: in an evaluation."""
        for part in self:
            if part.in_evaluations if step is None else part.counts(step):
                part.start()

    def fields(self, before: Progress, *, evaluation: bool = False) -> dict[str, Any]:
        """Fields of all parts, or of those that count evaluations."""
        asked = [part for part in self if part.in_evaluations or not evaluation]
        return {name: value for part in asked for name, value in part.fields(before).items()}

    def progress(self) -> dict[str, Any]:
        """Progress of all parts."""
        return {name: value for part in self for name, value in part.progress().items()}
