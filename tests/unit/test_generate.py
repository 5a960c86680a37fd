"""Sampling: the cache changes nothing, draws follow their rules, and what cannot be continued is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from llmrecipes.engine.core.generation import Sampling, draw, generate
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.score import GPTScorer
from llmrecipes.plan.derive import derive
from tests.helpers import LLAMA, ROOMY, built, engine_of, steps, tiny
from tests.refusals import refused

GREEDY = Sampling(temperature=0)
PROMPT = [3, 1, 4, 1, 5]


def model(**changes: Any) -> RecipeModel:
    """Random weights, large enough that every token depends on those before it."""
    return built(tiny(model={"init_method_std": 0.3, "hidden_dropout": 0.2, **changes})).module


def continuation(module: RecipeModel, prompt: list[int] | None = None, **options: Any) -> list[int]:
    defaults: dict[str, Any] = {"max_new_tokens": 40, "sampling": GREEDY, "vocab_size": 512, "eod": None}
    return list(generate(module, PROMPT if prompt is None else prompt, **{**defaults, **options}))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("shape", [{}, LLAMA, {**LLAMA, "qk_layernorm": True, "num_query_groups": 1}],
                         ids=["gpt", "llama", "multi query"])  # fmt: skip
def test_the_cache_changes_no_token(shape: dict[str, Any]) -> None:
    module = model(**shape)
    for sampling in (GREEDY, Sampling(temperature=1.0, top_k=0, seed=7), Sampling(temperature=0.7, top_p=0.9)):
        cached = continuation(module, sampling=sampling)
        assert len(cached) == 40
        assert len(set(cached)) > 3
        assert cached == continuation(module, sampling=sampling, use_cache=False)


@pytest.mark.usefixtures("world")
def test_attention_makes_no_plan_for_each_length() -> None:
    """cuDNN's does, on GPUs of compute capability 9.0."""
    recipe = tiny()
    whole = built(recipe)
    allowed: list[bool] = []
    whole.module.register_forward_pre_hook(lambda *_inputs: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    continuation(whole.module, max_new_tokens=2)
    scorer = GPTScorer(whole.modules, derive(recipe, 1, ROOMY), select())
    scorer.extend([PROMPT], [2], [0], GREEDY, lambda _new: False)
    assert allowed == [False] * 4
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("world")
def test_the_seed_decides_and_the_training_mode_is_restored() -> None:
    module = model().train()
    seeds = [continuation(module, sampling=Sampling(temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert module.training


@pytest.mark.usefixtures("world")
def test_texts_are_computed_in_bf16_where_training_is_in_fp8() -> None:
    """Whose products need multiples of 16 tokens, and copies of weights that training steps renew."""
    recipe = tiny()
    whole = built(recipe)
    seen: list[str | None] = []
    whole.module.register_forward_pre_hook(lambda module, _inputs: seen.append(module.config.fp8))
    whole.config.fp8 = "e4m3"
    continuation(whole.module, max_new_tokens=1)
    scorer = GPTScorer(whole.modules, derive(recipe, 1, ROOMY), select())
    scorer.extend([PROMPT], [1], [0], GREEDY, lambda _new: False)
    scorer.score(torch.tensor([PROMPT]))
    assert seen == [None] * 3
    assert whole.config.fp8 == "e4m3"


@pytest.mark.usefixtures("world")
def test_texts_of_other_lengths_use_up_no_compilation_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up after eight shapes: a run that resumes with an evaluation of tasks would train uncompiled."""
    plain = RecipeModel.compile_layers
    monkeypatch.setattr(RecipeModel, "compile_layers", lambda module: plain(module, backend="eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    engine = engine_of(tiny(layout={"torch_compile": True}))
    try:
        for length in range(3, 13):
            engine.scorer().score(torch.ones(1, length, dtype=torch.long))
        continuation(engine.modules[0], max_new_tokens=3)
        engine.scorer().extend([PROMPT], [3], [0], GREEDY, lambda _new: False)
        assert not counters["stats"]
        steps(engine, 1)
        assert counters["stats"]["unique_graphs"] == 3  # of all layers, of the loss, and of its gradient
    finally:
        torch._dynamo.reset()


@pytest.mark.usefixtures("world")
def test_texts_are_scored_without_compiled_functions() -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    fused = ("bias_activation_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion")
    engine = engine_of(tiny(model=LLAMA, layout=dict.fromkeys(fused, True)))
    engine.scorer().score(torch.ones(1, 5, dtype=torch.long))
    assert not counters["stats"]


@pytest.mark.usefixtures("world")
def test_rows_of_the_padded_vocabulary_are_never_drawn() -> None:
    module = model()
    with torch.no_grad():
        # The output layer is tied: these rows now have by far the largest scores, of either sign.
        module.embedding.word_embeddings.weight[300:] *= 50
    assert max(continuation(module)) >= 300
    assert max(continuation(module, vocab_size=300)) < 300
    assert max(continuation(module, vocab_size=300, sampling=Sampling(temperature=5.0, top_k=0))) < 300


@pytest.mark.usefixtures("world")
def test_it_ends_at_the_limit_at_the_last_position_or_at_the_end_of_the_document() -> None:
    module = model()
    whole = continuation(module, max_new_tokens=1000)
    assert len(whole) == 64 - len(PROMPT)
    assert continuation(module, max_new_tokens=7) == whole[:7]
    end = whole[10]
    assert continuation(module, max_new_tokens=1000, eod=end) == whole[: whole.index(end)]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("prompt", [[], [1] * 64, [1] * 99])
def test_a_prompt_that_cannot_be_continued_is_refused(prompt: list[int]) -> None:
    module = model()
    with refused("--prompt", rule=(f"{len(prompt)}", "64")):
        continuation(module, prompt)


# -- draws -----------------------------------------------------------------------------------------------------------

PROBABILITIES = [0.1, 0.5, 0.15, 0.2, 0.05]
LOGITS = torch.tensor(PROBABILITIES).log()


def frequencies(sampling: Sampling, logits: torch.Tensor = LOGITS, draws: int = 4000) -> dict[int, float]:
    random = torch.Generator().manual_seed(0)
    counts = Counter(draw(logits, sampling, random) for _ in range(draws))
    return {token: count / draws for token, count in counts.items()}


def test_plain_draws_follow_the_probabilities() -> None:
    found = frequencies(Sampling(temperature=1.0, top_k=0))
    assert found == pytest.approx(dict(enumerate(PROBABILITIES)), abs=0.03)


def test_temperature_sharpens_and_zero_selects_the_most_likely() -> None:
    squared = [p**2 for p in PROBABILITIES]
    expected = {token: p / sum(squared) for token, p in enumerate(squared)}
    found = frequencies(Sampling(temperature=0.5, top_k=0))
    assert {token: found.get(token, 0.0) for token in expected} == pytest.approx(expected, abs=0.03)
    assert frequencies(GREEDY, draws=50) == {1: 1.0}


def test_top_k_keeps_the_k_likeliest() -> None:
    found = frequencies(Sampling(temperature=1.0, top_k=2))
    assert found == pytest.approx({1: 5 / 7, 3: 2 / 7}, abs=0.03)
    assert frequencies(Sampling(temperature=1.0, top_k=1), draws=50) == {1: 1.0}
    assert set(frequencies(Sampling(temperature=1.0, top_k=99))) == set(range(5))


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, {1}), (0.6, {1, 3}), (0.75, {1, 3, 2}), (1.0, {0, 1, 2, 3, 4})])
def test_top_p_keeps_the_smallest_set_with_that_probability(top_p: float, kept: set[int]) -> None:
    assert set(frequencies(Sampling(temperature=1.0, top_k=0, top_p=top_p))) == kept


def test_half_precision_logits_are_drawn_in_fp32() -> None:
    found = frequencies(Sampling(temperature=1.0, top_k=0), LOGITS.to(torch.bfloat16))
    assert found == pytest.approx(dict(enumerate(PROBABILITIES)), abs=0.03)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    wrong: dict[str, Any] = {name: value}
    with refused(f"--{name.replace('_', '-')}", rule=str(value) if value == value else ()):
        Sampling(**wrong)
