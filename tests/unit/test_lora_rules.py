"""What adapters are refused with, and what the plan makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.variants.upcycling import load_upcycled
from tests.refusals import refused

NODE = Cluster((DetectedGpu("H100", 80 << 30, 80 << 30, 989.4),) * 8, 8, 1 << 40, 1 << 40, 1 << 40)


def planned(name: str, *overrides: str, ranks: int = 1) -> Plan:
    return derive(load(name, list(overrides)).recipe, ranks, replace(NODE, gpus=NODE.gpus[:ranks]))


@pytest.mark.parametrize(
    ("overrides", "where", "rule"),
    [
        (["lora.target_modules=[linear_qvk]"], "lora.target_modules.0", "linear_qkv"),
        (["lora.target_modules=[experts.linear_fc1]"], "lora.target_modules.0", "linear_fc1"),
        (["lora.target_modules=[linear_proj,linear_proj]"], "lora.target_modules.1", "linear_proj"),
        (["lora.target_modules=[]"], "lora.target_modules", "linear_qkv"),
        (["lora.rank=193"], "lora.rank", "192"),
        (["lora.rank=0"], "lora.rank", "0"),
        (["layout.zero.stage=2"], "layout.engine", "layout.zero.stage"),
        (["layout.engine=deepspeed", "layout.zero.stage=1"], "layout.engine", "layout.zero.stage"),
        (["model.mtp_num_layers=1"], "model.mtp_num_layers", "1"),
        (["model.use_mup=true"], "model.use_mup", ()),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(overrides: list[str], where: str, rule: str | tuple[str, ...]) -> None:
    with refused(where, rule=rule):
        load("gpt-tiny", ["lora.rank=4", *overrides])


def test_adapters_that_transformer_engine_has_no_place_for_have_local_layers() -> None:
    experts = ["lora.rank=4", "lora.target_modules=[linear_qkv,experts.linear_fc1]"]
    with refused("model.transformer_impl"):
        load("moe-tiny", [*experts, "model.transformer_impl=transformer_engine"])
    assert not planned("moe-tiny", *experts, "train.precision=bf16", ranks=2).target.transformer_engine
    attention = ["lora.rank=4", "train.precision=bf16"]
    for name, ranks in (("moe-tiny", 2), ("llama3-70b-lora", 8)):
        plan = planned(name, *attention, ranks=ranks)
        assert plan.target.transformer_engine
        # Frozen weights have no gradient, and adapters communicate by themselves.
        on = {choice.key for choice in plan.features if choice.on}
        assert not on & {"layout.gradient_accumulation_fusion", "layout.moe_shared_expert_overlap"}


def test_a_stage_without_adapters_is_refused() -> None:
    only_experts = ["lora.rank=4", "lora.target_modules=[experts.linear_fc1]", "model.moe_layer_freq=[0,0,1,1]"]
    one = ["model.num_layers=4", "layout.expert_model_parallel_size=1"]
    planned("moe-tiny", *only_experts, *one)
    with refused("lora.target_modules"):
        planned("moe-tiny", *only_experts, *one, "layout.pipeline_model_parallel_size=2", ranks=2)


def test_a_run_with_adapters_is_not_upcycled() -> None:
    with refused("lora"):
        load_upcycled(load("lora-tiny").path, ["model.num_moe_experts=4"])


def test_frozen_weights_cost_themselves_alone() -> None:
    """Of Llama 3 70B on 8 GPUs: weights in bf16, and what is trained in proportion to the adapters."""
    plan = planned("llama3-70b-lora", ranks=8)
    assert plan.fits
    whole, added = plan.num_parameters.total, plan.num_adapter_parameters
    # Rank times the sides of seven matrices of transformers, of which q, k, v and gate, up share A.
    sides = (8192 + 10240) + (8192 + 8192) + (8192 + 2 * 28672) + (28672 + 8192)
    assert added == 80 * 16 * sides
    assert plan.checkpoint_bytes == 14 * added < 14 * whole / 300
    assert plan.memory.weights == pytest.approx(2 * whole / 8, rel=0.01)
    assert plan.memory.gradients < plan.memory.weights / 50
    full = planned("llama3-70b-lora", "lora=null", ranks=8)
    assert not full.fits
    assert plan.flops_per_token_causal == pytest.approx(full.flops_per_token_causal * 2 / 3, rel=0.05)
