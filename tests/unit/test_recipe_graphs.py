"""`layout.cuda_graph_impl`: what it needs, what of a layer it covers, and what it changes in a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmrecipes.engine.core import random_states
from llmrecipes.hardware.cluster import DetectedGpu
from llmrecipes.launch.environment import gpu_variables
from llmrecipes.plan.derive import derive
from llmrecipes.plan.memory import graph_buffers
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import SpeedTarget, resolve
from llmrecipes.recipe.speedups.graphs import GRAPHS
from llmrecipes.recipe.variants.proxy import proxy
from tests.helpers import LLAMA, ROOMY, tiny
from tests.refusals import refused
from tests.unit.test_plan_model import EXPERTS

GPU = SpeedTarget("cuda", transformer_engine=True, version=(2, 9), capability=(9, 0), cuda=(13, 0))
NODE = replace(ROOMY, gpus=(DetectedGpu("NVIDIA H100 80GB HBM3", 1 << 40, 1 << 40, None),) * 8)


def of(speed: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    """A recipe with CUDA graphs."""
    sections["model"] = {**LLAMA, **sections.get("model", {})}
    sections["train"] = {"precision": "bf16", **sections.get("train", {})}
    layout = {"cuda_graph_impl": "transformer_engine", **sections.pop("layout", {}), **(speed or {})}
    return tiny(layout=layout, **sections)


@pytest.mark.parametrize(
    ("key", "speed", "sections"),
    [
        ("cuda_graph_impl", {"cuda_graph_impl": "local"}, {}),
        ("cuda_graph_impl", {"cuda_graph_impl": "full_iteration"}, {}),
        ("cuda_graph_impl", {}, {"train": {"precision": "fp32"}}),
        ("cuda_graph_impl", {}, {"layout": {"torch_compile": True}}),
        (
            "cuda_graph_impl", {},
            {"layout": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
        ),
        (
            "cuda_graph_impl", {},
            {"layout": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}},
        ),
        ("cuda_graph_impl", {}, {"lora": {"rank": 4}}),
        ("cuda_graph_impl", {}, {"data": {"sources": [{"type": "docstrings"}], "chat": {}}}),
        (
            "cuda_graph_impl", {"overlap_moe_expert_parallel_comm": True},
            {"model": EXPERTS, "layout": {"expert_model_parallel_size": 2}},
        ),
        ("cuda_graph_modules", {"cuda_graph_modules": ["attn", "moe_router"]}, {"model": EXPERTS}),
        ("cuda_graph_modules", {"cuda_graph_modules": ["mlp"]}, {"model": EXPERTS}),
        ("cuda_graph_modules", {"cuda_graph_impl": None, "cuda_graph_modules": ["attn"]}, {}),
        ("cuda_graph_warmup_steps", {"cuda_graph_impl": None, "cuda_graph_warmup_steps": 2}, {}),
    ],
)  # fmt: skip
def test_what_no_machine_can_give_is_a_problem_of_the_recipe(
    key: str, speed: dict[str, Any], sections: dict[str, Any]
) -> None:
    assert f"layout.{key}" in [problem.key for problem in check(of(speed, **sections))]
    assert not check(of())


@pytest.mark.parametrize(
    "target",
    [replace(GPU, device="cpu"), replace(GPU, transformer_engine=False), replace(GPU, version=(2, 6))],
)
def test_what_a_machine_cannot_give_is_refused(target: SpeedTarget) -> None:
    assert [each.key for each in resolve(of(), target) if each.refused] == ["layout.cuda_graph_impl"]
    assert not [each for each in resolve(of(), GPU) if each.refused]


def test_a_cpu_is_refused_by_name_and_a_rehearsal_is_without() -> None:
    with refused("layout.cuda_graph_impl", rule="GPU"):
        derive(of(), 1, ROOMY)
    rehearsed = proxy(of({"cuda_graph_modules": ["attn"], "cuda_graph_warmup_steps": 2}), "cpu").layout
    assert {getattr(rehearsed, name) for name in GRAPHS} == {None}


def test_layers_with_experts_are_recorded_without_them() -> None:
    chosen = {each.key: each.value for each in resolve(of(model=EXPERTS), GPU)}
    assert chosen["layout.cuda_graph_modules"] == ("attn",)
    assert {each.key: each.value for each in resolve(of(), GPU)}["layout.cuda_graph_modules"] is None


def test_what_is_chosen_to_be_recomputed_is_not_recorded_as_a_checkpoint() -> None:
    full = replace(NODE, gpus=(replace(NODE.gpus[0], memory_bytes=1 << 20, memory_free_bytes=1 << 20),))
    chosen = [
        derive(of(speed, layout={"recompute_granularity": "auto"}), 1, full).recipe
        for speed in ({}, {"cuda_graph_impl": None})
    ]
    assert [each.layout.recompute_granularity for each in chosen] == ["selective", "full"]
    assert not {"core_attn", "mlp"} & set(chosen[0].layout.recompute_modules or ())
    assert not check(chosen[0])


def test_the_plan_has_what_layers_take_and_return() -> None:
    def buffers(speed: dict[str, Any]) -> int:
        return derive(of(speed, model={"num_layers": 4}), 2, NODE).memory.buffers

    tokens, width, layers = 2 * 64, 64, 4
    assert buffers({"cuda_graph_impl": None}) == 0
    assert buffers({}) == 4 * layers * tokens * width * 2
    plan = derive(of(layout={"pipeline_model_parallel_size": 2}, model={"num_layers": 4}), 2, NODE)
    # Two micro-batches at once on the first of two stages, one on the last.
    on_stages = [graph_buffers(plan.recipe, plan.shape, plan.layout, plan.num_microbatches, n) for n in (0, 1)]
    assert on_stages == [buffers({}), buffers({}) // 2]
    weights = 64 * (64 + 2 * 32 + 64) + 3 * 64 * (of().model.ffn_hidden_size or 0)
    assert buffers({"gradient_accumulation_fusion": False}) - buffers({}) == 2 * layers * weights


def test_nccl_registers_no_buffers_of_graphs() -> None:
    for speed, there in (({}, "0"), ({"cuda_graph_impl": None}, None)):
        variables = gpu_variables(derive_run(of(speed), 1, NODE), "NVIDIA H100 80GB HBM3")
        assert variables.get("NCCL_GRAPH_REGISTER", (None, ""))[0] == there


def test_generators_of_graphs_are_saved_and_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph refers to the generator; a resumed run has its numbers."""
    states = {"model-parallel-rng": torch.Generator().manual_seed(3)}

    class Tracker:
        def get_states(self) -> dict[str, torch.Generator]:
            return dict(states)

        def set_states(self, new: dict[str, torch.Generator]) -> None:
            states.update(new)

    monkeypatch.setattr(random_states, "get_cuda_rng_tracker", Tracker)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _state: None)
    (generator,) = states.values()
    saved = random_states.random_states()
    assert all(isinstance(each, torch.Tensor) and each.dtype == torch.uint8 for each in saved.values())
    drawn = torch.rand(4, generator=generator)
    random_states.set_random_states(saved)
    assert states["model-parallel-rng"] is generator
    assert torch.equal(torch.rand(4, generator=generator), drawn)
