"""Sinks of attention: what they compute, in training and with a cache, how they start, and where they are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from llmrecipes.engine.core.generation import Sampling, generate
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import derive
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from tests.helpers import LLAMA, ROOMY, built, tiny
from tests.refusals import refused

GPUS = Cluster((DetectedGpu("NVIDIA H100 80GB HBM3", 79 << 30, 79 << 30, 989.4),) * 8, 8, 1 << 40, 1 << 40, 1 << 40)
LENGTH = 16


def made(**model: Any) -> Any:
    module = built(tiny(model={**LLAMA, "seq_length": LENGTH, "init_method_std": 0.2, **model})).module
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("softmax_offset"):
                parameter.copy_(torch.linspace(-2.0, 3.0, parameter.numel()))
    return module


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("window", [None, [3, 0]])
@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
def test_attention_is_that_of_gpt_oss(kind: str, window: Any) -> None:
    core = made(softmax_type=kind, window_size=window).decoder.layers[0].self_attention.core_attention
    drawn = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(LENGTH, 2, heads, 16, generator=drawn).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.zeros(4) if core.softmax_offset is None else core.softmax_offset.detach().clone()
    sinks.requires_grad_()
    module: Any = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-LENGTH if window is None else -window[0])
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~seen, -torch.inf)[None, None]
    theirs, _ = eager_attention_forward(module, *(each.permute(1, 2, 0, 3) for each in (query, key, value)), mask, 0.25)
    expected = theirs.transpose(0, 1).flatten(2)
    wanted = torch.autograd.grad(expected.square().sum(), (query, key, value, sinks))
    ours = core(query, key, value, None)
    inputs = (query, key, value) if core.softmax_offset is None else (query, key, value, core.softmax_offset)
    found = torch.autograd.grad(ours.square().sum(), inputs)
    for one, other in zip((ours, *found), (expected, *wanted), strict=False):
        assert (one - other).norm() / other.norm() < 1e-5
    assert (wanted[-1] != 0).all()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("window", [None, [3, 0]])
def test_text_is_the_same_with_a_cache(window: Any) -> None:
    module = made(softmax_type="learnable", window_size=window, max_position_embeddings=64).eval()
    prompt = [3, 1, 4, 1, 5]
    greedy = Sampling(temperature=0)
    text = list(generate(module, prompt, max_new_tokens=20, sampling=greedy, vocab_size=500, eod=None))
    for place in range(len(prompt), len(prompt) + 20):
        tokens = torch.tensor([[*prompt, *text][:place]])
        logits = module(tokens, torch.arange(place)[None], None)[0, -1, :500]
        assert int(logits.argmax()) == text[place - len(prompt)]


@pytest.mark.usefixtures("world")
def test_sinks_start_as_weights_do_and_are_counted() -> None:
    recipe = tiny(model={**LLAMA, "softmax_type": "learnable", "num_attention_heads": 16, "num_query_groups": 4})
    module = built(recipe).module
    sinks = torch.cat([each for name, each in module.named_parameters() if name.endswith("softmax_offset")]).detach()
    assert sinks.numel() == 2 * 16 and 0.5 < float(sinks.std()) / recipe.model.init_method_std < 1.5
    assert count(recipe.model, shape(recipe.model)).total == sum(each.numel() for each in module.parameters())


def test_only_transformer_engine_has_sinks_on_a_gpu() -> None:
    def recipe(impl: str, kind: str | None = None, ranks: int = 1) -> Recipe:
        sections: dict[str, Any] = {"layout": {"context_parallel_size": ranks}, "train": {"precision": "bf16"}}
        made = tiny(model={"softmax_type": "learnable", "transformer_impl": impl}, **sections)
        return made.with_layout(cp_comm_type=kind)

    derive(recipe("auto"), 1, GPUS)
    derive(recipe("local"), 1, ROOMY)
    with refused("model.softmax_type", rule="model.transformer_impl"):
        derive(recipe("local"), 1, GPUS)
    for kind in (None, "all_gather"):
        with refused("layout.cp_comm_type", rule="a2a"):
            derive(recipe("auto", kind, 2), 2, GPUS)
    derive(recipe("auto", "a2a", 2), 2, GPUS)


def test_latent_attention_has_no_sinks() -> None:
    model = {
        "softmax_type": "learnable", "multi_latent_attention": True, "position_embedding_type": "rope",
        "add_bias_linear": False,
    }  # fmt: skip
    (problem,) = check(tiny(model=model))
    assert problem.key == "model.softmax_type"
