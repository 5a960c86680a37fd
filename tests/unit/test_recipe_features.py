"""Features of the section `speed`: chosen by rule for a machine, or refused where they are asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from llmrecipes.cli.app import run
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.degrees import DEGREES, SHARING
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import LayoutKeys, Recipe, Train
from llmrecipes.recipe.speedups.features import FEATURES, FeatureChoice, SpeedTarget, key_of, require, resolve
from llmrecipes.recipe.speedups.recompute import possible
from tests.helpers import LLAMA, ROOMY, tiny
from tests.refusals import refused

GPU = SpeedTarget("cuda", transformer_engine=True, version=(2, 9))
LOCAL = SpeedTarget("cuda", transformer_engine=False)
CPU = SpeedTarget("cpu", transformer_engine=False)
NODE = replace(ROOMY, gpus=(DetectedGpu("NVIDIA H100", 1 << 40, 1 << 40, None),) * 8)
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope", "rope_type": "yarn"}
BF16: dict[str, Any] = {"train": {"precision": "bf16"}}


def chosen(recipe: Recipe, target: SpeedTarget) -> dict[str, FeatureChoice]:
    return {choice.key.rpartition(".")[2]: choice for choice in resolve(recipe, target)}


def on(recipe: Recipe, target: SpeedTarget) -> set[str]:
    return {name for name, choice in chosen(recipe, target).items() if choice.on}


def test_every_key_is_a_feature() -> None:
    known = {*LayoutKeys.model_fields, *Train.model_fields}
    assert FEATURES.keys() <= known
    assert not FEATURES.keys() & {*DEGREES, *SHARING, "zero", "engine", "name", "torch_compile"}


def test_fusions_need_a_gpu_with_a_compiler() -> None:
    always = {"bias_activation_fusion", "cross_entropy_loss_fusion"}
    llama, fusions = tiny(model=LLAMA), {"bias_dropout_fusion", *always}
    assert on(llama, GPU) & fusions == always
    assert on(llama, LOCAL) & fusions == always
    assert on(tiny(model={"hidden_dropout": 0.1}), GPU) & fusions == fusions
    assert not on(llama, replace(GPU, no_compiler="no C compiler")) & fusions
    assert not on(llama, CPU) & fusions
    assert on(tiny(model=LLAMA, layout={"torch_compile": True}), CPU) & fusions == fusions


def test_what_transformer_engine_has_needs_its_layers() -> None:
    assert "gradient_accumulation_fusion" in on(tiny(model=LLAMA), GPU)
    assert "gradient_accumulation_fusion" not in on(tiny(model=LLAMA), LOCAL)


def test_rotary_embeddings_are_fused_by_transformer_engine_or_a_compiler() -> None:
    llama = tiny(model=LLAMA)
    assert all("apply_rope_fusion" in on(llama, target) for target in (GPU, replace(GPU, no_compiler="none"), LOCAL))
    assert not {"apply_rope_fusion"} & (on(llama, replace(LOCAL, no_compiler="none")) | on(llama, CPU))
    latent = tiny(model=LATENT, layout={"apply_rope_fusion": True})
    assert chosen(latent, GPU)["apply_rope_fusion"].on
    assert chosen(latent, LOCAL)["apply_rope_fusion"].refused, (
        "megatron-core's kernel is for TransformerEngine's layers"
    )


def test_a_key_that_a_recipe_rules_out_is_refused() -> None:
    (problem,) = check(tiny(model={"activation_func": "gelu_tanh"}, layout={"bias_activation_fusion": True}))
    assert problem.key == "layout.bias_activation_fusion"
    assert not check(tiny(layout={"bias_activation_fusion": True}))
    assert check(tiny(model={"num_moe_experts": 2}, layout={"bias_activation_fusion": True}))
    assert not check(tiny(model=LLAMA, layout={"bias_activation_fusion": True}))


@pytest.mark.parametrize(("cluster", "train"), [(ROOMY, BF16["train"]), (NODE, {"precision": "fp32"})])
def test_a_key_that_a_machine_cannot_give_is_refused_by_the_plan(cluster: Cluster, train: dict[str, Any]) -> None:
    recipe = tiny(model=LLAMA, train=train, layout={"gradient_accumulation_fusion": True})
    assert not check(recipe)
    with refused("layout.gradient_accumulation_fusion"):
        derive(recipe, 1, cluster)
    assert derive(tiny(model=LLAMA, layout={"gradient_accumulation_fusion": True}, **BF16), 1, NODE).fits


def test_a_plan_has_every_feature_and_its_reason() -> None:
    planned = derive(tiny(model=LLAMA, **BF16), 1, NODE).as_dict()["speed"]
    assert [choice["key"] for choice in planned] == [key_of(name) for name in FEATURES]
    assert all(choice["reason"] for choice in planned)


def test_a_fused_activation_keeps_less() -> None:
    fused, unfused = (
        derive(tiny(model=LLAMA, layout={"bias_activation_fusion": value}, **BF16), 1, NODE).memory.activations
        for value in (True, False)
    )
    assert fused < unfused


def test_a_dispatcher_with_deep_ep_needs_gpus_and_the_package() -> None:
    model = {**LLAMA, "num_moe_experts": 4, "moe_token_dispatcher_type": "flex"}
    recipe = tiny(model=model, layout={"expert_model_parallel_size": 2}, **BF16)
    assert not check(recipe)
    assert chosen(recipe, GPU)["moe_flex_dispatcher_backend"].value == "deepep"
    planned = derive(recipe, 2, NODE)
    assert planned.fits and any("deep_ep" in warning for warning in planned.warnings)
    with refused("model.moe_token_dispatcher_type"):
        derive(recipe, 2, ROOMY)
    with refused("model.moe_token_dispatcher_type", rule="deep_ep"):
        require(resolve(recipe, replace(GPU, no_deep_ep="deep_ep is not installed")))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model.moe_token_dispatcher_type", {"layout": {"expert_model_parallel_size": 1}}),
        ("model.moe_token_dispatcher_type", {"model": {"moe_router_dtype": "fp64"}}),
        ("layout.moe_shared_expert_overlap", {"layout": {"moe_shared_expert_overlap": True}}),
        ("layout.cp_comm_type", {"layout": {"cp_comm_type": "a2a"}}),
        ("layout.ddp_bucket_size", {"layout": {"ddp_bucket_size": 1000}}),
        ("layout.align_param_gather", {"layout": {"align_param_gather": True}}),
        ("train.reduce_scatter_with_fp32_accumulation", {"train": {"reduce_scatter_with_fp32_accumulation": True}}),
    ],
)
def test_what_no_machine_can_give_is_a_problem_of_the_recipe(key: str, change: dict[str, Any]) -> None:
    sections: dict[str, Any] = {
        "model": {**LLAMA, "num_moe_experts": 4, "moe_token_dispatcher_type": "flex"},
        "layout": {"expert_model_parallel_size": 2}, **BF16
    }  # fmt: skip
    both: dict[str, Any] = {
        name: {**sections.get(name, {}), **change.get(name, {})} for name in sections.keys() | change.keys()
    }
    assert key in [problem.key for problem in check(tiny(**both))]


def test_kernels_of_experts_need_a_version_of_transformer_engine() -> None:
    experts = tiny(model={**LLAMA, "num_moe_experts": 4}, **BF16)
    assert {"moe_permute_fusion", "moe_router_fusion"} <= on(experts, GPU)
    older = chosen(experts, replace(GPU, version=(2, 6)))
    assert older["moe_permute_fusion"].on and not older["moe_router_fusion"].on
    assert "2.7" in older["moe_router_fusion"].reason


def test_heads_divide_over_the_ranks_that_exchange_them() -> None:
    speed = {"cp_comm_type": "a2a"}
    assert not check(tiny(model=LLAMA, layout={"context_parallel_size": 2, **speed}))
    (problem,) = check(tiny(model=LLAMA, layout={"context_parallel_size": 4, **speed}))
    assert problem.key == "layout.cp_comm_type"


def shown(capsys: pytest.CaptureFixture[str], *asked: str) -> dict[str, Any]:
    run(["plan", *asked, "--speed", "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_show_has_every_feature_and_how_to_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("layout=null", "layout.recompute_granularity=auto")
    where = ("llama3-8b", *layout, "--cluster", "h100-ib", "--nodes", "2")
    rows = {row["key"]: row for row in shown(capsys, *where)["features"]}
    assert {key_of(name) for name in FEATURES} < set(rows)
    assert all(row["reason"] for row in rows.values())
    assert rows["layout.ddp_pad_buckets_for_high_nccl_busbw"]["value"] is True
    changes = {
        key: rows[key]["change"].split()
        for key in ("layout.bias_activation_fusion", "layout.manual_gc", "train.grad_reduce_in_fp32")
    }
    every = [change for several in changes.values() for change in several]
    after = {row["key"]: row for row in shown(capsys, *where, *every)["features"]}
    assert all(after[key]["value"] is not rows[key]["value"] for key in changes)


def test_show_says_only_what_changes_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("llama3-8b", "--cluster", "h100-ib")
    for asked, change in (
        ((*where,), "local"),
        ((*where, "model.transformer_impl=transformer_engine"), "local"),
        ((*where, "model.transformer_impl=local"), "auto"),
        ((*where, "train.precision=fp32"), None),
    ):
        rows = {row["key"]: row for row in shown(capsys, *asked)["features"]}
        assert rows["model.transformer_impl"]["change"] == (change and f"model.transformer_impl={change}"), asked
        fused = "TransformerEngine" in rows["layout.torch_compile"]["reason"]
        assert fused is (rows["model.transformer_impl"]["value"] == "transformer_engine")


def test_experts_that_are_to_overlap_are_not_recomputed() -> None:
    sections: dict[str, Any] = {
        "model": {**LLAMA, "num_moe_experts": 4, "moe_shared_expert_intermediate_size": 64,
                  "moe_token_dispatcher_type": "alltoall"},
    }  # fmt: skip
    assert "shared_experts" in possible(tiny(**sections))
    assert "shared_experts" not in possible(tiny(layout={"moe_shared_expert_overlap": True}, **sections))


def test_only_named_groups_have_priority(capsys: pytest.CaptureFixture[str]) -> None:
    """torch gives the streams of all groups the priority where the variable is set."""
    for asked, everywhere in ((), True), (("layout.high_priority_stream_groups=[tp]",), False):
        report = shown(capsys, "llama3-8b", "--cluster", "h100-ib", *asked)
        assert ("TORCH_NCCL_HIGH_PRIORITY" in [each["name"] for each in report["environment"]]) is everywhere


def test_variables_of_the_environment_have_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("llama3-8b", "--cluster", "h100-ib", "layout.deterministic_mode=true")
    variables = {each["name"]: each for each in shown(capsys, *asked)["environment"]}
    assert variables["NCCL_ALGO"]["value"] == "Ring"
    assert variables["NVTE_FWD_LAYERNORM_SM_MARGIN"]["value"] == "20"
    assert all(variable["reason"] for variable in variables.values())
