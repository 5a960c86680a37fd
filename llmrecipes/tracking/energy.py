"""What a run has used in all its starts: joules, kWh and carbon by the factors of a cluster, and how that is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from llmrecipes.tracking.events import ENERGY, STARTED
from llmrecipes.untrusted import number

if TYPE_CHECKING:  # profiles load pydantic
    from llmrecipes.hardware.profile import Costs

JOULES_PER_KWH = 3.6e6
MEASURED = ("nvml", "rapl")
"""Counters of GPUs and processors. `codecarbon` is its model of processors and memory, `profile` the time of all ranks
by `costs.watts_per_gpu` of a cluster profile."""


@dataclass(frozen=True)
class Energy:
    """Energy of a run so far.

    Attributes:
        joules: joules of its machines.
        kwh: the same with the PUE of the building, which is 1 without a profile.
        kg_co2: None: a start had no `costs.kg_co2_per_kwh`.
        methods: how it is known.
    """

    joules: float = 0.0
    kwh: float = 0.0
    kg_co2: float | None = 0.0
    methods: tuple[str, ...] = ()

    def plus(self, joules: float, methods: Iterable[str], costs: Costs | None) -> Energy:
        """With what was used since."""
        kwh = joules / JOULES_PER_KWH * (1.0 if costs is None else costs.pue)
        factor = None if costs is None else costs.kg_co2_per_kwh
        carbon = None if factor is None or self.kg_co2 is None else self.kg_co2 + kwh * factor
        all_methods = tuple(dict.fromkeys((*self.methods, *methods)))
        return Energy(self.joules + joules, self.kwh + kwh, carbon, all_methods)

    def by(self, costs: Costs | None) -> Energy:
        """With the factors of another profile; without one, or with one that has only a price, as it is."""
        if costs is None or not costs.model_fields_set & {"pue", "kg_co2_per_kwh"}:
            return self
        return Energy().plus(self.joules, self.methods, costs)

    def values(self, tokens: int | None = None) -> dict[str, Any]:
        """As metrics.jsonl has it; empty if nothing is known.

        Args:
            tokens: that the run has consumed; None: they are not compared with it.
        """
        if not self.joules:
            return {}
        values: dict[str, Any] = {"total_joules": self.joules, "kwh": self.kwh}
        values |= {} if self.kg_co2 is None else {"kg_co2": self.kg_co2}
        values |= {} if tokens is None else {"run_tokens_per_joule": tokens / self.joules}
        return values | {"method": "+".join(self.methods)}

    def details(self, tokens: int) -> dict[str, Any]:
        """Values for the note `energy` at the end of a start, by the names of metrics.

        Args:
            tokens: that the run has consumed.
        """
        return {f"energy/{name}": value for name, value in self.values(tokens).items()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self | None:
        """What a line of metrics.jsonl says; None: nothing."""
        details = record.get("details")
        values = record.get("energy")
        if isinstance(details, Mapping) and record.get("event") == STARTED:
            values = details.get("energy")
        elif isinstance(details, Mapping) and record.get("event") == ENERGY:
            values = {name.removeprefix("energy/"): value for name, value in details.items()}
        if not isinstance(values, Mapping):
            return None
        joules, kwh = number(values.get("total_joules")), number(values.get("kwh"))
        if joules is None or kwh is None or joules <= 0:
            return None
        return cls(joules, kwh, number(values.get("kg_co2")), tuple(str(values.get("method", "unknown")).split("+")))

    def how(self) -> str:
        """In words, for people."""
        measured = [name for name in self.methods if name in MEASURED]
        words = [f"measured by {' and '.join(measured)}"] if measured else []
        words += ["modelled by codecarbon"] if "codecarbon" in self.methods else []
        words += ["estimated from a cluster profile"] if "profile" in self.methods else []
        return ", ".join(words) or "unknown"

    def line(self, tokens: int) -> str:
        """One line for the summary."""
        carbon = "" if self.kg_co2 is None else f", {self.kg_co2:,.3g} kg CO2"
        return f"energy: {self.kwh:,.3g} kWh{carbon}, {tokens / self.joules:,.3g} tokens a joule, {self.how()}"


def energy_rows(runs: Sequence[Energy | None], tokens: Sequence[float], unknown: str) -> Iterator[tuple[str, ...]]:
    """Rows of a comparison of runs, without those that no run has.

    Args:
        tokens: that each run has consumed.
        unknown: value for a run that has no such number.
    """
    carbon = [None if run is None else run.kg_co2 for run in runs]
    rates = zip(runs, tokens, strict=True)
    if any(run is not None for run in runs):
        yield ("energy, kWh", *(unknown if run is None else f"{run.kwh:,.3g}" for run in runs))
        if any(kg is not None for kg in carbon):
            yield ("carbon, kg CO2", *(unknown if kg is None else f"{kg:,.3g}" for kg in carbon))
        yield ("tokens a joule", *(unknown if each is None else f"{count / each.joules:,.3g}" for each, count in rates))
        yield ("energy is", *(unknown if run is None else run.how() for run in runs))
