"""Layers have the same norms and attention logits in every layout, and kinds of parameters the same histograms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.dist.measuring import INTERVAL, measured
from tests.dist.table import BOUND, Row, Sections
from tests.dist.worlds import GlooWorld

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MEASURED = {"grad_norm", "weight_norm", "update_norm", "activation_rms", "attention_logit"}
WHOLE: Sections = {"layout": {"use_distributed_optimizer": False}}
LAYOUTS: list[tuple[str, str, Sections]] = [
    ("gpt", "tp2", {}),
    ("gpt with more weights", "tp2 sp", WHOLE),
    ("gpt", "pp2", {}),
    ("gpt", "cp2", {}),
    ("mla", "tp2", {}),
    ("packed llama", "tp2", {}),
    ("gpt", "dp2", {}),
    ("gpt", "dp2", WHOLE),
    ("moe", "dp2 ep2", {}),
    ("moe", "tp2 sp ep2 etp1", {}),
    ("mtp", "dp2", {}),
]


@pytest.fixture(scope="module")
def alone(worlds: dict[int, GlooWorld]) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("model", "layout", "changes"), LAYOUTS)
def test_layers_are_those_of_one_process(
    model: str, layout: str, changes: Sections, alone: dict[str, Any], worlds: dict[int, GlooWorld]
) -> None:
    if model not in alone:
        alone[model] = worlds[1].run(measured, Row(model, "dp1", INTERVAL))
    usual, norms = alone[model]
    found, _ = worlds[2].run(measured, Row(model, layout, {**INTERVAL, **changes}))
    assert usual[0] is None
    assert usual[2] != usual[1]
    for mine, other, norm in zip(found[1:], usual[1:], norms, strict=False):
        assert mine.layers.keys() == MEASURED
        assert math.isclose(math.hypot(*dict(values(mine.layers["grad_norm"])).values()), norm, rel_tol=BOUND)
        for measure, kinds in other.layers.items():
            ours = dict(values(mine.layers[measure]))
            for place, value in values(kinds):
                assert math.isclose(ours.pop(place), value, rel_tol=2 * BOUND, abs_tol=1e-7), (measure, place)
            assert not ours
        assert mine.histograms.keys() == other.histograms.keys()
        for name, kinds in other.histograms.items():
            assert mine.histograms[name].keys() == kinds.keys()
            for kind, bins in kinds.items():
                bins_here, usual_bins = by_bin(mine.histograms[name][kind]), by_bin(bins)
                assert bins_here.total() == usual_bins.total(), (name, kind)
                # A value at the edge of a bin is rounded to either side; those of keys' biases are nothing else.
                assert bins_here[NOISE] == pytest.approx(usual_bins[NOISE], abs=1e-3 * bins_here.total()), (name, kind)
                del bins_here[NOISE], usual_bins[NOISE]
                assert (bins_here - usual_bins).total() <= 1e-3 * bins_here.total() + 1, (name, kind)
    assert found[1].histograms["weight"] == usual[1].histograms["weight"], "initial weights are the same to the bit"


NOISE: tuple[str, int] = "smaller", -30


def by_bin(histogram: Mapping[str, Any]) -> Counter[tuple[str, int]]:
    counts: Counter[tuple[str, int]] = Counter({NOISE: histogram["zero"]})
    for side in ("negative", "positive"):
        for exponent, count in enumerate(histogram[side], histogram["low"]):
            counts[NOISE if exponent < -30 else (side, exponent)] += count
    return counts


def values(kinds: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for kind, value in kinds.items():
        if isinstance(value, list):
            yield from ((f"{kind} {number}", each) for number, each in enumerate(value) if each is not None)
        else:
            yield kind, value
