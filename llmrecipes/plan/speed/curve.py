"""Scaling over numbers of GPUs with the fastest layout at each: strong with one global batch, weak with one per GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from llmrecipes.errors import UserError
from llmrecipes.hardware.machine import machine
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.speed.search import Candidate, fastest
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.schema import Recipe

COUNTS = tuple(8 << exponent for exponent in range(12))
"""8 to 16,384 GPUs."""
Kind = Literal["strong", "weak"]


@dataclass(frozen=True)
class CurvePoint:
    """The fastest layout of some GPUs; None with the `reason` where none fits or the batch does not divide."""

    kind: Kind
    gpus: int
    global_batch_size: int
    candidate: Candidate | None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """One row of `plan --scaling-curve --json`."""
        values = {} if self.candidate is None else self.candidate.forecast.as_dict()
        keys = ("tokens_per_second_per_gpu", "mfu_full", "mfu_causal", "step_seconds", "days", "parallelism")
        return {
            "kind": self.kind,
            "gpus": self.gpus,
            "global_batch_size": self.global_batch_size,
            "layout": None if self.candidate is None else self.candidate.key,
            **{key: values.get(key) for key in keys},
            "reason": self.reason or None,
        }


def curve(recipe: Recipe, profile: Profile, reference: int, counts: Iterable[int]) -> list[CurvePoint]:
    """Both curves.

    Args:
        reference: GPUs on which the weak curve has the recipe's global batch.
        counts: numbers of GPUs.
    """
    batch = recipe.train.global_batch_size
    numbers = list(counts)
    points = [_point(recipe, profile, "strong", gpus, batch) for gpus in numbers]
    for gpus in numbers:
        size = max(1, round(batch * gpus / reference))
        points.append(_point(recipe, profile, "weak", gpus, size))
    return points


def _point(recipe: Recipe, profile: Profile, kind: Kind, gpus: int, batch: int) -> CurvePoint:
    train = without_ramp(recipe.train, global_batch_size=batch)
    nodes = -(-gpus // max(1, profile.gpus_per_node))
    try:
        candidate = fastest(recipe.model_copy(update={"train": train}), machine(profile, nodes), gpus, profile, 1)[0]
    except UserError as error:
        return CurvePoint(kind, gpus, batch, None, error.what)
    return CurvePoint(kind, gpus, batch, candidate)
