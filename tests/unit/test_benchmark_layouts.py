"""What the benchmarks of layouts compute with: volumes of collectives, and idle time of pipeline schedules."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.bubble import Pass, formula, idle_share
from benchmarks.layout_overhead import LAYOUTS, recipe_of
from benchmarks.traffic import Call, expected
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import derive

ROOMY = Cluster(gpus=(), cpu_cores=2, memory_bytes=1, memory_available_bytes=1, disk_free_bytes=1)


def test_volumes_are_those_of_the_ring_algorithms() -> None:
    assert Call("all-reduce", 4, 1000).volume == 1500
    assert Call("all-gather", 4, 1000).volume == Call("reduce-scatter", 4, 1000).volume == 750
    assert Call("all-to-all", 2, 1000).volume == 500
    assert Call("message", 4, 1000).volume == 1000


def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[Pass]]:
    """1F1B (arXiv 2104.04473, figure 4)."""
    ranks = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        passes = [Pass("forward", 0, number) for number in range(ahead)]
        for number in range(micro_batches - ahead):
            passes += [Pass("forward", 0, ahead + number), Pass("backward", 0, number)]
        passes += [Pass("backward", 0, number) for number in range(micro_batches - ahead, micro_batches)]
        ranks.append(passes)
    return ranks


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_replayed_1f1b_idles_as_long_as_the_paper_says(stages: int, micro_batches: int) -> None:
    ranks = one_forward_one_backward(stages, micro_batches)
    found = idle_share(ranks, 1, lambda _stage, each: 1.0 if each.kind == "forward" else 2.0)
    assert found == pytest.approx(formula(stages, micro_batches, 1), abs=1e-12)


def test_a_slow_stage_lets_the_others_idle() -> None:
    ranks = one_forward_one_backward(2, 4)
    assert idle_share(ranks, 1, lambda stage, _each: 1.0 + stage) > formula(2, 4, 1)


def test_deadlocked_schedules_are_reported() -> None:
    forward, backward = Pass("forward", 0, 0), Pass("backward", 0, 0)
    with pytest.raises(ValueError, match="wait for each other"):
        idle_share([[backward, forward], [forward, backward]], 1, lambda _stage, _each: 1.0)


def bytes_of(name: str) -> Counter[str]:
    layout = LAYOUTS[name]
    found: Counter[str] = Counter()
    for call, number in expected(derive(recipe_of(layout), layout.ranks, ROOMY)).items():
        found[call.kind] += int(call.volume * number)
    return found


def test_formulas_relate_the_layouts_as_the_papers_do() -> None:
    assert not bytes_of("one")
    # ZeRO-1 sends what an all-reduce does (arXiv 1910.02054, section 7.2.1).
    assert bytes_of("dp2").total() == bytes_of("dp2, whole optimizer")["all-reduce"]
    # Sequence parallelism gathers two activations of a layer once more.
    assert bytes_of("tp2 sp").total() / bytes_of("tp2").total() == pytest.approx(1.25, abs=0.05)
    assert bytes_of("pp2 vpp2")["message"] == 3 * bytes_of("pp2")["message"]
    assert set(bytes_of("moe ep2")) == {"all-to-all", "all-gather", "reduce-scatter"}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("name", ["tp2 sp", "cp2", "pp2 vpp2", "moe ep2"])
def test_a_layout_sends_what_it_has_to(name: str) -> None:
    """Collectives of a real step on two ranks, against the formulas."""
    from benchmarks.layout_overhead import ALLOWED, measure, over

    row = measure(LAYOUTS[name], warmup=1, steps=1)
    assert row["expected_bytes"] > 0
    assert abs(over(row)) <= ALLOWED
    assert row["calls"] == pytest.approx(row["expected_calls"], rel=0.05)
