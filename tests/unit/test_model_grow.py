"""A model that grows: wider ones, and new layers by identity, compute what the small one does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.engine.core.model.gpt import build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.models.grow import GrownWeights
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.variants.growth import Growth, layers, load_grown
from tests.helpers import ROOMY, engine_of, random_batches, tiny
from tests.refusals import refused

LLAMA = {
    "num_layers": 3, "normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True,
    "add_bias_linear": False, "num_query_groups": 2, "ffn_hidden_size": 88, "qk_layernorm": True,
    "position_embedding_type": "rope", "share_embeddings_and_output_weights": False,
}  # fmt: skip
MOE = {
    "num_layers": 3, "add_bias_linear": False, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48,
    "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
BIASED = {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None}
LATENT = {
    "multi_latent_attention": True, "position_embedding_type": "rope", "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 12, "qk_layernorm": True, "normalization": "RMSNorm",
    "add_bias_linear": False,
}  # fmt: skip
GPT: dict[str, Any] = {"num_layers": 3}


class Small:
    """The weights of a model with no symmetry, as a checkpoint's."""

    def __init__(self, engine: MegatronEngine, dtype: torch.dtype) -> None:
        self.tensors = {name: each.detach().to(dtype) for name, each in engine.modules[0].named_parameters()}
        self.tensors |= {name: each for name, each in engine.modules[0].named_buffers() if "expert_bias" in name}

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()


def grown(folder: Path, model: dict[str, Any], growth: Growth, precision: str = "fp32") -> tuple[float, float]:
    """Loss of the first step of a small model, and of the one that it grows to."""
    recipe = tiny(model=model, train={"precision": precision}, optimizer={"lr": 1e-3})
    path = folder / "recipe.yaml"
    path.write_text(to_yaml(recipe), "utf-8")
    small, large = load_grown(path, growth, [])
    engine = engine_of(small)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, each in engine.modules[0].named_parameters():
            each.add_(torch.randn_like(each) * (0.2 if each.dim() == 1 or "router" in name else 0.05))
        for name, each in engine.modules[0].named_buffers():
            if "expert_bias" in name:
                each.normal_(std=0.1)
    source = Small(engine, torch.bfloat16 if precision == "bf16" else torch.float32)
    losses = []
    weights = GrownWeights(source, small.model, large.model, growth)
    platform = select()
    plan = derive(large, 1, ROOMY)
    other = MegatronEngine(plan, build(plan, platform, weights), platform)
    for each in (engine, other):
        batches = random_batches(small)
        losses.append(each.evaluate(batches, 2) or 0.0)
        each.close()
    return losses[0], losses[1]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("model", "growth"),
    [
        (LLAMA, Growth(layers=5)),
        (GPT, Growth(layers=6)),
        ({**LLAMA, "window_size": [3, 0], "window_attn_skip_freq": 3}, Growth(layers=5)),
        (LLAMA, Growth(ffn_hidden_size=200)),
        (GPT, Growth(ffn_hidden_size=700)),
        (LLAMA, Growth(hidden_size=192)),
        (GPT, Growth(hidden_size=128)),  # LayerNorm, biases, tied embeddings, learned positions
        (LLAMA, Growth(heads=8)),
        (GPT, Growth(heads=8)),
        (MOE, Growth(layers=6)),
        (MOE, Growth(experts=8)),
        (MOE, Growth(moe_ffn_hidden_size=100, ffn_hidden_size=300, hidden_size=128)),
        ({**MOE, **BIASED}, Growth(layers=4, experts=8, moe_ffn_hidden_size=100, hidden_size=128)),
        ({**MOE, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}, Growth(experts=12)),
        (LATENT, Growth(hidden_size=128, heads=8, layers=3)),
        ({**LATENT, "q_lora_rank": None}, Growth(heads=8, hidden_size=128)),
        (LLAMA, Growth(layers=4, hidden_size=128, ffn_hidden_size=90, heads=8)),
    ],
    ids=lambda value: None if isinstance(value, dict) else "-".join(k for k, v in vars(value).items() if v),
)
def test_the_loss_before_the_first_step_is_the_small_model_s(
    tmp_path: Path, model: dict[str, Any], growth: Growth
) -> None:
    before, after = grown(tmp_path, model, growth)
    assert before > 3 and after == pytest.approx(before, abs=1e-5)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("method", ["stack", "interpolate"])
