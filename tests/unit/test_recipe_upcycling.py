"""Which mixtures of experts continue a dense model exactly, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.recipe.variants.upcycling import load_upcycled
from tests.refusals import refused, require_refusal

EIGHT = "model.num_moe_experts=8"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write(tmp_path, "model.add_bias_linear=false")


def write(folder: Path, *overrides: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        to_yaml(load("gpt-tiny", ["model.hidden_size=256", "model.ffn_hidden_size=1024", *overrides]).recipe), "utf-8"
    )
    return path


def test_the_new_recipe_is_the_dense_one_with_experts(dense: Path) -> None:
    before, after = load_upcycled(dense, [EIGHT, "optimizer.lr=1e-3", "layout.expert_model_parallel_size=2"])
    assert (after.name, after.model.num_moe_experts, after.optimizer.lr) == ("gpt-tiny-moe", 8, 1e-3)
    assert after.model.model_copy(update={"num_moe_experts": None}) == before.model
    assert load_upcycled(dense, [EIGHT, "name=other"])[1].name == "other"


@pytest.mark.parametrize(
    "exact",
    [
        ["model.moe_router_topk=8", "model.moe_router_pre_softmax=true"],
        ["model.moe_router_score_function=sigmoid", "model.moe_router_enable_expert_bias=true"],
        ["model.moe_layer_freq=2", "model.moe_input_jitter_eps=0.1", "model.moe_aux_loss_coeff=0.01"],
        ["model.moe_ffn_hidden_size=1024"],
    ],
)
def test_what_sums_to_one_is_exact(dense: Path, exact: list[str]) -> None:
    assert load_upcycled(dense, [EIGHT, *exact])[1].model.num_moe_experts == 8


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model.moe_router_pre_softmax=true", "model.moe_router_pre_softmax=false"),
        ("model.moe_router_topk_scaling_factor=2.5", "model.moe_router_topk_scaling_factor=null"),
        ("model.moe_ffn_hidden_size=512", "model.moe_ffn_hidden_size=1024"),
        ("model.moe_shared_expert_intermediate_size=256", "model.moe_shared_expert_intermediate_size=null"),
        ("model.moe_expert_capacity_factor=1.25", "model.moe_expert_capacity_factor=null"),
        ("model.num_layers=8", "model.num_layers=8"),  # of the dense model
        ("data.split=[90,5,5]", ()),
        ("name=gpt-tiny", "'gpt-tiny'"),
    ],
)
def test_what_is_not_exact_is_refused_with_its_rule(dense: Path, override: str, rule: str | tuple[str, ...]) -> None:
    with refused(override.partition("=")[0], rule=rule):
        load_upcycled(dense, [EIGHT, override])


def test_sigmoid_scores_of_one_expert_do_not_sum_to_one(dense: Path) -> None:
    with refused("model.moe_router_topk", rule="model.moe_router_topk=2"):
        load_upcycled(dense, [EIGHT, "model.moe_router_score_function=sigmoid", "model.moe_router_topk=1"])


def test_all_reasons_are_in_one_message(dense: Path) -> None:
    overrides = ["model.moe_expert_capacity_factor=1", "model.moe_router_pre_softmax=true", "model.hidden_size=512"]
    with refused(dense) as caught:
        load_upcycled(dense, [EIGHT, *overrides])
    assert len(caught.value.parts) == 3
    for override in overrides:
        require_refusal(caught.value, override.partition("=")[0])


def test_biases_of_the_dense_model_stay(tmp_path: Path) -> None:
    biased = write(tmp_path, "model.add_bias_linear=true")
    assert load_upcycled(biased, [EIGHT])[1].model.add_bias_linear
    with refused("model.add_bias_linear", rule="model.add_bias_linear=false"):
        load_upcycled(biased, [EIGHT, "model.add_bias_linear=false"])


def test_upcycling_goes_from_dense_to_experts(dense: Path, tmp_path: Path) -> None:
    with refused("model.num_moe_experts", rule="model.num_moe_experts=8"):
        load_upcycled(dense, [])
    sparse = tmp_path / "sparse"
    sparse.mkdir()
    write(sparse, "model.add_bias_linear=false", EIGHT)
    with refused("model.num_moe_experts", rule="8"):
        load_upcycled(sparse / "recipe.yaml", [])
