"""`llmrecipes plan --what-if`: machines, numbers of GPUs and prices compared for a loss, a date or some tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile
from llmrecipes.plan.parameters import count
from llmrecipes.plan.speed.forecast import device_of
from llmrecipes.plan.speed.other_machines import Offer, cheapest, options
from llmrecipes.recipe.derived.batch_schedule import tokens_of
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import load
from llmrecipes.scaling.law import Law

CLUSTERS = ("a100-roce", "h100-ib", "h200-ib")
"""Shipped profiles with coefficients that differ in their GPU."""
GPUS = (64, 128, 256, 512)
MOST_SEARCHES = 24
_MOST_TOKENS = 18
"""Power of ten, as of `--tokens`."""
CHINCHILLA = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
"""Hoffmann et al. 2022 (arXiv 2203.15556), approach 3, section D.3: of their text and tokenizer."""


@dataclass(frozen=True)
class TrainingGoal:
    """What the training is for; at most one of `loss` and `tokens`.

    Attributes:
        loss: in nats per token, to be reached.
        tokens: tokens of the whole training; with neither, the recipe's.
        by: date on which it has ended; it begins now.
        runs: whose scaling law is fitted; a recipe's name is all its runs.
        experiment: MLflow experiment, whose runs are fitted.
    """

    loss: float | None = None
    tokens: float | None = None
    by: datetime | None = None
    runs: tuple[str, ...] = ()
    experiment: str | None = None


@dataclass(frozen=True)
class WhatIf:
    """Machines compared."""

    recipe: str
    tokens: float
    loss: float
    law: Law
    source: str
    by: datetime | None
    options: tuple[Offer, ...]

    @property
    def best(self) -> Offer | None:
        """The cheapest that ends in time."""
        return cheapest(self.options)

    def as_dict(self) -> dict[str, Any]:
        """Output of `plan --what-if --json`."""
        best = self.best
        return {
            "recipe": self.recipe,
            "tokens": self.tokens,
            "loss": self.loss,
            "law": {"source": self.source, **asdict(self.law)},
            "by": None if self.by is None else self.by.date().isoformat(),
            "options": [option.as_dict() for option in self.options],
            "best": None if best is None else best.as_dict(),
        }


def what_if(
    name: str,
    overrides: Sequence[str],
    clusters: Sequence[str],
    gpus: Sequence[int],
    prices: Sequence[str],
    wanted: TrainingGoal,
    runs_dir: Path,
) -> WhatIf:
    """Compare machines for a recipe.

    Args:
        clusters: names or paths of profiles; none: `CLUSTERS`.
        gpus: numbers of GPUs; none: `GPUS`.
        prices: `2.5` for all profiles, or `NAME=2.5`.

    Raises:
        UserError: a profile without coefficients, a loss that no number of tokens reaches, a date that is past.
    """
    recipe = load(name, list(overrides)).recipe
    profiles = [load_profile(cluster) for cluster in clusters or CLUSTERS]
    for profile in profiles:
        if not profile.gpus_per_node:
            raise UserError(f"{profile.name} has no GPUs", where="--clusters", fix="llmrecipes clusters lists them")
        device_of(profile)
    counts = list(gpus or GPUS)
    if len(profiles) * len(counts) > MOST_SEARCHES:
        what = f"{len(profiles)} × {len(counts)} searches"
        raise UserError(
            what, where="--clusters", rule=f"at most {MOST_SEARCHES} are run", fix="use fewer --clusters or --gpus"
        )
    law, source = _law(wanted, runs_dir)
    size = float(count(recipe.model, shape(recipe.model)).active)
    tokens = float(tokens_of(recipe))
    if wanted.tokens is not None:
        tokens = wanted.tokens
    elif wanted.loss is not None:
        tokens = _tokens(law, size, wanted.loss)
    days = None
    if wanted.by is not None:
        days = (wanted.by - datetime.now(UTC)).total_seconds() / 86400
        if days <= 0:
            raise UserError(
                f"{wanted.by.date()} is in the past", where="--by", rule="the date must be after today", fix="--by DATE"
            )
    answers = options(recipe, profiles, counts, tokens, _prices(prices, [profile.name for profile in profiles]), days)
    return WhatIf(recipe.name, tokens, law.loss(size, tokens), law, source, wanted.by, tuple(answers))


def _law(wanted: TrainingGoal, runs_dir: Path) -> tuple[Law, str]:
    if not wanted.runs and wanted.experiment is None:
        return CHINCHILLA, "Hoffmann et al. 2022, approach 3 (their text and tokenizer)"
    from llmrecipes.workflow.scaling import scaling

    law = scaling(wanted.runs, wanted.experiment, runs_dir)
    return law.fit.law, f"{len(law.fit.points)} tracked runs"


def _tokens(law: Law, size: float, loss: float) -> float:
    """Tokens after which a model has a loss."""
    least = law.loss(size, math.inf)
    if not loss > least:
        raise UserError(
            f"{loss:g}",
            where="--loss",
            rule=f"this model stays above {least:.4g} with any number of tokens",
            fix="a larger model, or a higher loss",
        )
    # As a logarithm: a small exponent has a result beyond the range of numbers.
    exponent = math.log10(law.B / (loss - least)) / law.beta
    if not 0 <= exponent <= _MOST_TOKENS:
        takes = "less than a token" if exponent < 0 else f"1e{exponent:.0f} tokens"
        raise UserError(
            f"{loss:g} takes {takes} by the scaling law",
            where="--loss",
            rule=f"1 to 1e{_MOST_TOKENS} tokens",
            fix=f"a loss above {least:.4g}" if exponent > 0 else "a lower loss",
        )
    return 10.0**exponent


def _prices(words: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for word in words:
        name, _, price = word.rpartition("=")
        try:
            prices[name] = float(price)
        except ValueError:
            prices[name] = math.nan
        if (name and name not in names) or not (math.isfinite(prices[name]) and prices[name] > 0):
            raise UserError(
                f"{word!r} is not a price",
                where="--usd-per-gpu-hour",
                rule="a price above 0, or NAME=PRICE of one of --clusters",
                fix=f"{names[0]}=2.5",
            )
    return prices
