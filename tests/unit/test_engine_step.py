"""One optimizer step: schedule, weight decay, clipping, accumulation, precision, loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from llmrecipes.engine.base import Batch
from llmrecipes.engine.megatron.engine import MegatronEngine
from tests.helpers import LLAMA, engine_of, largest_difference, random_batches, steps, tiny

pytestmark = pytest.mark.usefixtures("world")

WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"


def snapshot(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.modules[0].named_parameters()}


# -- learning rate ---------------------------------------------------------------------------------------------------

PEAK, LOW, WARMUP, DECAY, WSD = 1e-2, 1e-3, 10, 50, 20


def at_end_of_wsd(shape: Callable[[float], float]) -> Callable[[int], float]:
    def rate(done: int) -> float:
        start = DECAY - WSD
        return PEAK if done <= start else LOW + (PEAK - LOW) * shape((done - start) / WSD)

    return rate


def decaying(shape: Callable[[float], float]) -> Callable[[int], float]:
    return lambda done: LOW + (PEAK - LOW) * shape((done - WARMUP) / (DECAY - WARMUP))


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({"lr_decay_style": "constant"}, lambda done: PEAK),
    "linear": ({"lr_decay_style": "linear"}, decaying(lambda x: 1 - x)),
    "cosine": ({"lr_decay_style": "cosine"}, decaying(lambda x: (1 + math.cos(math.pi * x)) / 2)),
    "WSD linear": ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}, at_end_of_wsd(lambda x: 1 - x)),
    "WSD cosine": (
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "cosine"},
        at_end_of_wsd(lambda x: (1 + math.cos(math.pi * x)) / 2),
    ),
    "WSD exponential": (
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "exponential"}, at_end_of_wsd(lambda x: 2 * 0.5**x - 1)
    ),
    "WSD minus_sqrt": (
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt"}, at_end_of_wsd(lambda x: 1 - math.sqrt(x))
    ),
    "polynomial": ({"lr_decay_style": "polynomial", "lr_polynomial_power": 3.0}, decaying(lambda x: (1 - x) ** 3)),
    "inverse-square-root": (
        {"lr_decay_style": "inverse-square-root"}, lambda done: max(LOW, PEAK * math.sqrt(WARMUP / done))
    ),
    "exponential warm-up": (
        {"lr_decay_style": "linear", "lr_warmup_style": "exponential", "lr_warmup_init": LOW}, decaying(lambda x: 1 - x)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_follows_its_closed_form(name: str) -> None:
    changes, expected = SCHEDULES[name]
    wsd = {"lr_wsd_decay_iters": WSD} if changes["lr_decay_style"] == "WSD" else {}
    engine = engine_of(
        tiny(
            model={"num_layers": 1},
            train={"train_iters": DECAY + 10},
            optimizer={"lr": PEAK, "min_lr": LOW},
            scheduler={"lr_warmup_iters": WARMUP, "lr_decay_iters": DECAY, **wsd, **changes},
        )
    )
    for done in range(DECAY + 10):
        if done <= WARMUP:
            rate = PEAK * done / WARMUP if name != "exponential warm-up" else LOW * (PEAK / LOW) ** (done / WARMUP)
        elif done <= DECAY:
            rate = expected(done)
        else:
            rate = PEAK if name == "constant" else LOW
        assert engine.learning_rate == pytest.approx(rate, rel=1e-9), f"{name} after {done} steps"
        engine.scheduler.step(increment=1)


def test_the_reported_rate_is_the_one_that_was_used() -> None:
    engine = engine_of(tiny(optimizer={"lr": PEAK}, scheduler={"lr_warmup_iters": 4, "lr_decay_style": "constant"}))
    before = snapshot(engine)
    first, second = random_batches(engine.recipe), random_batches(engine.recipe)
    assert engine.train_step(first).lr == 0
    assert all(torch.equal(before[name], now) for name, now in snapshot(engine).items())
    assert engine.train_step(second).lr == pytest.approx(PEAK / 4)
    moved = (snapshot(engine)[WEIGHT] - before[WEIGHT]).abs().max().item()
    assert moved == pytest.approx(PEAK / 4, rel=0.02)  # Adam's first steps are as long as the rate


# -- decay and clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, {**LLAMA, "qk_layernorm": True}], ids=["gpt", "llama"])
def test_weight_decay_spares_norms_and_biases(shape: dict[str, Any]) -> None:
    # A huge epsilon keeps Adam from moving anything, so that only the decay is left.
    optimizer = {"lr": 0.5, "weight_decay": 0.1, "adam_eps": 1e30}
    engine = engine_of(tiny(model=shape, optimizer=optimizer, scheduler={"lr_decay_style": "constant"}))
    with torch.no_grad():
        for parameter in engine.modules[0].parameters():
            parameter.fill_(1.0)
    steps(engine, 1)
    for name, parameter in engine.modules[0].named_parameters():
        expected = 1.0 if "layernorm" in name or name.endswith("bias") else 1 - 0.5 * 0.1
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected), msg=name)


def test_clipping_scales_the_update_and_zero_turns_it_off() -> None:
    # With a large epsilon Adam's update is proportional to the gradient, so that clipping shows.
    def update(clip: float) -> tuple[torch.Tensor, float]:
        options = {"lr": 1.0, "weight_decay": 0.0, "adam_eps": 1e4, "clip_grad": clip}
        engine = engine_of(tiny(optimizer=options, scheduler={"lr_decay_style": "constant"}))
        before = snapshot(engine)[WEIGHT]
        result = steps(engine, 1)[0]
        assert result.grad_norm is not None
        return snapshot(engine)[WEIGHT] - before, result.grad_norm

    free, norm = update(0.0)
    loose, same_norm = update(1e9)
    clipped, still_same_norm = update(norm / 10)
    assert norm == same_norm == still_same_norm > 0.1
    assert torch.equal(free, loose)
    torch.testing.assert_close(clipped * 10, free, rtol=0.01, atol=1e-7)
    assert free.abs().max() > 0


def test_moments_decay_by_the_betas_of_the_recipe() -> None:
    options = {"lr": PEAK, "weight_decay": 0.1, "clip_grad": 0.0, "adam_eps": 1e-6}
    betas = {"adam_beta1": 0.5, "adam_beta2": 0.7}
    engine = engine_of(tiny(optimizer={**options, **betas}, scheduler={"lr_decay_style": "constant"}))
    weight = dict(engine.modules[0].named_parameters())[WEIGHT]
    expected, usual = (torch.nn.Parameter(weight.detach().clone()) for _ in range(2))
    by_hand = torch.optim.AdamW([expected], lr=PEAK, weight_decay=0.1, eps=1e-6, betas=(0.5, 0.7))
    by_default = torch.optim.AdamW([usual], lr=PEAK, weight_decay=0.1, eps=1e-6)
    source = random_batches(engine.recipe)
    for _ in range(3):
        steps(engine, 1, source)
        expected.grad = usual.grad = weight.main_grad.detach().clone()
        by_hand.step()
        by_default.step()
    torch.testing.assert_close(weight.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
    assert (weight.detach() - usual.detach()).abs().max() > 1e-3


# -- the batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-6), ("bf16", 5e-3)])
@pytest.mark.rotating
def test_the_micro_batch_size_changes_no_number(precision: str, bound: float) -> None:
    """bf16 rounds every gradient of a micro-batch to 8 bits, so there the norms agree to half a percent only."""

    def run(micro: int) -> list[float]:
        engine = engine_of(tiny(train={"precision": precision}, layout={"micro_batch_size": micro}))
        results = steps(engine, 5)
        return [result.loss for result in results] + [result.grad_norm or math.nan for result in results]

    reference = run(1)
    assert reference[0] - reference[4] > 0.01
    for micro in (2, 4, 8):
        assert largest_difference(reference, run(micro)) < bound


def test_the_loss_is_the_mean_over_tokens_that_count() -> None:
    """Of a validation of two batches over the tokens of both, which is not the mean of their means."""
    engine = engine_of(tiny(model={"init_method_std": 0.2}))
    recipe = engine.recipe
    engine.modules[0].eval()

    def uneven() -> Iterator[Batch]:
        """The second batch has a quarter of the tokens."""
        for number, batch in enumerate(random_batches(recipe)):
            if number >= engine.plan.num_microbatches:
                batch["loss_mask"][:, recipe.model.seq_length // 4 :] = 0
            yield batch

    sums: list[tuple[float, float]] = []
    source = uneven()
    for _ in range(2):
        total = count = 0.0
        for _ in range(engine.plan.num_microbatches):
            batch = next(source)
            with torch.no_grad():
                losses = engine.modules[0](batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            total += (losses * batch["loss_mask"]).sum().item()
            count += batch["loss_mask"].sum().item()
        assert 0 < count < recipe.train.global_batch_size * recipe.model.seq_length
        sums.append((total, count))
    one, other = (total / count for total, count in sums)
    both = sum(total for total, _ in sums) / sum(count for _, count in sums)
    assert abs(both - (one + other) / 2) > 1e-3 * both
    assert engine.evaluate(uneven(), 2) == pytest.approx(both, rel=1e-6)
    assert engine.evaluate(uneven(), 1) == pytest.approx(one, rel=1e-6)
    assert steps(engine, 1)[0].loss == pytest.approx(one, rel=1e-6)


def test_evaluation_moves_nothing_and_drops_nothing() -> None:
    # With small initial weights every loss is that of a uniform guess, whatever is dropped.
    engine = engine_of(tiny(model={"hidden_dropout": 0.3, "init_method_std": 0.2}, train={"label_smoothing": 0.3}))
    before = snapshot(engine)
    one, other = (engine.evaluate(random_batches(engine.recipe), 2) for _ in range(2))
    assert one is not None and one == other
    assert all(torch.equal(before[name], now) for name, now in snapshot(engine).items())
    assert engine.modules[0].training
    assert steps(engine, 1)[0].loss != one  # dropout and smoothing are on again; how much they change is chance


def test_an_interrupted_evaluation_stops_after_the_batch_without_a_result() -> None:
    engine = engine_of(tiny())
    source = random_batches(engine.recipe)
    asked = iter([False, True, False])
    assert engine.evaluate(source, 9, lambda: next(asked)) is None
    assert next(asked) is False, "the third batch was not begun"
    assert engine.modules[0].training


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.rotating
def test_half_precision_follows_fp32(precision: str) -> None:
    def run(kind: str) -> list[float]:
        train = {"precision": kind, "initial_loss_scale": 1024.0, "train_iters": 20}
        engine = engine_of(tiny(train=train, optimizer={"lr": 3e-3}))
        assert next(engine.modules[0].parameters()).dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            kind, torch.float32
        )
        return [result.loss for result in steps(engine, 20)]

    full, half = run("fp32"), run(precision)
    assert full[0] - full[-1] > 1
    assert largest_difference(full, half) < 0.01


def test_an_overflow_is_skipped_and_halves_the_loss_scale() -> None:
    train = {"precision": "fp16", "initial_loss_scale": 2.0**40, "hysteresis": 2, "min_loss_scale": 1.0}
    engine = engine_of(tiny(train=train, scheduler={"lr_warmup_iters": 5}))
    before = snapshot(engine)
    results = steps(engine, 4)
    assert [result.skipped for result in results] == [True] * 4
    assert [result.grad_norm for result in results] == [None] * 4
    # hysteresis 2: the first overflow is forgiven.
    assert [result.loss_scale for result in results] == [2.0**40, 2.0**40, 2.0**39, 2.0**38]
    assert all(torch.equal(before[name], now) for name, now in snapshot(engine).items())
    assert engine.learning_rate == 0.0
    assert all(math.isfinite(result.loss) for result in results)


def test_the_loss_scale_does_not_show_in_the_numbers_and_grows_again() -> None:
    def run(scale: float) -> tuple[list[float], list[float | None]]:
        train = {"precision": "fp16", "initial_loss_scale": scale, "loss_scale_window": 2}
        results = steps(engine_of(tiny(train=train)), 5)
        assert not any(result.skipped for result in results)
        return [result.grad_norm or math.nan for result in results], [result.loss_scale for result in results]

    norms, scales = run(128.0)
    assert scales == [128.0, 128.0, 256.0, 256.0, 512.0]
    assert largest_difference(norms, run(1024.0)[0]) < 0.01


def test_other_precisions_report_no_loss_scale() -> None:
    assert steps(engine_of(tiny()), 1)[0].loss_scale is None


# -- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_layers_compute_the_same() -> None:
    """Two equal layers share one graph; the loss has one of its own."""
    from torch._dynamo.utils import counters

    def run(compiled: bool) -> list[float]:
        results = steps(engine_of(tiny(layout={"torch_compile": compiled})), 3)
        return [result.loss for result in results] + [result.grad_norm or math.nan for result in results]

    torch._dynamo.reset()
    counters.clear()
    plain = run(False)
    assert counters["stats"]["unique_graphs"] == 0
    compiled = run(True)
    assert counters["stats"]["unique_graphs"] >= 2
    assert counters["inductor"], "nothing was compiled"
    assert largest_difference(plain, compiled) < 1e-5
