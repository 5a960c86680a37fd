"""Which mixtures of experts continue a dense model exactly, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.recipe.upcycling import load_upcycled

EIGHT = "model.num_moe_experts=8"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write(tmp_path, "model.add_bias_linear=false")


def write(folder: Path, *overrides: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(to_yaml(load("gpt-tiny", ["model.hidden_size=256", *overrides]).recipe), "utf-8")
    return path


def test_the_new_recipe_is_the_dense_one_with_experts(dense: Path) -> None:
    before, after = load_upcycled(dense, [EIGHT, "optimizer.lr=1e-3", "parallelism.expert_model_parallel_size=2"])
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
        ("model.moe_router_pre_softmax=true", "sum to one"),
        ("model.moe_router_topk_scaling_factor=2.5", "sum to one"),
        ("model.moe_ffn_hidden_size=512", "copy of the whole dense MLP"),
        ("model.moe_shared_expert_intermediate_size=256", "shared experts would add"),
        ("model.moe_expert_capacity_factor=1.25", "drops loses a part"),
        ("model.num_layers=8", "stays as the dense model has it"),
        ("data.split=[90,5,5]", "token ids keep their meaning"),
        ("name=gpt-tiny", "another model has another name"),
    ],
)
def test_what_is_not_exact_is_refused_with_its_rule(dense: Path, override: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule) as caught:
        load_upcycled(dense, [EIGHT, override])
    assert caught.value.code == ExitCode.BAD_INPUT
    assert override.partition("=")[0] in str(caught.value)


def test_sigmoid_scores_of_one_expert_do_not_sum_to_one(dense: Path) -> None:
    with pytest.raises(UserError, match="1 with sigmoid scores"):
        load_upcycled(dense, [EIGHT, "model.moe_router_score_function=sigmoid", "model.moe_router_topk=1"])


def test_all_reasons_are_in_one_message(dense: Path) -> None:
    overrides = ["model.moe_expert_capacity_factor=1", "model.moe_router_pre_softmax=true", "model.hidden_size=512"]
    with pytest.raises(UserError) as caught:
        load_upcycled(dense, [EIGHT, *overrides])
    assert "3 reasons" in str(caught.value)
    assert all(override.partition("=")[0] in str(caught.value) for override in overrides)


def test_biases_of_the_dense_model_have_no_place_in_experts(tmp_path: Path) -> None:
    biased = write(tmp_path, "model.add_bias_linear=true")
    with pytest.raises(UserError, match="add_bias_linear"):
        load_upcycled(biased, [EIGHT])
    with pytest.raises(UserError, match=r"train the dense model with model\.add_bias_linear=false"):
        load_upcycled(biased, [EIGHT, "model.add_bias_linear=false"])


def test_upcycling_goes_from_dense_to_experts(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.num_moe_experts=8"):
        load_upcycled(dense, [])
    sparse = tmp_path / "sparse"
    sparse.mkdir()
    write(sparse, "model.add_bias_linear=false", EIGHT)
    with pytest.raises(UserError, match="has 8 experts already"):
        load_upcycled(sparse / "recipe.yaml", [])
