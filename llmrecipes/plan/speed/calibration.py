"""What measured runs say about predictions: errors, bias by kind of run, and factors for kernels and communication."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmrecipes.hardware.profile import Calibration

LEAST_SHARE = 0.03
"""Of communication in a step, below which a run says nothing about it."""
LEAST_ANGLE = 0.05
"""Sine of the angle between kernels and communication over runs, below which runs do not tell them apart."""
_LEAST, _MOST = 1e-9, 1e18
"""Seconds and bytes that a run can have."""
_DEGREES = ("tensor", "pipeline", "context", "expert", "data")


@dataclass(frozen=True)
class MeasuredRun:
    """A run that recorded its prediction and what it measured.

    Attributes:
        device: name of its GPU's coefficients, or of the profile of a machine without GPUs.
        layout: which degrees are above one, such as `tensor+data`.
        compute, communication: predicted seconds of a step, without calibration.
        predicted: seconds of a step as the plan had them, with the calibration of then.
        measured: seconds of a step.
        predicted_memory, measured_memory: bytes of the fullest rank.
    """

    name: str
    device: str
    layout: str
    compute: float
    communication: float
    predicted: float
    measured: float
    predicted_memory: float
    measured_memory: float

    @property
    def error(self) -> float:
        """Relative, of the step's time; positive: predicted too slow."""
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        """Relative, of memory; positive: predicted too large."""
        return self.predicted_memory / self.measured_memory - 1

    def corrected(self, by: Calibration) -> float:
        """Relative error of the step's time with these factors."""
        return (by.compute * self.compute + by.communication * self.communication) / self.measured - 1


def tracked(name: str, degrees: dict[str, int], predicted: dict[str, Any], measured: dict[str, float]) -> MeasuredRun:
    """A run of its records.

    Args:
        degrees: size of each of `tensor`, `pipeline`, `context`, `expert` and `data`.
        predicted: `Forecast.record`.
        measured: details of the note `measured`.

    Raises:
        ValueError, TypeError, OverflowError: a figure is not a number, or one that no run has.
        KeyError: it is missing.
    """
    before = Calibration.model_validate(predicted.get("calibration") or {"runs": 1})
    run = MeasuredRun(
        name=name,
        device=str(predicted["device"]),
        layout="+".join(kind for kind in _DEGREES if degrees.get(kind, 1) > 1) or "one rank",
        compute=float(predicted["compute_seconds"]) / before.compute,
        communication=float(predicted["communication_seconds"]) / before.communication,
        predicted=float(predicted["step_seconds"]),
        measured=float(measured["measured/step_seconds"]),
        predicted_memory=float(predicted["memory_bytes"]),
        measured_memory=float(measured["measured/memory_bytes"]),
    )
    figures = (run.compute, run.predicted, run.measured, run.predicted_memory, run.measured_memory)
    if not all(_LEAST <= figure <= _MOST for figure in figures) or not 0 <= run.communication <= _MOST:
        message = f"{name}: implausible figures"
        raise ValueError(message)
    return run


@dataclass(frozen=True)
class FactorFit:
    """Factors of one device, and what its runs do not say."""

    device: str
    calibration: Calibration
    median_error: float
    """Of the runs as predicted, absolute."""
    corrected_error: float
    """Of the same runs with the factors, absolute: not of other runs."""
    unknown: str
    """Why a factor is not known by itself; empty if both are."""


def fit(runs: Sequence[MeasuredRun]) -> FactorFit:
    """The factors with the least squares of relative errors.

    Args:
        runs: of one device, at least one.
    """
    share = [(run.compute / run.measured, run.communication / run.measured) for run in runs]
    cc, mm = math.fsum(c * c for c, _ in share), math.fsum(m * m for _, m in share)
    cm = math.fsum(c * m for c, m in share)
    c1 = math.fsum(c for c, _ in share)
    m1 = math.fsum(m for _, m in share)
    determinant = cc * mm - cm * cm
    compute = c1 / cc
    communication = 1.0
    unknown = ""
    telling = sum(run.communication >= LEAST_SHARE * (run.compute + run.communication) for run in runs)
    if not telling:
        # The little communication there is keeps its prediction.
        compute = math.fsum(c * (1 - m) for c, m in share) / cc
        unknown = f"communication: less than {LEAST_SHARE:.0%} of the step in all runs"
    elif len(runs) < 2 or determinant < LEAST_ANGLE**2 * cc * mm:
        whole = math.fsum((c + m) ** 2 for c, m in share)
        compute = communication = math.fsum(c + m for c, m in share) / whole
        unknown = "kernels and communication separately: all runs have the same shares of both, so one factor is fitted"
    else:
        compute = (c1 * mm - m1 * cm) / determinant
        communication = (m1 * cc - c1 * cm) / determinant
        if min(compute, communication) <= 0:
            compute = math.fsum(c * (1 - m) for c, m in share) / cc
            communication = 1.0
            unknown = "communication: no positive factor fits the runs"
    if compute <= 0:
        compute = c1 / cc
    factors = Calibration(compute=compute, communication=communication, runs=len(runs))
    return FactorFit(
        device=runs[0].device,
        calibration=factors,
        median_error=statistics.median(abs(run.error) for run in runs),
        corrected_error=statistics.median(abs(run.corrected(factors)) for run in runs),
        unknown=unknown,
    )


@dataclass(frozen=True)
class Bias:
    """Median relative errors of the runs of a device with one kind of layout."""

    device: str
    layout: str
    runs: int
    step: float
    memory: float


@dataclass(frozen=True)
class CalibrationReport:
    """Errors over runs, and the factors of each device."""

    runs: tuple[MeasuredRun, ...]
    left_out: tuple[tuple[str, str], ...]
    bias: tuple[Bias, ...]
    fits: tuple[FactorFit, ...]

    def as_dict(self) -> dict[str, Any]:
        """Output of `plan --calibration --json`."""
        return {
            "runs": [asdict(run) | {"error": run.error, "memory_error": run.memory_error} for run in self.runs],
            "bias": [asdict(row) for row in self.bias],
            "calibration": [
                {
                    "device": fit.device,
                    **fit.calibration.model_dump(mode="json"),
                    "median_error": fit.median_error,
                    "corrected_error": fit.corrected_error,
                    "unknown": fit.unknown or None,
                }
                for fit in self.fits
            ],
            "left_out": [{"run": name, "reason": reason} for name, reason in self.left_out],
        }


def report(runs: Iterable[MeasuredRun], left_out: Iterable[tuple[str, str]]) -> CalibrationReport:
    """Compare all runs."""
    known = sorted(runs, key=lambda run: (run.device, run.layout, run.name))
    groups: dict[tuple[str, str], list[MeasuredRun]] = {}
    devices: dict[str, list[MeasuredRun]] = {}
    for run in known:
        groups.setdefault((run.device, run.layout), []).append(run)
        devices.setdefault(run.device, []).append(run)
    bias = [
        Bias(
            device,
            layout,
            len(some),
            statistics.median(run.error for run in some),
            statistics.median(run.memory_error for run in some),
        )
        for (device, layout), some in groups.items()
    ]
    return CalibrationReport(tuple(known), tuple(left_out), tuple(bias), tuple(fit(some) for some in devices.values()))
