"""Result of a verification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmrecipes.recipe.sections.zero import Zero
from llmrecipes.recipe.variants.proxy import Scaled
from llmrecipes.verify.verify_spec import ReplicaDifference, StepRecord, TrainingRecord

PARAMETERS, REPLICAS = "parameters", "replicas"
NOT_VERIFIED = "not_verified"


@dataclass(frozen=True)
class FirstTensor:
    """The first tensor that differs, in model order, and the number of differing tensors."""

    name: str
    layer: int | None
    kind: str
    """`weights before the step`, `gradients` or `weights after the last step`."""
    relative: float
    differing: int
    tensors: int


@dataclass(frozen=True)
class FirstDifference:
    """The first number beyond the tolerance."""

    step: int
    """From 1; for `replicas` the step whose update made them differ, 0 if they differed from the start."""
    quantity: str
    """`loss`; `grad_norm`; `parameters` if those agree but the weights after the last step do not; or `replicas` if all
    of these agree but the replicas of a weight on several ranks are not bit-identical."""
    reference: float
    layout: float
    tensor: FirstTensor | None
    """None if all tensors agree."""

    def as_dict(self) -> dict[str, Any]:
        """JSON values; non-finite numbers are null."""
        return {
            "step": self.step,
            "quantity": self.quantity,
            "reference": _finite(self.reference),
            "layout": _finite(self.layout),
            "first_tensor": self.tensor.name if self.tensor else None,
            "layer": self.tensor.layer if self.tensor else None,
        }


@dataclass(frozen=True)
class Invariant:
    """A step of one process computed in two ways."""

    name: str
    difference: float | None
    """Largest relative difference of the loss and of each weight's gradient; None if it does not apply."""
    weight: str = ""
    """The weight with that difference; empty for the loss."""
    reason: str = ""
    """Why it does not apply."""

    def as_dict(self) -> dict[str, Any]:
        """JSON values; a difference that is not finite is null, and `ok` false."""
        return {
            "name": self.name,
            "difference": None if self.difference is None else _finite(self.difference),
            "weight": self.weight,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class VerifyResult:
    """A layout compared with one process."""

    recipe: str
    tolerance: float
    reference: TrainingRecord
    layout: TrainingRecord
    max_rel_param: float
    """Largest difference of all weights after the last step."""
    first_difference: FirstDifference | None
    scaled: Scaled
    """The recipe's degrees and those that ran."""
    zero: Zero | None
    """ZeRO of the layout."""
    invariants: tuple[Invariant, ...] = ()
    """What one process computed in two ways."""
    not_covered: tuple[str, ...] = ()
    """What the recipe's training has besides its degrees, and what was computed instead."""

    @property
    def ok(self) -> bool:
        """Whether all losses, gradient norms, weights and invariants agree within the tolerance, and all replicas
        exactly.

        It is about what ran; `scaled.not_run` and `not_covered` are what did not.
        """
        return self.first_difference is None and not self.broken

    @property
    def broken(self) -> list[Invariant]:
        """Invariants beyond the tolerance."""
        return [
            each for each in self.invariants if each.difference is not None and not each.difference <= self.tolerance
        ]

    @property
    def replicas(self) -> ReplicaDifference | None:
        """First replica of a weight that differs from another rank's."""
        return self.layout.replicas

    @property
    def steps(self) -> list[tuple[StepRecord, StepRecord]]:
        """(reference, layout) of every step."""
        return list(zip(self.reference.steps, self.layout.steps, strict=True))

    def max_relative(self, quantity: str) -> float:
        """Largest relative difference of `loss` or `grad_norm` over the steps."""
        return max(relative(getattr(layout, quantity), getattr(one, quantity)) for one, layout in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Output of `--json`; numbers that are not finite are null."""
        return {
            "recipe": self.recipe,
            "layout": self.layout.layout,
            "zero_stage": self.zero.stage if self.zero else None,
            "iters": len(self.layout.steps),
            **{f"max_rel_{quantity}": _finite(self.max_relative(quantity)) for quantity in QUANTITIES},
            "max_rel_param": _finite(self.max_rel_param),
            "ok": self.ok,
            "first_difference": self.first_difference.as_dict() if self.first_difference else None,
            "replicas": self.replicas.model_dump() if self.replicas else None,
            **self.scaled.as_dict(NOT_VERIFIED),
            "invariants": [each.as_dict() for each in self.invariants],
            "not_covered": list(self.not_covered),
        }

    def as_record(self) -> dict[str, Any]:
        """`as_dict` with every step, for verify.json."""
        steps = [{"reference": _numbers(one), "layout": _numbers(layout)} for one, layout in self.steps]
        return {**self.as_dict(), "tolerance": self.tolerance, "steps": steps}


def first_differing_step(reference: TrainingRecord, layout: TrainingRecord, tolerance: float) -> tuple[int, str] | None:
    """(step from 1, quantity) of the first loss or gradient norm beyond the tolerance."""
    pairs = enumerate(zip(layout.steps, reference.steps, strict=True), start=1)
    differing = ((number, first_beyond(step, expected, tolerance)) for number, (step, expected) in pairs)
    return next(((number, quantity) for number, quantity in differing if quantity), None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(step: StepRecord) -> dict[str, float | None]:
    return {quantity: _finite(getattr(step, quantity)) for quantity in QUANTITIES}


QUANTITIES = ("loss", "grad_norm")
"""What is compared at every step, in the order in which a step computes it."""


def relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|; infinity if one is not finite or only the reference is 0."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def first_beyond(step: StepRecord, reference: StepRecord, tolerance: float) -> str | None:
    """The first quantity of a step whose relative difference exceeds the tolerance."""
    values = ((name, getattr(step, name), getattr(reference, name)) for name in QUANTITIES)
    return next((name for name, value, expected in values if relative(value, expected) > tolerance), None)
