"""What the benchmark of ZeRO computes with: formulas of the paper, the search, the chart."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.chart import bars
from benchmarks.zero import PLAIN, VARIANTS, recipe_of
from benchmarks.zero_formulas import BF16, BF16_FP32_GRADIENTS, FP32, STAGES, TYPES, held, largest, sent


def test_formulas_give_the_figures_of_the_paper() -> None:
    """Figure 1 of arXiv 1910.02054: 7.5 billion parameters on 64 ranks."""
    gb = [held(7_500_000_000, 64, stage, BF16).total / 1e9 for stage in STAGES]
    assert gb == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_zero_has_copies_of_weights_in_fp32_too() -> None:
    state = [held(100, 1, stage, FP32).optimizer for stage in STAGES]
    assert state == [800, 1200, 1200, 1200]


def test_volumes_are_those_of_the_paper() -> None:
    """Section 7: 2Ψ with and without ZeRO, 3Ψ with partitioned parameters."""
    ranks = 4
    share = (ranks - 1) / ranks
    assert [sent(100, ranks, stage, BF16) / share for stage in STAGES] == [400, 400, 400, 600]
    assert sent(100, ranks, 3, BF16_FP32_GRADIENTS) / share == 800
    assert not any(sent(100, 1, stage, FP32) for stage in STAGES)


@pytest.mark.parametrize("each", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("start", [1, 2, 40, 41, 42, 500])
@pytest.mark.parametrize("limit", [0, 1, 2, 41])
def test_the_search_finds_the_limit_from_any_start_without_a_try_twice(limit: int, start: int, each: float) -> None:
    tries: list[int] = []

    def peak(number: int) -> float | None:
        tries.append(number)
        return number if number <= limit else None

    assert largest(peak, limit, start, each) == limit
    assert len(tries) == len(set(tries))
    assert min(tries) >= 1


def test_every_variant_is_a_valid_recipe() -> None:
    for variant in VARIANTS:
        assert recipe_of(variant, FP32, 2).layout.zero is not None
    for types in TYPES:
        assert recipe_of(PLAIN[3], types, 4).train.global_batch_size == 4


def test_the_chart_has_a_bar_for_each_value_in_proportion() -> None:
    chart = ElementTree.fromstring(bars("a < b", {"one": 1.0, "two": 2.0, "none": 0.0}, "M"))  # noqa: S314 - our own
    namespace = "{http://www.w3.org/2000/svg}"
    widths = [float(each.attrib["width"]) for each in chart.iter(f"{namespace}rect") if "x" in each.attrib]
    assert widths[1] == 2 * widths[0] > 0
    assert widths[2] == 0
