"""The formulas of merging, against plain loops over Python's numbers and against mergekit's results."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.models import merge_formulas

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mergekit.json").read_text())
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 2e-6}

Numbers = list[float]


def tensors(count: int, size: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]


def numbers(given: Sequence[torch.Tensor]) -> list[Numbers]:
    return [each.double().tolist() for each in given]


def same(found: torch.Tensor, expected: Numbers) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double().flatten(), torch.tensor(expected, dtype=torch.float64), **CLOSE)


# Plain loops, written from the papers.


def plain_mean(models: list[Numbers], weights: Numbers) -> Numbers:
    return [
        sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) for values in zip(*models, strict=True)
    ]


def plain_slerp(first: Numbers, second: Numbers, t: float) -> Numbers:
    lengths = [math.sqrt(sum(x * x for x in vector)) for vector in (first, second)]
    cosine = sum(x * y for x, y in zip(first, second, strict=True)) / (lengths[0] * lengths[1])
    angle = math.acos(cosine)
    parts = [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)]
    return [parts[0] * x + parts[1] * y for x, y in zip(first, second, strict=True)]


def plain_task_vectors(base: Numbers, models: list[Numbers]) -> list[Numbers]:
    return [[value - start for value, start in zip(model, base, strict=True)] for model in models]


def plain_trim(vector: Numbers, density: float) -> Numbers:
    order = sorted(range(len(vector)), key=lambda place: -abs(vector[place]))  # stable: the first of equal ones
    stay = set(order[: max(1, int(density * len(vector)))])
    return [value if place in stay else 0.0 for place, value in enumerate(vector)]


def plain_elected(vectors: list[Numbers], weights: Numbers, normalize: bool) -> Numbers:
    result = []
    for values in zip(*vectors, strict=True):
        weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
        sign = 1 if sum(weighted) >= 0 else -1
        agreeing = [(weight, value) for weight, value in zip(weights, weighted, strict=True) if value * sign > 0]
        total = sum(value for _, value in agreeing)
        divisor = sum(weight for weight, _ in agreeing) if normalize else 1.0
        result.append(total / divisor if divisor else total)
    return result


def plus(base: Numbers, vector: Numbers, scale: float) -> Numbers:
    return [start + scale * value for start, value in zip(base, vector, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_is_the_weighted_mean(dtype: torch.dtype) -> None:
    models, weights = tensors(3, dtype=dtype), [0.5, 2.0, 0.25]
    same(merge_formulas.linear(iter(models), weights), plain_mean(numbers(models), weights))
    total = merge_formulas.linear(models, weights, normalize=False)
    same(total, [value * sum(weights) for value in plain_mean(numbers(models), weights)])


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_slerp_follows_the_arc(t: float) -> None:
    first, second = tensors(2)
    same(merge_formulas.slerp(first, second, t), plain_slerp(first.double().tolist(), second.double().tolist(), t))


def test_slerp_between_vectors_of_one_length_keeps_it() -> None:
    first, second = (tensor / tensor.norm() for tensor in tensors(2))
    assert float(merge_formulas.slerp(first, second, 0.5).norm()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_slerp_of_parallel_and_opposite_vectors_is_linear(sign: int) -> None:
    (first,) = tensors(1)
    second = sign * (first * 3 + 1e-4)
    same(merge_formulas.slerp(first, second, 0.25), plain_mean(numbers([first, second]), [0.75, 0.25]))


def test_slerp_sums_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tensors(2)
    whole = merge_formulas.slerp(first, second, 0.5)
    monkeypatch.setattr(merge_formulas, "CHUNK", 7)
    torch.testing.assert_close(merge_formulas.slerp(first.view(4, 6), second.view(4, 6), 0.5), whole.view(4, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_task_arithmetic_adds_task_vectors(dtype: torch.dtype) -> None:
    (base, *models), weights = tensors(4, dtype=dtype), [1.0, -0.5, 0.25]
    vectors = plain_task_vectors(numbers([base])[0], numbers(models))
    total = [sum(w * v for w, v in zip(weights, values, strict=True)) for values in zip(*vectors, strict=True)]
    same(merge_formulas.task_arithmetic(base, iter(models), weights, scale=0.7), plus(numbers([base])[0], total, 0.7))
    mean = [value / sum(weights) for value in total]
    same(merge_formulas.task_arithmetic(base, models, weights, normalize=True), plus(numbers([base])[0], mean, 1.0))


def test_the_task_vector_of_a_model_leads_to_it() -> None:
    base, model = tensors(2)
    for merged in (
        merge_formulas.task_arithmetic(base, [model], [1.0]),
        merge_formulas.ties(base, [model], [3.0], [1.0]),
        merge_formulas.dare(base, [model], [1.0], [1.0], [torch.ones(24, dtype=torch.bool)]),
    ):
        torch.testing.assert_close(merged, model)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("densities", [[1.0, 1.0, 1.0], [0.5, 0.2, 0.9], [0.01, 0.3, 0.3]])
def test_ties_trims_elects_and_takes_the_disjoint_mean(densities: list[float], normalize: bool) -> None:
    (base, *models), weights = tensors(4), [1.0, 0.5, 2.0]
    vectors = plain_task_vectors(numbers([base])[0], numbers(models))
    trimmed = [plain_trim(vector, density) for vector, density in zip(vectors, densities, strict=True)]
    expected = plus(numbers([base])[0], plain_elected(trimmed, weights, normalize), 0.7)
    same(merge_formulas.ties(base, iter(models), weights, densities, scale=0.7, normalize=normalize), expected)


def test_of_two_that_cancel_the_positive_one_stays() -> None:
    merged = merge_formulas.ties(
        torch.zeros(2), [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 2.0])], [1.0, 1.0], [1.0, 1.0]
    )
    assert merged.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("vector", "density", "stays"),
    [
        ([1.0, -3.0, 2.0, 0.5], 0.5, [0.0, -3.0, 2.0, 0.0]),
        ([2.0, -2.0, 2.0, 2.0], 0.5, [2.0, -2.0, 0.0, 0.0]),
        ([0.0, 0.0, 5.0, 0.0], 0.75, [0.0, 0.0, 5.0, 0.0]),
        ([1.0, 2.0, 3.0], 0.0, [0.0, 0.0, 3.0]),
        ([1.0, 2.0, 3.0], 1.0, [1.0, 2.0, 3.0]),
        ([4.0], 0.1, [4.0]),
        ([], 0.5, []),
    ],
)
def test_trim_leaves_the_largest(vector: Numbers, density: float, stays: Numbers) -> None:
    assert merge_formulas.trim(torch.tensor(vector), density).tolist() == stays


@pytest.mark.parametrize("elect", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_dare_drops_and_rescales(elect: bool, normalize: bool) -> None:
    (base, *models), weights, densities = tensors(4), [1.0, 0.5, 2.0], [0.5, 0.25, 1.0]
    kept = [merge_formulas.keep((24,), density, seed=1, name="x", model=n) for n, density in enumerate(densities)]
    vectors = [
        [value / density if mask else 0.0 for value, mask in zip(vector, masks.tolist(), strict=True)]
        for vector, density, masks in zip(
            plain_task_vectors(numbers([base])[0], numbers(models)), densities, kept, strict=True
        )
    ]
    if elect:
        total = plain_elected(vectors, weights, normalize)
    else:
        divisor = sum(weights) if normalize else 1.0
        total = [
            sum(w * v for w, v in zip(weights, values, strict=True)) / divisor for values in zip(*vectors, strict=True)
        ]
    merged = merge_formulas.dare(base, models, weights, densities, kept, scale=0.7, normalize=normalize, elect=elect)
    same(merged, plus(numbers([base])[0], total, 0.7))


def test_dare_keeps_the_expected_value() -> None:
    """Over many draws the mean of the merged models is the model whose task vector was thinned."""
    base, model = tensors(2)
    draws = 2000
    kept = [merge_formulas.keep((24,), 0.25, seed=seed, name="x", model=0) for seed in range(draws)]
    mean = sum(merge_formulas.dare(base, [model], [1.0], [0.25], [mask]) for mask in kept) / draws
    deviation = (model - base).abs() * math.sqrt(3 / draws)  # of a mean of draws of variance δ²·(1-p)/p
    assert bool(((mean - model).abs() < 4.5 * deviation).all())


def test_what_dare_keeps_depends_on_seed_name_and_model_alone() -> None:
    mask = merge_formulas.keep((100, 100), 0.3, seed=1, name="a", model=0)
    assert mask.float().mean() == pytest.approx(0.3, abs=0.02)
    torch.rand(5)  # the global generator has no part in it
    assert torch.equal(mask, merge_formulas.keep([100, 100], 0.3, seed=1, name="a", model=0))
    for other in ({"seed": 2}, {"name": "b"}, {"model": 1}):
        changed = merge_formulas.keep((100, 100), 0.3, **{"seed": 1, "name": "a", "model": 0, **other})  # type: ignore[arg-type]
        assert (mask & changed).float().mean() == pytest.approx(0.09, abs=0.02)


def test_no_formula_changes_its_inputs() -> None:
    given = tensors(4)
    before = [each.clone() for each in given]
    for case in GOLDEN["cases"]:
        merged_as(case, given, "x")
    assert all(torch.equal(one, two) for one, two in zip(given, before, strict=True))


def merged_as(case: dict[str, Any], given: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Of a case in the golden file: tensors are that of the base and those of the models."""
    base, *models = given
    options = {key: case[key] for key in ("scale", "normalize") if key in case}
    if case["method"] == "linear":
        return merge_formulas.linear(models, case["weights"], **options)
    if case["method"] == "slerp":
        return merge_formulas.slerp(models[0], models[1], case["t"])
    if case["method"] == "task-arithmetic":
        return merge_formulas.task_arithmetic(base, models, case["weights"], **options)
    if case["method"] == "ties":
        return merge_formulas.ties(base, models, case["weights"], case["densities"], **options)
    kept = [
        merge_formulas.keep(base.shape, density, seed=GOLDEN["seed"], name=name, model=model)
        for model, density in enumerate(case["densities"])
    ]
    elect = case["method"] == "dare-ties"
    return merge_formulas.dare(base, models, case["weights"], case["densities"], kept, elect=elect, **options)


def golden_results() -> list[Any]:
    def options(case: dict[str, Any]) -> str:
        return ",".join(f"{key}={value}" for key, value in case.items() if key not in {"method", "results"})

    return [pytest.param(case, id=f"{case['method']}: {options(case)}") for case in GOLDEN["cases"]]


@pytest.mark.parametrize("case", golden_results())
def test_results_are_those_of_mergekit(case: dict[str, Any]) -> None:
    for name, given in GOLDEN["inputs"].items():
        merged = merged_as(case, [torch.tensor(each) for each in given], name)
        torch.testing.assert_close(merged, torch.tensor(case["results"][name]), **CLOSE)
