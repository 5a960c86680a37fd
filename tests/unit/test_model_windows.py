"""Sliding windows: the mask, what is counted for them, and where they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.utils import get_sliding_window_causal_mask, is_layer_window_attention

from llmrecipes.engine.core.model.attention import window_mask
from llmrecipes.engine.core.model.attention_logits import largest_logit
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.models.gguf_file import _require_form
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.variants.growth import Growth, _keys
from llmrecipes.recipe.variants.proxy import proxy
from tests.helpers import tiny
from tests.refusals import refused

GPUS = Cluster((DetectedGpu("NVIDIA H100 80GB HBM3", 79 << 30, 79 << 30, 989.4),) * 8, 8, 1 << 40, 1 << 40, 1 << 40)
SIZES: dict[str, Any] = {"num_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}


@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (4, 12), (1, 12), (12, 17)])
@pytest.mark.parametrize("before", [0, 1, 5, 30])
def test_the_mask_is_megatron_cores(queries: int, keys: int, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None, **options: ones(*size, **options))
    hidden = get_sliding_window_causal_mask(queries, keys, (before, 0))
    mask = window_mask(queries, keys, before, torch.float32, torch.device("cpu"))
    assert torch.equal(mask == 0, ~hidden.view(queries, keys))
    assert torch.equal(mask.isneginf(), hidden.view(queries, keys))


@pytest.mark.parametrize("skipped", [None, 2, 3, 7, [1, 0, 0, 1, 1]])
def test_the_layers_with_a_window_are_megatron_cores(skipped: Any) -> None:
    model = Model.model_validate({**SIZES, "seq_length": 16, "window_size": [3, 0], "window_attn_skip_freq": skipped})
    wanted = [is_layer_window_attention((3, 0), skipped, number) for number in range(1, 6)]
    assert list(shape(model).windowed) == wanted
    assert not any(shape(Model.model_validate({**SIZES, "seq_length": 16})).windowed)


@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_tokens_that_are_seen_are_counted(window: int) -> None:
    length = 64
    model = {**SIZES, "seq_length": length, "window_size": [window - 1, 0], "window_attn_skip_freq": [1, 1, 0, 0, 0]}
    s = shape(Model.model_validate(model))
    near = [min(place + 1, window) for place in range(length)]
    # As without a window, the diagonal counts half.
    exact = 2 * (sum(near) - length / 2) / length + 3 * length / 2
    assert s.keys_seen(causal=True) == pytest.approx(exact, abs=1.0)
    assert s.keys_seen(causal=False) == 2 * min(window, length) + 3 * length


def test_a_window_saves_operations_and_time() -> None:
    model = {"seq_length": 2048, "window_size": [127, 0], "window_attn_skip_freq": 4}
    without = derive(tiny(model={"seq_length": 2048}), 1, GPUS)
    plan = derive(tiny(model=model), 1, GPUS)
    assert plan.flops_per_token_causal < without.flops_per_token_causal
    assert plan.memory == without.memory


def test_the_largest_logit_is_one_that_is_seen() -> None:
    drawn = torch.Generator().manual_seed(3)
    query, key = (torch.randn(24, 2, heads, 8, generator=drawn) for heads in (4, 2))
    key[3, 0, 0] = 50 * query[10, 0, 0]
    scores = torch.einsum("qbhc,kbhc->bhqk", query, key.repeat_interleave(2, 2)) * 0.25
    for before in (0, 5, 6, 7, 40):
        mask = window_mask(24, 24, before, torch.float32, torch.device("cpu"))
        assert float(largest_logit(query, key, 0.25, before=before)) == pytest.approx(float((scores + mask).max()))
    assert float(largest_logit(query, key, 0.25, before=7)) > float(largest_logit(query, key, 0.25, before=6))


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"window_attn_skip_freq": 2}, "model.window_attn_skip_freq"),
        ({"window_size": [3, 0], "window_attn_skip_freq": [1, 0, 1]}, "model.window_attn_skip_freq"),
        ({"window_size": [3, 0], "window_attn_skip_freq": [0, 0]}, "model.window_attn_skip_freq"),
    ],
)
def test_layers_without_a_meaning_are_refused(model: dict[str, Any], key: str) -> None:
    (problem,) = check(tiny(model=model))
    assert problem.key == key


@pytest.mark.parametrize("window", [[3, 1], [-1, 0], [3], 3])
def test_only_tokens_before_a_token_are_in_its_window(window: Any) -> None:
    with pytest.raises(ValueError, match="window_size"):
        Model.model_validate({**SIZES, "seq_length": 16, "window_size": window})


def test_transformer_engines_ring_has_no_windows() -> None:
    sections: dict[str, Any] = {
        "layout": {"context_parallel_size": 2, "micro_batch_size": 1},
        "train": {"precision": "bf16", "global_batch_size": 8},
    }
    recipe = tiny(model={"window_size": [3, 0]}, **sections)
    with refused("layout.cp_comm_type", rule="all_gather"):
        derive(recipe, 2, GPUS)
    for kind in ("a2a", "all_gather"):
        derive(recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"cp_comm_type": kind})}), 2, GPUS)
    derive(tiny(model={"window_size": [3, 0], "transformer_impl": "local"}, **sections), 2, GPUS)
    derive(tiny(**sections), 2, GPUS)


def test_llama_cpp_has_no_windows_of_these_models() -> None:
    _require_form("mistral", {"sliding_window": None, "max_position_embeddings": 64})
    _require_form("mistral", {"sliding_window": 64, "max_position_embeddings": 64})
    with refused("--to gguf", rule="model.max_position_embeddings=63"):
        _require_form("mistral", {"sliding_window": 63, "max_position_embeddings": 64})


@pytest.mark.parametrize("skipped", [None, 6, [1] * 5 + [0] * 7])
def test_a_rehearsal_has_both_kinds_of_layers_and_hides_tokens(skipped: Any) -> None:
    model = {"num_layers": 12, "seq_length": 4096, "window_size": [511, 0], "window_attn_skip_freq": skipped}
    small = proxy(tiny(model={**model, "max_position_embeddings": 4096}))
    assert check(small) == []
    s = shape(small.model)
    assert s.window is not None and s.window < s.seq_length
    assert set(s.windowed) == ({True} if skipped is None else {True, False})


def test_grown_layers_keep_their_windows() -> None:
    keys = _keys(tiny(model={"num_layers": 2, "window_size": [3, 0], "window_attn_skip_freq": 2}), Growth(layers=4))
    assert sorted(keys["model.window_attn_skip_freq"]) == [0, 0, 1, 1]
