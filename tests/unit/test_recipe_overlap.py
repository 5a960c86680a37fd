"""Keys of `speed` that hide communication inside layers: what rules them out, and what a plan counts for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmrecipes.hardware.cluster import DetectedGpu
from llmrecipes.launch.environment import gpu_variables
from llmrecipes.plan.derive import derive
from llmrecipes.plan.memory import USER_BUFFERS
from llmrecipes.plan.pending import fullest
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import SpeedTarget, needing_a_gpu, require, resolve, value
from llmrecipes.recipe.speedups.overlap import OVERLAP
from llmrecipes.recipe.speedups.recompute import possible
from tests.helpers import LLAMA, ROOMY, tiny
from tests.refusals import refused

NODE = replace(ROOMY, gpus=(DetectedGpu("NVIDIA H100 80GB HBM3", 1 << 40, 1 << 40, None),) * 8)
GPU = SpeedTarget("cuda", transformer_engine=True, version=(2, 9))
Sections = dict[str, dict[str, Any]]
TENSOR: Sections = {
    "model": LLAMA,
    "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    "train": {"precision": "bf16"},
}
EXPERTS: Sections = {
    "model": {**LLAMA, "num_moe_experts": 4},
    "layout": {"expert_model_parallel_size": 2, "micro_batch_size": 1, "overlap_moe_expert_parallel_comm": True},
    "train": {"precision": "bf16", "global_batch_size": 8},
}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope", "add_bias_linear": False}


def made(base: Sections, change: Sections) -> Recipe:
    both: dict[str, Any] = {
        name: {**base.get(name, {}), **change.get(name, {})} for name in base.keys() | change.keys()
    }
    return tiny(**both)


@pytest.mark.parametrize(
    ("base", "key", "change"),
    [
        (TENSOR, "tp_comm_overlap", {"layout": {"sequence_parallel": False}}),
        (TENSOR, "tp_comm_overlap", {"train": {"precision": "fp32"}}),
        (TENSOR, "tp_comm_overlap", {"layout": {"deterministic_mode": True}}),
        (TENSOR, "tp_comm_overlap", {"model": {"mtp_num_layers": 1}}),
        (TENSOR, "tp_comm_overlap", {"model": LATENT}),
        (TENSOR, "tp_comm_bulk_dgrad", {"layout": {"tp_comm_overlap": None, "tp_comm_bulk_dgrad": True}}),
        (EXPERTS, "overlap_moe_expert_parallel_comm", {"layout": {"expert_model_parallel_size": 1}}),
        (EXPERTS, "overlap_moe_expert_parallel_comm", {"model": {"moe_token_dispatcher_type": "allgather"}}),
        (EXPERTS, "overlap_moe_expert_parallel_comm", {"train": {"precision": "fp32"}}),
        (EXPERTS, "overlap_moe_expert_parallel_comm", {"layout": {"pipeline_model_parallel_size": 2}}),
        (EXPERTS, "overlap_moe_expert_parallel_comm", {"model": {"mtp_num_layers": 1}}),
        (
            EXPERTS, "overlap_moe_expert_parallel_comm",
            {"layout": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
        ),
        (EXPERTS, "delay_wgrad_compute",
         {"layout": {"overlap_moe_expert_parallel_comm": None, "delay_wgrad_compute": True}}),
    ],
)  # fmt: skip
def test_what_rules_a_key_out(base: Sections, key: str, change: Sections) -> None:
    assert not check(made(base, {}))
    assert f"layout.{key}" in [problem.key for problem in check(made(base, change))]


def test_only_transformer_engine_has_user_buffers_and_late_weight_gradients() -> None:
    tensor, experts = made(TENSOR, {}), made(EXPERTS, {"layout": {"delay_wgrad_compute": True}})
    require(resolve(tensor, GPU))
    require(resolve(experts, GPU))
    with refused("layout.tp_comm_overlap", rule="2.7"):
        require(resolve(tensor, replace(GPU, version=(2, 6))))
    with refused("layout.delay_wgrad_compute", rule="2.8"):
        require(resolve(experts, replace(GPU, version=(2, 7))))
    with refused("layout.tp_comm_overlap"):
        derive(tensor, 2, ROOMY)


def test_shared_experts_leave_the_messages_to_the_other_overlap() -> None:
    shared: Sections = {"model": {"moe_shared_expert_intermediate_size": 64, "moe_token_dispatcher_type": "alltoall"}}
    assert not value(resolve(made(EXPERTS, shared), GPU), "moe_shared_expert_overlap")
    alone = made(EXPERTS, {**shared, "layout": {"overlap_moe_expert_parallel_comm": False}})
    assert value(resolve(alone, GPU), "moe_shared_expert_overlap")


def test_user_buffers_are_in_the_plan() -> None:
    on, off = (derive(made(TENSOR, {"layout": {"tp_comm_overlap": each}}), 2, NODE) for each in (True, None))
    recipe = on.recipe
    tokens = recipe.layout.micro_batch_size * recipe.model.seq_length
    assert on.memory.buffers - off.memory.buffers == USER_BUFFERS * tokens * recipe.model.hidden_size * 2
    assert on.memory.workspace > off.memory.workspace  # two more communicators


@pytest.mark.parametrize(
    ("base", "key", "part"),
    [(TENSOR, "tp_comm_overlap", "tensor"), (EXPERTS, "overlap_moe_expert_parallel_comm", "expert")],
)
def test_a_forecast_hides_what_the_key_overlaps(base: Sections, key: str, part: str) -> None:
    on, off = (
        forecast(derive(made(base, {"layout": {key: each}}), 2, NODE), None).step.parts()[part] for each in (True, None)
    )
    assert 0.5 * off < on < 0.8 * off


def test_one_micro_batch_more_is_kept() -> None:
    for stages, chunks, stage in ((1, 1, 0), (2, 2, 0), (2, 2, 1), (4, 2, 1)):
        most = [
            max(sum(pending) for pending, *_ in fullest(stages, chunks, 8, stage, True, combined))
            for combined in (False, True)
        ]
        assert most[1] == most[0] + 1
    on, off = (
        derive(made(EXPERTS, {"layout": {"overlap_moe_expert_parallel_comm": each}}), 2, ROOMY).memory.activations
        for each in (True, None)
    )
    assert on > 1.5 * off


def test_what_is_recomputed_dispatches_no_token_again() -> None:
    assert "moe" not in possible(made(EXPERTS, {}))
    small = replace(NODE, gpus=(DetectedGpu("NVIDIA H100 80GB HBM3", 1 << 28, 1 << 28, None),) * 8)
    planned = derive(made(EXPERTS, {"layout": {"recompute_granularity": "auto"}}), 2, small)
    assert planned.recipe.layout.recompute_granularity == "selective"
    assert not check(planned.recipe)


def test_messages_of_experts_have_queues() -> None:
    def queues(recipe: Recipe) -> str | None:
        variables = gpu_variables(derive_run(recipe, 4, NODE), "NVIDIA H100 80GB HBM3")
        return variables.get("CUDA_DEVICE_MAX_CONNECTIONS", (None,))[0]

    both: Sections = {"layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
    assert queues(made(EXPERTS, both)) == "32"
    assert queues(made(EXPERTS, {"layout": {**both["layout"], "overlap_moe_expert_parallel_comm": None}})) == "1"


def test_a_rehearsal_has_none_of_them() -> None:
    assert set(OVERLAP) <= set(needing_a_gpu())
