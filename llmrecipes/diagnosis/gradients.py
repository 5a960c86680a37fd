"""Checks of gradients, layers, experts and the fp16 loss scale."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmrecipes.diagnosis.finding import Lasting, Record, RunFacts, Sighting, median_of, steps_only, value

WINDOW = 20
"""Gradient norms of a median."""
EXPLODES, VANISHES = 10.0, 1e-3
"""Median norm, as a multiple of the lowest and of the first one."""
SPIKES, AMONG = 5, 100
"""Steps among the last ones whose norm may not be `EXPLODES` times the median."""
NO_GRADIENT = 1e-7


class GradientNorm:
    """The norm of all gradients explodes or vanishes: medians, so that one step does not count.

    A norm below the clipping threshold does no harm however fast it grew.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._clip, self._one_batch = facts.clip, facts.one_batch
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._lowest = math.inf
        self._first = 0.0
        self._median: float | None = None
        self._spikes = deque[bool](maxlen=AMONG)
        self._layers: tuple[int, dict[str, float]] | None = None

    def add(self, record: Record) -> Iterator[Sighting]:
        if norms := of_layers(record, "grad_norm"):
            self._layers = record["step"], norms
        norm = value(record, "grad_norm")
        step = record["step"]
        if norm is None or not steps_only(record):
            return
        usual = self._median if len(self._norms) == WINDOW else None
        self._norms.append(norm)
        self._median = median_of(self._norms) if len(self._norms) == WINDOW else None
        if usual is None or self._median is None:
            return
        median = self._median
        self._spikes.append(norm > EXPLODES * usual and norm > self._clip)
        if median > EXPLODES * self._lowest and median > max(self._clip, NO_GRADIENT):
            text = f"the median gradient norm rose from {self._lowest:.3g} to {median:.3g}{self._where()}"
            evidence = {"grad_norm": median, "lowest": self._lowest, "clip_grad": self._clip, **self._largest()}
            yield Sighting("exploding_gradients", step, text, evidence)
        elif self._spikes[-1] and sum(self._spikes) >= SPIKES:
            spikes = sum(self._spikes)
            last = len(self._spikes)
            text = f"in {spikes} of the last {last} steps the gradient norm was over {EXPLODES:.0f} times its median"
            text += self._where()
            evidence = {"spikes": spikes, "steps": last, "grad_norm": norm, "median": usual, "clip_grad": self._clip}
            evidence |= self._largest()
            yield Sighting("exploding_gradients", step, text, evidence)
        if median < max(VANISHES * self._first, NO_GRADIENT) and not self._one_batch:
            text = f"the median gradient norm is {median:.3g}; it was {self._first:.3g} at the start"
            yield Sighting("vanishing_gradients", step, text, {"grad_norm": median, "first": self._first})
        self._lowest, self._first = min(self._lowest, median), self._first or median

    def _largest(self) -> dict[str, Any]:
        """The layer and kind of parameter with the largest norm when layers were last measured."""
        if self._layers is None:
            return {}
        step, norms = self._layers
        name = max(norms, key=lambda name: norms[name])
        return {"layer": name, "layer_grad_norm": norms[name], "layer_step": step}

    def _where(self) -> str:
        most = self._largest()
        return f"; the largest was {most['layer_grad_norm']:.3g}, of {most['layer']}" if most else ""


OF_OTHERS = 1e-4
"""A layer's norm, as a share of the median of all layers."""
TIMES = 3
"""Records with layers in a row."""


