"""`llmrecipes scaling`: a scaling law over tracked runs, and the optimum for a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.rundir import Run
from llmrecipes.scaling.fit import Fit, fit
from llmrecipes.scaling.law import Point
from llmrecipes.scaling.points import Selection, Tracked, from_directory, from_mlflow, select

COEFFICIENTS = ("E", "A", "B", "alpha", "beta")
BUDGETS = (1.0, 10.0, 100.0)
"""Default budgets, as multiples of the largest run's FLOPs."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Optimum:
    """The compute-optimal training for a budget, with 90 % intervals."""

    flops: float
    best: Point
    parameters: Interval
    tokens: Interval
    loss: Interval


@dataclass(frozen=True)
class ScalingLaw:
    """A fit, the runs it is made of, and the optimum for each budget."""

    fit: Fit
    selection: Selection
    optima: tuple[Optimum, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        law = self.fit.law
        return {
            "law": {
                name: {
                    "value": getattr(law, name),
                    "interval": self.fit.interval(name),
                    "at_bound": self.fit.at_bound(name),
                }
                for name in COEFFICIENTS
            },
            "residual": self.fit.residual,
            "optima": [asdict(optimum) for optimum in self.optima],
            "runs": [
                {"run": name, **asdict(point), "fitted": law.loss(point.parameters, point.tokens)}
                for name, point in zip(self.selection.names, self.selection.points, strict=True)
            ],
            "left_out": [{"run": name, "reason": reason} for name, reason in self.selection.left_out],
        }


def scaling(
    names: Sequence[str],
    experiment: str | None,
    runs_dir: Path,
    *,
    budgets: Sequence[float] = (),
    embeddings: bool = True,
) -> ScalingLaw:
    """Fit the law to runs by name, or to those of an MLflow experiment.

    Args:
        names: as `Run.find` takes them; a recipe's name is all its runs.
        experiment: name of an MLflow experiment, instead of `names`.
        runs_dir: where runs are kept.
        budgets: FLOPs; none: multiples of the largest run's.
        embeddings: whether N includes embeddings and the output layer.

    Raises:
        UserError: no such run or experiment, a budget that is not positive, or runs that do not determine a law.
    """
    if bool(names) == (experiment is not None):
        raise UserError(
            "RUN and --experiment" if names else "no runs",
            where="RUN",
            rule="give either RUN... or --experiment",
            fix="llmrecipes scaling RUN..., or --experiment NAME",
        )
    for budget in budgets:
        if not (math.isfinite(budget) and budget > 0):
            raise UserError(f"{budget:g}", where="--flops", rule="a number of FLOPs above 0", fix="--flops 1e18")
    tracked = from_mlflow(experiment, runs_dir) if experiment is not None else _named(names, runs_dir)
    selection = select(tracked, embeddings=embeddings)
    fitted = fit(selection.points)
    largest = max(point.flops for point in selection.points)
    chosen = budgets or [largest * factor for factor in BUDGETS]
    return ScalingLaw(fitted, selection, tuple(_optimum(fitted, budget) for budget in chosen))


def _named(names: Sequence[str], runs_dir: Path) -> list[Tracked]:
    paths: dict[Path, None] = {}
    for name in names:
        of_recipe = [run.path for run in Run.all(runs_dir, name)]
        for path in of_recipe or [Run.find(name, runs_dir).path]:
            paths[path.resolve()] = None
    return [from_directory(path) for path in paths]


def _optimum(fit_result: Fit, flops: float) -> Optimum:
    parameters, tokens, loss = (fit_result.optimum_interval(flops, name) for name in ("parameters", "tokens", "loss"))
    return Optimum(flops, fit_result.law.optimum(flops), parameters, tokens, loss)
