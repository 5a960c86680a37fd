"""The same training on other machines: the best layout of each, and its days, price and energy for some tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.machine import machine
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.speed.search import Candidate, fastest
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import GIB

_SECONDS_OF_A_DAY = 86400


@dataclass(frozen=True)
class Offer:
    """A machine, and what the training takes on it with the layout that a search finds fastest.

    Attributes:
        candidate: None: no layout fits, for `reason`.
        days: with saves and failures, where the profile has these; None: without an end.
        cost_usd, energy_mwh: None: no price, or no power in the profile.
        in_time: whether it ends by the date; None: there is none.
    """

    cluster: str
    gpu: str
    gpus: int
    candidate: Candidate | None
    days: float | None = None
    gpu_hours: float | None = None
    cost_usd: float | None = None
    energy_mwh: float | None = None
    in_time: bool | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """One row of `plan --what-if --json`."""
        forecast = None if self.candidate is None else self.candidate.forecast
        return {
            "cluster": self.cluster,
            "gpu": self.gpu,
            "gpus": self.gpus,
            "layout": None if self.candidate is None else self.candidate.key,
            "parallelism": None if forecast is None else forecast.as_dict()["parallelism"],
            "tokens_per_second_per_gpu": None if forecast is None else forecast.tokens_per_second_per_gpu,
            "mfu_full": None if forecast is None else forecast.as_dict()["mfu_full"],
            "memory_gib": None if forecast is None else forecast.plan.memory.total / GIB,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost_usd": self.cost_usd,
            "energy_mwh": self.energy_mwh,
            "in_time": self.in_time,
            "reason": self.reason or None,
        }


def options(
    recipe: Recipe,
    profiles: Iterable[Profile],
    counts: Iterable[int],
    tokens: float,
    prices: Mapping[str, float],
    most_days: float | None,
) -> list[Offer]:
    """Search each machine, and compare what it takes.

    Args:
        tokens: of the whole training.
        prices: dollars per GPU-hour by profile, over the profile's own; the empty name stands for all.
        most_days: until the date; None: any time will do.
    """
    numbers = list(counts)
    return [_option(recipe, profile, gpus, tokens, prices, most_days) for profile in profiles for gpus in numbers]


def _option(
    recipe: Recipe, profile: Profile, gpus: int, tokens: float, prices: Mapping[str, float], most_days: float | None
) -> Offer:
    name = "" if profile.gpu is None else profile.gpu.name
    nodes = -(-gpus // max(1, profile.gpus_per_node))
    try:
        candidate = fastest(recipe, machine(profile, nodes), gpus, profile, 1)[0]
    except UserError as error:
        return Offer(profile.name, name, gpus, None, reason=f"{error.what}: {error.fix}" if error.fix else error.what)
    forecast = candidate.forecast
    seconds = tokens / (forecast.tokens_per_second_per_gpu * gpus)
    share = 1.0
    if (
        forecast.saving is not None
        and (effective := forecast.saving.effective(forecast.saving.best_interval)) is not None
    ):
        share = effective
    days = seconds / share / _SECONDS_OF_A_DAY if share > 0 else None
    hours = None if days is None else days * 24 * gpus
    costs = profile.costs
    price = prices.get(profile.name, prices.get("", None if costs is None else costs.usd_per_gpu_hour))
    watts = None if costs is None or costs.watts_per_gpu is None else costs.watts_per_gpu * costs.pue
    return Offer(
        cluster=profile.name,
        gpu=name,
        gpus=gpus,
        candidate=candidate,
        days=days,
        gpu_hours=hours,
        cost_usd=None if price is None or hours is None else hours * price,
        energy_mwh=None if watts is None or hours is None else hours * watts / 1e6,
        in_time=None if most_days is None else days is not None and days <= most_days,
    )


def cheapest(all_options: Iterable[Offer]) -> Offer | None:
    """The one that costs least, or takes the fewest GPU-hours where a price is missing, of those that end in time."""
    able = [option for option in all_options if option.days is not None and option.in_time is not False]
    priced = all(option.cost_usd is not None for option in able)

    def price(option: Offer) -> tuple[float, float]:
        value = option.cost_usd if priced else option.gpu_hours
        return (math.inf if value is None else value), option.days or math.inf

    return min(able, key=price, default=None)
