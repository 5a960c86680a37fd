"""Relative differences of two numbers."""

from __future__ import annotations

import math

from llmrecipes.verify.spec import Step

QUANTITIES = ("loss", "grad_norm")
"""What is compared at every step, in the order in which a step computes it."""


def relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|; infinity if one is not finite or only the reference is 0."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def first_beyond(step: Step, reference: Step, tolerance: float) -> str | None:
    """The first quantity of a step whose relative difference exceeds the tolerance."""
    values = ((name, getattr(step, name), getattr(reference, name)) for name in QUANTITIES)
    return next((name for name, value, expected in values if relative(value, expected) > tolerance), None)