def test_copies_of_layers_that_compute_change_the_loss(tmp_path: Path, method: str) -> None:
    before, after = grown(tmp_path, GPT, Growth(layers=6, by=method))
    assert abs(before - after) > 1e-3


@pytest.mark.usefixtures("world")
def test_copies_sum_to_their_weight_in_the_precision_of_the_checkpoint(tmp_path: Path) -> None:
    recipe = tiny(model=LLAMA)
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(recipe), "utf-8")
    growth = Growth(ffn_hidden_size=5 * 88 + 3)
    small, large = load_grown(path, growth, [])
    source = Small(engine_of(small), torch.bfloat16)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    wide = GrownWeights(source, small.model, large.model, growth).read(name, (3, 0), (7, 443)).double()
    narrow = source.read(name)[3:10].double()
    total = torch.zeros(7, 88, dtype=torch.float64).index_add_(1, torch.arange(443) % 88, wide)
    assert torch.equal(total, narrow)
    copies = wide[:, : 5 * 88].view(7, 5, 88)[:, :, 3:].unbind(1)  # of channels that have five
    for one, other in combinations(copies, 2):
        assert not torch.allclose(one, other)  # or both would stay equal for ever


def test_layers_are_copies_of_the_ones_before_them() -> None:
    assert [layer.source for layer in layers(3, 6, "stack")] == [0, 1, 2, 0, 1, 2]
    assert [layer.source for layer in layers(2, 5, "interpolate")] == [0, 0, 0, 1, 1]
    assert [(layer.source, layer.silent) for layer in layers(2, 3, "identity")] == [(0, False), (0, True), (1, False)]
    assert not any(layer.silent for layer in layers(2, 4, "stack"))


@pytest.mark.parametrize(
    ("model", "growth", "where", "rule"),
    [
        (GPT, Growth(), "--layers", ()),
        (GPT, Growth(layers=3), "--layers", ()),
        (GPT, Growth(layers=2), "--layers", "3"),
        (GPT, Growth(layers=7, by="stack"), "--layers", ("6", "9")),
        (GPT, Growth(layers=6, by="twice"), "--by", ()),
        (GPT, Growth(hidden_size=128, by="stack"), "--by", "--layers"),
        (GPT, Growth(hidden_size=100), "--hidden-size", ("64", "128")),
        (GPT, Growth(heads=6), "--heads", ("4", "8")),
        (GPT, Growth(ffn_hidden_size=100), "--ffn-hidden-size", "256"),
        (GPT, Growth(experts=4), "--experts", ()),
        (MOE, Growth(experts=6), "--experts", ("4", "8")),
        ({**MOE, "moe_layer_freq": 1}, Growth(ffn_hidden_size=300), "--ffn-hidden-size", "--moe-ffn-hidden-size"),
        ({**MOE, "moe_expert_capacity_factor": 1.0}, Growth(experts=8), "model.moe_expert_capacity_factor", ()),
        ({**GPT, "mtp_num_layers": 1}, Growth(layers=6), "model.mtp_num_layers", ()),
        ({**GPT, "use_mup": True}, Growth(hidden_size=128), "model.use_mup", ()),
    ],
)
def test_sizes_that_cannot_be_grown_to_are_refused(
    tmp_path: Path, model: dict[str, Any], growth: Growth, where: str, rule: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(tiny(model=model)), "utf-8")
    with refused(where, rule=rule):
        load_grown(path, growth, [])


def test_the_grown_recipe_is_that_of_the_run_with_other_sizes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(tiny(model=MOE)), "utf-8")
    small, large = load_grown(path, Growth(layers=6, heads=8), ["optimizer.lr=1e-4"])
    assert (large.name, large.optimizer.lr) == ("tiny-grown", 1e-4)
    sizes = {"num_layers": 6, "moe_layer_freq": [0, 0, 1, 1, 1, 1], "num_attention_heads": 8, "kv_channels": 16}
    assert large.model == small.model.model_copy(update=sizes)
    with refused("model.rotary_base"):
        load_grown(path, Growth(layers=6), ["model.rotary_base=500000"])
    with refused("name"):
        load_grown(path, Growth(layers=6), ["name=tiny"])
