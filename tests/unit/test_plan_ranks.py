"""The plan's layers and parameters of single ranks against the models that megatron-core builds for them.

The ranks are built one after another in one process, over torch's process group that does not communicate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dist.worlds import GlooWorld

Measured = dict[str, list[dict[str, Any]]]

BASE = {
    "num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 500,
}  # fmt: skip
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "silu",
    "gated_linear_unit": True, "add_bias_linear": False, "share_embeddings_and_output_weights": False,
}  # fmt: skip
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 96, "moe_shared_expert_intermediate_size": 96}
LATENT = {
    "multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}
CHUNKS = {**STAGES, "virtual_pipeline_model_parallel_size": 2}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
SHARED = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tensor": (2, {}, TENSOR),
    "tensor, biases of the projection": (2, {"add_bias_linear": False, "add_qkv_bias": True}, TENSOR),
    "tensor, norms of queries and keys": (2, {"qk_layernorm": True, "num_query_groups": 2}, TENSOR),
    "stages, tied": (2, {}, STAGES),
    "stages, untied": (2, LLAMA, STAGES),
    "chunks": (2, LLAMA, CHUNKS),
    "first stage": (2, {}, {**STAGES, "num_layers_in_first_pipeline_stage": 3}),
    "both ends": (4, {}, {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 1,
                          "num_layers_in_last_pipeline_stage": 1}),
    "ends count": (2, {"num_layers": 6}, {**CHUNKS, **ENDS}),
    "ends count, empty chunks": (2, {"num_layers": 2}, {**CHUNKS, **ENDS}),
    "written stages": (4, {}, {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|t|ttt|L"}),
    "written chunks, more tokens": (
        4, {**LLAMA, "mtp_num_layers": 2},
        {**TENSOR, **CHUNKS, "pipeline_model_parallel_layout": "Ett|t|t|mmL"},
    ),
    "experts": (2, {**LLAMA, **EXPERTS}, SHARED),
    "some layers with experts": (4, {**LLAMA, **EXPERTS, "moe_layer_freq": [0, 1, 0, 1]}, {**CHUNKS, **SHARED}),
    "every third layer with experts": (2, {**LLAMA, **EXPERTS, "moe_layer_freq": 3}, STAGES),
    "latent attention": (2, {**LLAMA, **LATENT}, TENSOR),
    "more tokens": (4, {**LLAMA, "mtp_num_layers": 2}, {**TENSOR, **STAGES}),
    "more tokens, tied": (2, {**LLAMA, "mtp_num_layers": 1, "share_embeddings_and_output_weights": True}, TENSOR),
    "deepseek": (
        8, {**LLAMA, **EXPERTS, **LATENT, "num_layers": 5, "moe_layer_freq": [0, 1, 1, 1, 1], "mtp_num_layers": 1},
        {**TENSOR, **STAGES, **SHARED, "context_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3},
    ),
}  # fmt: skip


def vectors(module: Any) -> Iterator[Any]:
    """Parameters of embeddings, the output layer, norms and biases."""
    for name, parameter in module.named_parameters():
        if parameter.dim() != 2 or name.startswith(("embedding.", "output_layer.")):
            yield parameter


def measure() -> Measured:
    """Layers of each chunk and parameters, planned and real, of a rank of each stage: job of a rank without a group."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from llmrecipes.engine.core.model.gpt import build
    from llmrecipes.engine.core.platform import select
    from llmrecipes.engine.core.world import RANK_ORDER, seed_random_states
    from llmrecipes.hardware.cluster import Cluster
    from llmrecipes.plan.derive import derive
    from llmrecipes.plan.parameters import count_on_rank, vectors_on_rank
    from llmrecipes.recipe.rules.recipe_rules import check
    from llmrecipes.recipe.schema import Recipe

    platform = select()
    platform.install()
    cpu = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 40, memory_available_bytes=1 << 40, disk_free_bytes=1 << 40)
    degrees = (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    )  # fmt: skip
    found: Measured = {}
    for name, (ranks, model, parallelism) in LAYOUTS.items():
        train = {"train_iters": 1, "global_batch_size": 8, "precision": "fp32"}
        sections = {"model": {**BASE, **model}, "layout": parallelism, "train": train, "optimizer": {"lr": 1e-3}}
        recipe = Recipe.model_validate({"name": "t", **sections})
        assert check(recipe) == [], name
        plan = derive(recipe, ranks, cpu)
        stages = plan.layout.pipeline_model_parallel_size
        found[name] = []
        for stage in range(stages):
            dist.init_process_group("fake", store=FakeStore(), rank=stage * ranks // stages, world_size=ranks)
            parallel_state.initialize_model_parallel(
                **{degree: getattr(recipe.layout, degree) for degree in degrees},
                order=RANK_ORDER,
                create_gloo_process_groups=False,
            )
            seed_random_states(1)
            modules = build(plan, platform).modules
            found[name].append(
                {
                    "layers": [len(module.decoder.layers) for module in modules],
                    "planned_layers": list(plan.layout.layers_per_stage[stage]),
                    "parameters": sum(parameter.numel() for module in modules for parameter in module.parameters()),
                    "vectors": sum(vector.numel() for module in modules for vector in vectors(module)),
                    "planned_vectors": vectors_on_rank(recipe.model, plan.shape, plan.layout, stage),
                    "planned_parameters": count_on_rank(recipe.model, plan.shape, plan.layout, stage, "cpu").total,
                }
            )
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def measured(worlds: dict[int, GlooWorld]) -> Measured:
    found: Measured = worlds[1].start(measure, group=False).result()
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_and_parameters_of_every_stage_are_exact(name: str, measured: Measured) -> None:
    assert len(measured[name]) == LAYOUTS[name][2].get("pipeline_model_parallel_size", 1)
    for stage in measured[name]:
        assert stage["planned_layers"] == stage["layers"]
        assert stage["planned_parameters"] == stage["parameters"]
        assert stage["planned_vectors"] == stage["vectors"]
