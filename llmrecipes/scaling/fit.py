"""Fitting the law: approach 3 of Hoffmann et al. (arXiv 2203.15556, section 3.3 and appendix D.3).

The Huber loss of the residuals of log L, by L-BFGS from a grid of starts. It is summed over runs and not averaged
(Besiroglu et al., arXiv 2404.10102): averaged, the optimizer stops early and the intervals become too narrow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmrecipes.errors import UserError
from llmrecipes.scaling.law import Law, Point

Array: TypeAlias = NDArray[np.float64]

HUBER_DELTA = 1e-3
LEAST_RUNS = 6
"""One more than the law has coefficients."""
LEAST_SIZES = 3
"""Different N, and different D: an exponent with an offset needs three."""
MOST_CORRELATION = 0.98
"""Of log N and log D over runs. If tokens follow from the size, the two terms cannot be told apart."""
INTERVAL = (5.0, 95.0)
"""Percentiles of the bootstrap."""
RESAMPLES = 200
LEAST_TERM = 1e-4
"""Of a term at the centre of the runs relative to E, and of E relative to a loss: a smaller one is not determined."""
MOST_DRAWS = 20
"""Draws for each bootstrap sample; those that do not determine a law are drawn again."""
STARTS = 30
"""The starts of the grid with the lowest objective, which are optimized."""
_EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0)
_LOG_FACTORS = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)
_LOG_E = (-1.0, -0.5, 0.0, 0.5, 1.0)
_BOUNDS = ((-40.0, 40.0), (-40.0, 40.0), (-20.0, 20.0), (1e-3, 5.0), (1e-3, 5.0))
_EXPONENT_OF = {"alpha": 3, "beta": 4}
"""Places of the exponents among the fitted values."""


@dataclass(frozen=True)
class Fit:
    """The law of some runs, and those of bootstrap samples of them."""

    points: tuple[Point, ...]
    law: Law
    resampled: tuple[Law, ...]

    @property
    def residual(self) -> float:
        """Root mean square of the residuals of log L: the usual relative error."""
        errors = [math.log(point.loss / self.law.loss(point.parameters, point.tokens)) for point in self.points]
        return math.sqrt(math.fsum(error**2 for error in errors) / len(errors))

    def interval(self, name: str) -> tuple[float, float]:
        """90 % interval of a coefficient of the law, by its name."""
        return self._percentiles([getattr(law, name) for law in self.resampled])

    def optimum_interval(self, flops: float, name: str) -> tuple[float, float]:
        """90 % interval of `parameters`, `tokens` or `loss` of the optimum for a budget."""
        return self._percentiles([getattr(law.optimum(flops), name) for law in self.resampled])

    def at_bound(self, name: str) -> float:
        """Share of bootstrap samples in which E is 0, or an exponent is at a bound: they do not determine it."""
        result = [
            _is_at_bound(name, getattr(law, name)) if name != "E" else self._is_zero(law) for law in self.resampled
        ]
        return sum(result) / len(result)

    @property
    def has_offset(self) -> bool:
        """Whether E is above 0: otherwise the runs do not show where the loss levels off."""
        return not self._is_zero(self.law)

    def _is_zero(self, law: Law) -> bool:
        return law.E / min(point.loss for point in self.points) < LEAST_TERM

    @staticmethod
    def _percentiles(values: list[float]) -> tuple[float, float]:
        low, high = np.percentile(values, INTERVAL)
        return float(low), float(high)


def fit(points: Sequence[Point], *, seed: int = 0, resamples: int | None = None) -> Fit:
    """Fit the law to finished runs.

    Args:
        points: one for each run.
        seed: of the bootstrap, which draws runs with replacement.
        resamples: number of bootstrap samples; None: `RESAMPLES`.

    Raises:
        UserError: there are too few runs, or they do not determine the law.
    """
    require_enough(points)
    data = _Data.of(points)
    starts = data.starts()
    best = min((data.optimize(start) for start in starts), key=lambda result: result[0])[1]
    _require_terms(best)
    wanted = RESAMPLES if resamples is None else resamples
    resampled: list[Law] = []
    for chosen in _draws(len(points), seed, wanted * MOST_DRAWS):
        if _obstacle([points[number] for number in chosen]) is not None:
            continue  # such runs would not be fitted either
        # From the fit, and from the grid, because the objective has several minima.
        tried = [data.taking(chosen).optimize(start) for start in (best, starts[0])]
        resampled.append(data.law(min(tried, key=lambda result: result[0])[1]))
        if len(resampled) == wanted:
            break
    else:
        raise UserError(
            f"{len(resampled)} of {wanted * MOST_DRAWS} bootstrap samples determine a law",
            where="RUN",
            rule="confidence intervals need more runs than the minimum that determines a law",
            fix="more runs with other sizes and numbers of tokens",
        )
    return Fit(tuple(points), data.law(best), tuple(resampled))


def _draws(runs: int, seed: int, most: int) -> Iterator[NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    return (random.integers(runs, size=runs) for _ in range(most))


def require_enough(points: Sequence[Point]) -> None:
    """Refuse runs that do not determine the law.

    Raises:
        UserError: what they lack.
    """
    if len(points) < LEAST_RUNS:
        raise UserError(
            f"only {len(points)} finished runs with different sizes or tokens",
            where="RUN",
            rule=f"the law has 5 coefficients: a fit needs at least {LEAST_RUNS} runs",
            fix="finish more runs; llmrecipes runs shows their state",
        )
    if obstacle := _obstacle(points):
        raise UserError(
            obstacle,
            where="RUN",
            rule=f"a fit needs at least {LEAST_SIZES} sizes and {LEAST_SIZES} numbers of tokens, varied independently",
            fix="train every size for several numbers of tokens",
        )


def _obstacle(points: Sequence[Point]) -> str | None:
    sizes = {point.parameters for point in points}
    tokens = {point.tokens for point in points}
    if min(len(sizes), len(tokens)) < LEAST_SIZES:
        return f"{len(sizes)} sizes and {len(tokens)} numbers of tokens"
    values = np.log([[point.parameters, point.tokens] for point in points])
    correlation = float(np.corrcoef(values.T)[0, 1])
    if abs(correlation) > MOST_CORRELATION:
        return f"the number of tokens is determined by the size (correlation of logarithms {correlation:.3f})"
    if len({point.loss for point in points}) == 1:
        return f"all runs have loss {points[0].loss:g}"
    return None


def _is_at_bound(name: str, value: float) -> bool:
    if name not in _EXPONENT_OF:
        return False
    low, high = _BOUNDS[_EXPONENT_OF[name]]
    return not low * 1.01 < value < high * 0.99


def _require_terms(values: Array) -> None:
    for term, coefficient, name, what in ((0, "alpha", "A/N^alpha", "parameters"), (1, "beta", "B/D^beta", "tokens")):
        exponent = float(values[_EXPONENT_OF[coefficient]])
        if math.exp(values[term] - values[2]) < LEAST_TERM or _is_at_bound(coefficient, exponent):
            raise UserError(
                f"these runs do not determine {name}: their loss does not fall with {what} as a power law",
                where="RUN",
                rule="a fit must determine both terms of the law",
                fix="runs over a wider range of sizes and tokens, each with a tuned learning rate",
            )


@dataclass(frozen=True)
class _Data:
    """Logarithms of runs, N and D relative to their means: coefficients at the centre are less correlated."""

    sizes: Array
    tokens: Array
    losses: Array
    centre: tuple[float, float]

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Data:
        sizes, tokens, losses = np.log([[p.parameters, p.tokens, p.loss] for p in points]).T
        centre = (float(sizes.mean()), float(tokens.mean()))
        return cls(sizes - centre[0], tokens - centre[1], losses, centre)

    def taking(self, chosen: NDArray[np.int64]) -> _Data:
        return _Data(self.sizes[chosen], self.tokens[chosen], self.losses[chosen], self.centre)

    def law(self, values: Array) -> Law:
        a, b, e, alpha, beta = (float(value) for value in values)
        return Law(
            math.exp(e),
            math.exp(a + alpha * self.centre[0]),
            math.exp(b + beta * self.centre[1]),
            alpha,
            beta,
        )

    def starts(self) -> list[Array]:
        """The most promising points of the paper's grid."""
        grid = np.array(list(itertools.product(_LOG_FACTORS, _LOG_FACTORS, _LOG_E, _EXPONENTS, _EXPONENTS)))
        grid[:, 0] -= grid[:, 3] * self.centre[0]
        grid[:, 1] -= grid[:, 4] * self.centre[1]
        grid = np.clip(grid, *np.array(_BOUNDS).T)
        a, b, e, alpha, beta = grid.T[:, :, None]
        terms = np.stack([a - alpha * self.sizes, b - beta * self.tokens, e + 0 * self.sizes])
        size = np.abs(np.logaddexp.reduce(terms) - self.losses)
        costs = np.where(size <= HUBER_DELTA, size**2 / 2, HUBER_DELTA * (size - HUBER_DELTA / 2)).sum(axis=1)
        return list(grid[np.argsort(costs, kind="stable")[:STARTS]])

    def optimize(self, start: Array) -> tuple[float, Array]:
        """(objective, coefficients) of the minimum that L-BFGS finds."""
        from scipy.optimize import minimize  # not at the top: it takes a third of a second

        result = minimize(
            self.objective,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=_BOUNDS,
            options={"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-10},
        )
        return float(result.fun), np.asarray(result.x, dtype=np.float64)

    def objective(self, values: Array) -> tuple[float, Array]:
        """Summed Huber loss of log L, and its gradient."""
        a, b, e, alpha, beta = values
        terms = np.stack([a - alpha * self.sizes, b - beta * self.tokens, np.full_like(self.sizes, e)])
        highest = terms.max(axis=0)
        shares = np.exp(terms - highest)
        total = shares.sum(axis=0)
        residual = highest + np.log(total) - self.losses
        shares /= total
        size = np.abs(residual)
        inside = size <= HUBER_DELTA
        cost = np.where(inside, residual**2 / 2, HUBER_DELTA * (size - HUBER_DELTA / 2)).sum()
        slope = np.clip(residual, -HUBER_DELTA, HUBER_DELTA)
        by_size, by_tokens, constant = shares * slope
        gradient = np.array(
            [
                by_size.sum(),
                by_tokens.sum(),
                constant.sum(),
                -(by_size * self.sizes).sum(),
                -(by_tokens * self.tokens).sum(),
            ]
        )
        # L-BFGS stops at an absolute size of the gradient; this makes it one of the residuals.
        return float(cost / HUBER_DELTA**2), gradient / HUBER_DELTA**2
