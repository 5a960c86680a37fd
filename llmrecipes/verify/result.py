"""What a verification came to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmrecipes.verify.scale import QUANTITIES, first_beyond, relative
from llmrecipes.verify.spec import Record, Step

PARAMETERS = "parameters"


@dataclass(frozen=True)
class FirstTensor:
    """The first tensor, in the order of the model, that differs, and how many do."""

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
    """From 1."""
    quantity: str
    """`loss`, `grad_norm`, or `parameters` where all of those agree but the weights after the last step do not."""
    reference: float
    layout: float
    tensor: FirstTensor | None
    """None where every single tensor agrees."""

    def as_dict(self) -> dict[str, Any]:
        """JSON values; numbers that are not finite are null."""
        return {
            "step": self.step,
            "quantity": self.quantity,
            "reference": _finite(self.reference),
            "layout": _finite(self.layout),
            "first_tensor": self.tensor.name if self.tensor else None,
            "layer": self.tensor.layer if self.tensor else None,
        }


@dataclass(frozen=True)
class Result:
    """A layout beside one process."""

    recipe: str
    tolerance: float
    reference: Record
    layout: Record
    max_rel_param: float
    """Worst of all weights after the last step."""
    first_difference: FirstDifference | None

    @property
    def ok(self) -> bool:
        """Whether all losses, gradient norms and weights agree within the tolerance."""
        return self.first_difference is None

    @property
    def steps(self) -> list[tuple[Step, Step]]:
        """(reference, layout) of every step."""
        return list(zip(self.reference.steps, self.layout.steps, strict=True))

    def max_relative(self, quantity: str) -> float:
        """Largest relative difference of `loss` or `grad_norm` over the steps."""
        return max(relative(getattr(layout, quantity), getattr(one, quantity)) for one, layout in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints; numbers that are not finite are null."""
        return {
            "recipe": self.recipe,
            "layout": self.layout.layout,
            "iters": len(self.layout.steps),
            **{f"max_rel_{quantity}": _finite(self.max_relative(quantity)) for quantity in QUANTITIES},
            "max_rel_param": _finite(self.max_rel_param),
            "ok": self.ok,
            "first_difference": self.first_difference.as_dict() if self.first_difference else None,
        }

    def as_record(self) -> dict[str, Any]:
        """`as_dict` with every step, for verify.json."""
        steps = [{"reference": _numbers(one), "layout": _numbers(layout)} for one, layout in self.steps]
        return {**self.as_dict(), "tolerance": self.tolerance, "steps": steps}


def first_differing_step(reference: Record, layout: Record, tolerance: float) -> tuple[int, str] | None:
    """(step from 1, quantity) of the first loss or gradient norm beyond the tolerance."""
    pairs = enumerate(zip(layout.steps, reference.steps, strict=True), start=1)
    found = ((number, first_beyond(step, expected, tolerance)) for number, (step, expected) in pairs)
    return next(((number, quantity) for number, quantity in found if quantity), None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(step: Step) -> dict[str, float | None]:
    return {quantity: _finite(getattr(step, quantity)) for quantity in QUANTITIES}
