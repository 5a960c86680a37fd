"""What `python -m benchmarks.mup` makes of its losses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.mup import BASE, RATES, WIDTHS, best, curves, draw, key, recipe
from llmrecipes.recipe.derived.shape import mup
from llmrecipes.recipe.rules.recipe_rules import check

SEEDS = 2


def losses() -> dict[str, float]:
    """The best rate is 2^-7 at the base, half of that at each doubling of the width without the parametrisation."""
    found = {}
    for width in WIDTHS:
        for use_mup in (False, True):
            lowest = -7 if use_mup else -7 - math.log2(width / BASE)
            for exponent in RATES:
                for seed in range(SEEDS):
                    loss = 3 + (exponent - lowest) ** 2 / 10 + seed / 100
                    found[key(use_mup, width, exponent, seed)] = math.nan if exponent > -5 else loss
    return found


def test_the_best_rate_of_each_width_is_found_and_drawn(tmp_path: Path) -> None:
    found = losses()
    for use_mup, exponents in ((True, [-7] * 4), (False, [-7, -8, -9, -10])):
        reached = [best(found, use_mup, width, SEEDS) for width in WIDTHS]
        assert [each and each[0] for each in reached] == exponents
        assert [each and each[1] for each in reached] == pytest.approx([3.005] * 4)
    assert best({}, True, 128, 1) is None
    assert max(curves(found, True, [128], SEEDS)[128]) == -5, "a diverged training has no place in a curve"
    draw(found, list(WIDTHS), SEEDS, tmp_path / "transfer.svg")
    assert (tmp_path / "transfer.svg").stat().st_size > 1000


def test_at_the_base_width_both_are_the_same_training() -> None:
    assert key(True, BASE, -7, 0) == key(False, BASE, -7, 0)
    assert key(True, 128, -7, 0) != key(False, 128, -7, 0)
    for width in WIDTHS:
        job = recipe(width, 2**-7, use_mup=True, steps=100, seed=0)
        assert check(job) == []
        factors = mup(job.model)
        assert factors is not None
        assert (factors.width_mult, factors.softmax_scale) == (width / BASE, 0.25)
