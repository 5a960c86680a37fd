"""The largest attention logit is that of all scores, and histograms count every value once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from llmrecipes.engine.core.model import attention_logits
from llmrecipes.engine.core.model.attention import attention_mask
from llmrecipes.engine.core.model.attention_logits import largest_logit
from llmrecipes.engine.parts.gradient_histograms import BINS, HIGH, LOW, count, histogram


def made(heads: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(24, 2, heads, 8, generator=drawn), torch.randn(24, 2, groups, 8, generator=drawn)


def by_hand(query: torch.Tensor, key: torch.Tensor, allowed: torch.Tensor) -> float:
    keys = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
    scores = torch.einsum("qbhc,kbhc->bhqk", query, keys) * 0.25
    return float(scores.masked_fill(~allowed, -torch.inf).max())


@pytest.mark.parametrize("most", [1, 200, 1 << 24])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_the_largest_logit_is_that_of_all_scores_that_are_seen(
    heads: int, groups: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_logits, "MOST_SCORES", most)
    query, key = made(heads, groups)
    key[-1, :, 0] = 50 * query[0, :, 0]  # that the first query does not see
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    assert float(largest_logit(query, key, 0.25)) == pytest.approx(by_hand(query, key, causal[None, None]))
    everything = by_hand(query, key, torch.ones_like(causal)[None, None])
    assert everything > float(largest_logit(query, key, 0.25))


@pytest.mark.parametrize("dense", [False, True])
def test_conversations_of_a_sequence_do_not_see_one_another(dense: bool) -> None:
    query, key = made(4, 2)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None].repeat(2, 1)
    positions[1] = torch.arange(24)
    key[0, 0, 0] = 50 * query[12, 0, 0]  # of the first conversation; the query is of the second
    allowed = attention_mask(positions, dense=True)
    mask = attention_mask(positions, dense=dense)
    found = float(largest_logit(query, key, 0.25, mask))
    assert found == pytest.approx(by_hand(query, key, allowed))
    assert found < float(largest_logit(query, key, 0.25))


def counted(*values: float, dtype: torch.dtype = torch.float32) -> Any:
    row = torch.zeros(BINS, dtype=torch.float64)
    count(row, torch.tensor(values, dtype=dtype))
    assert row.sum() == len(values)
    return histogram(row.tolist())


def test_a_value_is_in_the_bin_of_its_power_of_two() -> None:
    below = math.nextafter(1.0, 0.0)
    assert counted(1.0, 1.999, 0.5, -2.0, 0.0) == {"low": -1, "negative": [0, 0, 1], "zero": 1, "positive": [1, 2, 0]}
    assert counted(torch.tensor(below).to(torch.float32).item() - 1e-7)["low"] == -1
    assert counted(2.0**LOW, 2.0 ** (LOW - 1), -0.0)["zero"] == 2
    assert counted(2.0**HIGH, 1e30, -1e30) == {"low": HIGH, "negative": [1], "zero": 0, "positive": [2]}
    assert counted(0.25, 3.0, dtype=torch.bfloat16) == {
        "low": -2,
        "negative": [0] * 4,
        "zero": 0,
        "positive": [1, 0, 0, 1],
    }
    assert counted(0.0) == {"low": LOW, "negative": [], "zero": 1, "positive": []}
    assert histogram([0.0] * BINS) is None


def test_deterministic_runs_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_cuda(*arguments: Any) -> torch.Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("_histc_cuda does not have a deterministic implementation")
        return histc(*arguments)

    histc = torch.histc
    monkeypatch.setattr(torch, "histc", as_on_cuda)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert counted(1.0)["positive"] == [1]
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_many_values_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrecipes.engine.parts.gradient_histograms._MOST", 7)
    drawn = torch.randn(10, 10, generator=torch.Generator().manual_seed(1))
    row = torch.zeros(BINS, dtype=torch.float64)
    count(row, drawn.t())
    sides = histogram(row.tolist())
    assert sides is not None and sum(sides["positive"]) == int((drawn > 0).sum()) and row.sum() == 100
