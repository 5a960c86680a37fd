"""Who is slow among ranks with the same work, from their own times."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from llmrecipes.faults.stragglers import StragglerWatch, slowness
from llmrecipes.tracking.spread import spread, spread_metrics


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_a_rank_is_compared_with_the_median_of_the_others(ranks: int) -> None:
    own = np.random.default_rng(ranks).uniform(1, 2, ranks)
    expected = [each / statistics.median(np.delete(own, rank)) for rank, each in enumerate(own)]
    assert slowness(own, [1.0]) == pytest.approx(expected)


def test_ranks_of_another_stage_may_take_longer() -> None:
    own = np.array([1.0, 1.0, 3.0, 3.0])
    assert slowness(own, [1.0, 1.0]) == pytest.approx([1, 1, 1, 1])
    assert slowness(np.array([1.0, 2.0, 3.0, 3.0]), [1.0, 1.0]) == pytest.approx([0.5, 2, 1, 1])
    assert slowness(np.array([1.0, 1.0, 2.0]), [1.0, 1.0, 2.0]) == pytest.approx([1, 1, 1]), "by their work"


def test_of_16384_ranks_one_is_reported_at_its_second_report_once() -> None:
    watch = StragglerWatch(0.75, [1.0] * 16)
    own = np.random.default_rng(1).uniform(0.9, 1.1, 16_384)
    assert watch.add(own)[1] == []
    own[5000] = 1.5
    assert watch.add(own)[1] == [], "a single report may be chance"
    factors, (found,) = watch.add(own)
    assert found.rank == 5000
    assert found.factor == pytest.approx(1.5, rel=0.01)
    assert found.usual == pytest.approx(1.0, rel=0.01)
    assert factors.argmax() == 5000
    assert watch.add(own)[1] == []
    own[5000] = 1.0
    own[5001] = 1.5
    assert watch.add(own)[1] == [], "not twice in a row"
    own[5001] = 1.0
    assert watch.add(own)[1] == []


def test_a_rank_on_its_own_has_no_peers() -> None:
    watch = StragglerWatch(0.75, [1.0])
    factors, found = watch.add(np.array([3.0]))
    assert (factors.tolist(), found) == ([1.0], [])


def test_a_spread_names_its_extremes_and_leaves_absent_values_out() -> None:
    values = np.array([np.nan, 3.0, 1.0, 2.0])
    expected = {"min": 1.0, "median": 2.0, "max": 3.0}
    assert spread(values, "rank") == expected | {"min_rank": 2, "max_rank": 1}
    named = spread(values, "node", ["a", "b", "c", "d"])
    assert named == expected | {"min_node": "c", "max_node": "b"}
    assert spread(values[:1], "rank") is None
    assert spread_metrics({"nodes": {"power_watts": named}, "energy": {"kwh": 2, "method": "nvml"}}) == {
        "nodes/power_watts_min": 1.0,
        "nodes/power_watts_median": 2.0,
        "nodes/power_watts_max": 3.0,
        "energy/kwh": 2.0,
    }
    of_ranks = spread_metrics({"ranks": {"slowness": spread(values, "rank")}})
    assert (of_ranks["ranks/slowness_min_rank"], of_ranks["ranks/slowness_max_rank"]) == (2.0, 1.0)


def test_a_layer_has_a_curve_unless_there_are_too_many() -> None:
    few = {"layers": {"grad_norm": {"mlp_fc1": [1.0, None, 3.0], "embedding": 2.0}}}
    assert spread_metrics(few) == {
        "layers/grad_norm/layer_01/mlp_fc1": 1.0,
        "layers/grad_norm/layer_03/mlp_fc1": 3.0,
        "layers/grad_norm/embedding": 2.0,
    }
    many = {"layers": {"grad_norm": {"mlp_fc1": [float(number) for number in range(101)]}}}
    assert spread_metrics(many) == {
        "layers/grad_norm/mlp_fc1_min": 0.0,
        "layers/grad_norm/mlp_fc1_median": 50.0,
        "layers/grad_norm/mlp_fc1_max": 100.0,
    }
