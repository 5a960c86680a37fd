"""The benchmarks' contenders train a model of the recipe's size, on whatever device there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu_throughput import first_gpu
from lab.gpu_report.plain_gpt import PlainGPT
from lab.gpu_report.rivals import count, transformers_model
from llmrecipes.plan.derive import derive
from tests.helpers import LLAMA, ROOMY, tiny

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama with grouped queries": LLAMA,
    "heads of another width": {**LLAMA, "kv_channels": 32},
}


@pytest.mark.parametrize("name", MODELS)
def test_contenders_have_the_parameters_of_the_recipe(name: str) -> None:
    recipe = tiny(model=MODELS[name])
    plan = derive(recipe, 1, ROOMY)
    assert count(PlainGPT(recipe.model, plan.shape.vocab_size)) == plan.num_parameters.total
    assert count(transformers_model(recipe)) == plan.num_parameters.total


def test_grouped_queries_are_those_of_copied_keys() -> None:
    grouped, whole = (PlainGPT(tiny(model={**LLAMA, "num_query_groups": n}).model, 512).eval() for n in (2, 4))
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        heads = state[name].unflatten(0, (-1, 16))  # 4 queries, 2 keys, 2 values
        state[name] = torch.cat([heads[:4], heads[4:].repeat_interleave(2, 0)]).flatten(0, 1)
    whole.load_state_dict(state)
    ids = torch.arange(64)[None] * 7 % 512
    torch.testing.assert_close(grouped(ids, ids), whole(ids, ids))


def test_a_recipe_that_transformers_has_no_simple_model_for_is_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        transformers_model(tiny(model={**LLAMA, "num_moe_experts": 4}))


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,1", "3"), ("", "")])
def test_contenders_see_one_gpu(visible: str | None, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_gpu() == {"CUDA_VISIBLE_DEVICES": first}