class UntrainedLayers:
    """A layer gets no gradient, almost none, or does not change, while the others do."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def add(self, record: Record) -> Iterator[Sighting]:
        kinds = (("grad_norm", "vanishing_gradients"), ("update_norm", "frozen_layer"))
        for kind, rule in kinds:
            norms = of_layers(record, kind)
            if len(norms) < 2:
                continue
            usual = median_of(norms.values())
            for name, norm in norms.items():
                idle = norm == 0.0 if kind == "update_norm" else norm < OF_OTHERS * usual
                self._seen[kind, name] = self._seen[kind, name] + 1 if idle and usual > 0 else 0
            idle_layers = [name for name in norms if self._seen[kind, name] >= TIMES]
            if idle_layers:
                what = (
                    "were not updated" if kind == "update_norm" else f"have gradients below {OF_OTHERS:g} of the median"
                )
                text = f"{', '.join(idle_layers[:8])} {what} ({usual:.3g})"
                evidence = {"layers": idle_layers[:8], "number": len(idle_layers), "median": usual}
                yield Sighting(rule, record["step"], text, evidence)


def of_layers(record: Record, kind: str) -> dict[str, float]:
    """A norm of each layer and kind of parameter; empty if the record does not have it."""
    layers = record.get("layers")
    norms = layers.get(kind) if isinstance(layers, Mapping) else None
    if not isinstance(norms, Mapping):
        return {}
    by_layer: dict[str, float] = {}
    for name, of_layers in norms.items():
        if isinstance(of_layers, list | tuple):
            by_number = {f"layer {number} {name}": each for number, each in enumerate(of_layers, 1)}
            by_layer |= {place: norm for place in by_number if (norm := value(by_number, place)) is not None}
        elif (norm := value(norms, name)) is not None:
            by_layer[str(name)] = norm
    return by_layer


LEAST_LOAD = 0.01
"""Tokens of an expert, as a share of the mean of its layer."""
MEASURED = 5
"""Measurements in a row."""


class DeadExperts:
    """Experts that a router has stopped to choose."""

    def __init__(self, facts: RunFacts) -> None:
        self._warmup = facts.warmup
        self._idle: dict[int, set[int]] = {}
        self._times: Counter[int] = Counter()

    def add(self, record: Record) -> Iterator[Sighting]:
        layers = record.get("experts")
        if not isinstance(layers, list | tuple) or record["step"] <= self._warmup:
            return
        dead: dict[str, list[int]] = {}
        for layer in layers:
            number, tokens, lowest, total = _loads(layer)
            if number is None:
                continue
            least = LEAST_LOAD * total / len(tokens)
            # Most layers have none.
            idle = {expert for expert, count in enumerate(tokens) if count < least} if lowest < least else set()
            still = idle & self._idle.get(number, idle)
            self._idle[number] = still or idle
            self._times[number] = self._times[number] + 1 if still else int(bool(idle))
            if self._times[number] >= MEASURED:
                dead[str(number)] = sorted(still)
        if dead:
            named = "; ".join(f"layer {layer}: {', '.join(map(str, of[:8]))}" for layer, of in [*dead.items()][:8])
            text = f"experts got less than {LEAST_LOAD:.0%} of the mean load in {MEASURED} measurements ({named})"
            yield Sighting("dead_experts", record["step"], text, {"experts": dead})


def _loads(layer: Any) -> tuple[int | None, Sequence[int], int, int]:
    """A layer's number and loads, the lowest and their sum; a run may have millions of them, so few passes in C."""
    nothing = None, (), 0, 0
    if not isinstance(layer, dict | Mapping) or type(layer.get("layer")) is not int:
        return nothing
    counts = layer.get("tokens_per_expert")
    if not isinstance(counts, list | tuple) or len(counts) < 2:
        return nothing
    try:
        lowest = min(counts)
        total = sum(counts)
    except TypeError:  # not all are numbers
        return nothing
    return (layer["layer"], counts, lowest, total) if type(total) is int and lowest >= 0 < total else nothing


SETTLED, OVERFLOWS = 100, 0.1
"""Steps in which a loss scale finds its size, and share of the last ones that may overflow after them."""
SMALLEST_SCALE = 64.0
"""Below it fp16 gradients no longer gain from the scale."""


class LossScale:
    """The fp16 loss scale collapses: gradients overflow again and again."""

    def __init__(self) -> None:
        self._overflows = Lasting(SETTLED, OVERFLOWS)
        self._number = 0

    def add(self, record: Record) -> Iterator[Sighting]:
        scale = value(record, "loss_scale")
        if scale is None:
            return
        self._number += 1
        overflow = bool(record.get("skipped")) and value(record, "grad_norm") is None
        often = self._number > SETTLED and self._overflows.add(overflow)
        if often or scale < SMALLEST_SCALE:
            again = f"and at least {OVERFLOWS:.0%} of the last {SETTLED} steps overflowed" if often else "and falling"
            text = f"the loss scale is {scale:g}, {again}"
            yield Sighting("fp16_scale_collapse", record["step"], text, {"loss_scale": scale, "often": often})
