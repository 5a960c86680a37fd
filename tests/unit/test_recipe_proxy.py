"""Rehearsals: small, valid on their own ranks, and with every switch and kind of parallelism of the recipe."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, Gpu
from llmrecipes.plan.derive import default_world_size, derive
from llmrecipes.recipe.degrees import smallest_world
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.proxy import proxy
from llmrecipes.recipe.rules import check
from llmrecipes.recipe.scaled import scaled
from llmrecipes.recipe.schema import Recipe

GIB = 1 << 30
LAPTOP = Cluster(gpus=(), cpu_cores=4, memory_bytes=16 * GIB, memory_available_bytes=12 * GIB, disk_free_bytes=GIB)
GPU = Gpu("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, 989.4)

DEGREES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)  # fmt: skip
KEPT_PARALLELISM = (
    "sequence_parallel", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32",
)  # fmt: skip
KEPT_MODEL = (
    "position_embedding_type", "rotary_base", "rope_scaling", "normalization", "layernorm_epsilon", "activation_func",
    "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "share_embeddings_and_output_weights",
    "attention_dropout", "hidden_dropout", "init_method", "init_method_std", "multi_latent_attention",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias",
    "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_input_jitter_eps",
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy",
    "moe_token_dispatcher_type", "mtp_loss_scaling_factor",
)  # fmt: skip


def assert_rehearses(recipe: Recipe) -> None:
    """The proxy is a valid small recipe on its own ranks and twice as many, and nothing but numbers is lost."""
    assert_same_kinds_on_gpus(recipe)
    small = proxy(recipe)
    assert Recipe.model_validate(small.model_dump()) == small
    assert check(small) == []
    ranks = default_world_size(small, LAPTOP)
    assert ranks == smallest_world(small.parallelism) <= 8
    for world in {ranks, 2 * ranks} if 1 < ranks <= 4 else {ranks}:
        plan = derive(small, world, LAPTOP)
        assert plan.fits
        assert plan.num_microbatches >= plan.layout.pipeline_model_parallel_size
    for name in DEGREES:
        there, here = getattr(recipe.parallelism, name), getattr(small.parallelism, name)
        if name == "expert_model_parallel_size" and recipe.model.num_moe_experts:
            there = max(there, recipe.parallelism.tensor_model_parallel_size)  # ranks that share experts in some way
        assert here == there if there in (None, 1) else here == 2, name
    for name in KEPT_PARALLELISM:
        assert getattr(small.parallelism, name) == getattr(recipe.parallelism, name), name
    for name in KEPT_MODEL:
        assert getattr(small.model, name) == getattr(recipe.model, name), name
    for name in ("num_moe_experts", "moe_shared_expert_intermediate_size", "mtp_num_layers", "num_query_groups",
                 "q_lora_rank", "moe_router_num_groups"):  # fmt: skip
        assert (getattr(small.model, name) is None) == (getattr(recipe.model, name) is None), name
    pattern = recipe.model.moe_layer_freq
    if isinstance(pattern, list):
        assert isinstance(small.model.moe_layer_freq, list)
        assert set(small.model.moe_layer_freq) == set(pattern)
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    assert [bool(getattr(small.parallelism, end)) for end in ends] == [
        bool(getattr(recipe.parallelism, end)) for end in ends
    ]
    assert small.model.num_layers <= 8
    assert max(small.model.hidden_size, small.model.seq_length) <= 128
    assert (small.model.num_moe_experts or 0) <= 8


def assert_same_kinds_on_gpus(recipe: Recipe) -> None:
    """Every degree above 1 is 2 on GPUs, where NCCL gathers the tokens of experts that are split themselves."""
    small = proxy(recipe, "cuda")
    assert check(small) == []
    ranks = smallest_world(small.parallelism)
    assert ranks <= 8
    plan = derive(small, ranks, replace(LAPTOP, gpus=(GPU,) * ranks))
    found = scaled(recipe, plan.layout.as_dict())
    assert (found.added, found.not_run) == ((), ())
    assert {name: plan.layout.as_dict()[name] for name in found.asked} == {
        name: min(n, 2) for name, n in found.asked.items()
    }


def test_what_a_cpu_cannot_run_is_reported() -> None:
    changes = ["parallelism.tensor_model_parallel_size=4", "parallelism.sequence_parallel=true"]
    whole = load("mixtral-8x7b", [*changes, "parallelism.expert_model_parallel_size=1",
                                  "parallelism.expert_tensor_parallel_size=null"]).recipe  # fmt: skip
    small = proxy(whole)
    found = scaled(whole, derive(small, smallest_world(small.parallelism), LAPTOP).layout.as_dict())
    assert found.asked["expert_tensor_parallel_size"] == 4  # that of the dense layers
    assert [(each.degree, each.asked, each.ran) for each in found.not_run] == [("expert_tensor_parallel_size", 4, 1)]
    assert [(each.degree, each.asked, each.ran) for each in found.added] == [("expert_model_parallel_size", 1, 2)]
    assert all(each.reason for each in (*found.not_run, *found.added))
    assert "not verified" in dict(found.lines("not verified"))
    dense = load("gpt-tiny").recipe
    found = scaled(dense, derive(proxy(dense), 1, LAPTOP).layout.as_dict())
    assert not [name for name in found.asked if name.startswith("expert_")]
    assert found.lines("not verified") == []


@pytest.mark.parametrize("name", names())
def test_rehearsals_of_shipped_recipes(name: str) -> None:
    assert_rehearses(load(name).recipe)


def test_rehearsals_of_random_recipes() -> None:
    draw = random.Random(0)
    found: dict[str, int] = {}
    tried = 0
    while min((found.get(name, 0) for name in DEGREES), default=0) < 15:
        tried += 1
        assert tried < 60_000, f"too few of the drawn recipes are valid: {found}"
        recipe = _drawn(draw)
        if check(recipe):
            continue
        try:
            ranks = smallest_world(recipe.parallelism)
            derive(recipe, ranks, replace(LAPTOP, gpus=(GPU,) * ranks))
        except UserError:  # the batch, or degrees that do not go together
            continue
        for name in DEGREES:
            found[name] = found.get(name, 0) + ((getattr(recipe.parallelism, name) or 1) > 1)
        assert_rehearses(recipe)


def _drawn(draw: random.Random) -> Recipe:
    experts = draw.choice((None, 2, 3, 4, 6, 8, 12, 16, 64))
    tensor, pipeline = draw.choice((1, 2, 3, 4, 8)), draw.choice((1, 1, 2, 3, 4))
    heads = draw.choice((1, 2, 3, 4, 6, 12, 16, 32))
    layers = draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 22, 24))
    latent = draw.random() < 0.3
    model: dict[str, Any] = {
        "num_layers": layers, "hidden_size": heads * draw.choice((16, 24, 64, 128)), "num_attention_heads": heads,
        "seq_length": draw.choice((6, 12, 16, 48, 64, 96, 256, 4096)), "vocab_size": draw.choice((300, 999, 50257)),
        "make_vocab_size_divisible_by": draw.choice((1, 3, 8, 128)), "add_bias_linear": False,
        "position_embedding_type": "rope" if latent else draw.choice(("rope", "learned_absolute")),
        "share_embeddings_and_output_weights": draw.random() < 0.5,
        "multi_latent_attention": latent,
    }  # fmt: skip
    if latent:
        model |= {"q_lora_rank": draw.choice((None, 48, 1536)), "kv_lora_rank": draw.choice((40, 512))}
    else:
        model["num_query_groups"] = draw.choice((None, 1, 2, 4, 8))
    if model["position_embedding_type"] == "rope":
        model["mtp_num_layers"] = draw.choice((None, None, 1, 2))
    if experts:
        model |= {
            "num_moe_experts": experts, "moe_router_topk": draw.choice((1, 2, 3, 4, 8)), "moe_router_pre_softmax": True,
            "moe_layer_freq": draw.choice((1, 2, [draw.randint(0, 1) for _ in range(layers)])),
            "moe_shared_expert_intermediate_size": draw.choice((None, 96)),
        }  # fmt: skip
        if draw.random() < 0.3:
            model |= {"moe_router_num_groups": draw.choice((2, 4, 8)), "moe_router_group_topk": draw.choice((1, 2, 4))}
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": draw.choice((1, 1, 2, 3, 4)), "sequence_parallel": tensor > 1 and draw.random() < 0.7,
    }  # fmt: skip
    if pipeline > 1:
        parallel["virtual_pipeline_model_parallel_size"] = draw.choice((None, 2, 3))
        uneven = draw.choice(("no", "first", "last", "both", "counted"))
        if uneven == "counted":
            parallel["account_for_loss_in_pipeline_split"] = True
            parallel["account_for_embedding_in_pipeline_split"] = draw.random() < 0.5
        for end in ("first", "last"):
            if uneven in (end, "both"):
                parallel[f"num_layers_in_{end}_pipeline_stage"] = draw.randint(1, 6)
    if experts:
        parallel |= {
            "expert_model_parallel_size": draw.choice((1, 2, 3, 4, 8)),
            "expert_tensor_parallel_size": draw.choice((None, 1, 2)),
        }
    micro = draw.choice((1, 3))
    return Recipe.model_validate(
        {
            "name": "t", "model": model, "parallelism": parallel, "optimizer": {"lr": 1e-3},
            "train": {
                "train_iters": 10, "micro_batch_size": micro, "global_batch_size": micro * draw.choice((1, 4, 24, 48)),
            },
        }
    )  # fmt: skip
