"""Plans: exact counts, batch arithmetic, memory, and the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmrecipes.cluster import Cluster, Gpu
from llmrecipes.errors import UserError
from llmrecipes.plan.check import check
from llmrecipes.plan.derive import default_world_size, derive
from llmrecipes.plan.flops import flops_per_token
from llmrecipes.plan.layout import layout
from llmrecipes.plan.memory import GIB, Memory, estimate
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.degrees import smallest_world
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.schema import Model, Recipe

LAPTOP = Cluster(gpus=(), cpu_cores=4, memory_bytes=16 * GIB, memory_available_bytes=12 * GIB, disk_free_bytes=GIB)
GPU = Gpu("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, 989.4)
NODE = replace(LAPTOP, gpus=(GPU,) * 8)


def recipe(name: str, *overrides: str) -> Recipe:
    return load(name, overrides).recipe


def gpus(number: int) -> Cluster:
    return replace(LAPTOP, gpus=(GPU,) * number)


def memory_of(changed: Recipe, ranks: int = 1, device: str = "cuda") -> Memory:
    """Memory of a rank where every rank does one micro-batch after another."""
    return estimate(changed, layout(changed, ranks, gpus(ranks)), num_microbatches=64, device=device)


@pytest.mark.parametrize(
    ("model", "total"),
    [
        # openai-community/gpt2, EleutherAI/pythia-160m, Qwen/Qwen2.5-0.5B and meta-llama/Meta-Llama-3-8B on the Hub.
        (
            {
                "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024,
                "vocab_size": 50257, "make_vocab_size_divisible_by": 1,
            },
            124_439_808,
        ),
        (
            {
                "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048,
                "vocab_size": 50304, "position_embedding_type": "rope", "share_embeddings_and_output_weights": False,
            },
            162_322_944,
        ),
        (
            {
                "num_layers": 24, "hidden_size": 896, "ffn_hidden_size": 4864, "num_attention_heads": 14,
                "num_query_groups": 2, "seq_length": 2048, "vocab_size": 151936, "position_embedding_type": "rope",
                "normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True,
                "add_bias_linear": False, "add_qkv_bias": True,
            },
            494_032_768,
        ),
        (load("llama3-8b").recipe.model.model_dump(), 8_030_261_248),
    ],
)  # fmt: skip
def test_parameter_counts_of_known_models(model: dict[str, Any], total: int) -> None:
    parameters = count(Model.model_validate(model))
    assert parameters.total == total
    assert parameters.embedding + parameters.non_embedding == total


def test_padding_adds_rows_to_the_embedding() -> None:
    assert count(recipe("gpt-125m").model).total == 124_439_808 + 47 * 768


def test_flops_agree_with_the_published_formula() -> None:
    model = Model(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=1024, vocab_size=51200)
    layers, h, s, v = 24, 2048, 1024, 51200
    # Narayanan et al. 2021, equation 3, with 72 for 96 (no recomputed forward pass; the logits never were).
    published = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert flops_per_token(model, causal=False) == pytest.approx(published, rel=1e-12)
    attention = 72 * layers * h**2 * s / (6 * h)
    assert flops_per_token(model, causal=True) == pytest.approx(published - attention / 2, rel=1e-12)


@pytest.mark.parametrize("name", names())
def test_plans_of_shipped_recipes(name: str, golden: Callable[[str, Any], None]) -> None:
    shipped = recipe(name)
    cluster = gpus(max(8, smallest_world(shipped.parallelism)))
    golden(f"plan-{name}.json", derive(shipped, default_world_size(shipped, cluster), cluster).as_dict())


def test_batch_arithmetic() -> None:
    plan = derive(recipe("gpt-125m", "train.global_batch_size=96", "train.micro_batch_size=4"), 8, NODE)
    assert (plan.data_parallel_size, plan.num_microbatches) == (8, 3)
    assert (plan.tokens_per_step, plan.total_tokens) == (96 * 1024, 96 * 1024 * 19000)


def test_a_batch_that_does_not_divide_names_what_does() -> None:
    with pytest.raises(UserError) as caught:
        derive(recipe("gpt-tiny", "train.micro_batch_size=4", "train.global_batch_size=16"), 3, LAPTOP)
    assert "16 is not a multiple of micro_batch_size 4 × data-parallel size 3 = 12" in str(caught.value)
    assert caught.value.fix == "global_batch_size 12 or 24, or 2 data-parallel ranks"


def test_ranks_that_nobody_names() -> None:
    assert default_world_size(recipe("gpt-125m"), NODE) == 8
    assert default_world_size(recipe("gpt-125m"), LAPTOP) == 1
    # A batch of six micro-batches leaves two of eight GPUs idle rather than being refused.
    assert default_world_size(recipe("gpt-125m", "train.global_batch_size=192"), NODE) == 6


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="16 ranks on 8 GPUs"):
        derive(recipe("gpt-125m"), 16, NODE)
    with pytest.raises(UserError, match="0 ranks"):
        derive(recipe("gpt-125m"), 0, NODE)


@pytest.mark.parametrize(
    ("precision", "fp32_reduce", "weights", "gradients", "optimizer"),
    [("fp32", True, 4, 4, 8), ("fp32", False, 4, 4, 8), ("bf16", True, 2, 4, 12), ("fp16", False, 2, 2, 12)],
)
def test_bytes_of_a_parameter(precision: str, fp32_reduce: bool, weights: int, gradients: int, optimizer: int) -> None:
    changed = recipe(
        "gpt-125m", f"train.precision={precision}", f"parallelism.grad_reduce_in_fp32={fp32_reduce}".lower()
    )
    n = count(changed.model)
    memory = memory_of(changed)
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        weights * n.total, gradients * n.total, optimizer * n.total,
    )  # fmt: skip
    assert memory_of(changed, ranks=4).optimizer == optimizer * n.total // 4


def test_without_the_distributed_optimizer_every_rank_keeps_all_of_its_state() -> None:
    changed = recipe("gpt-125m", "parallelism.use_distributed_optimizer=false")
    assert memory_of(changed, ranks=8).optimizer == 12 * count(changed.model).total


def test_activations_agree_with_the_published_formula() -> None:
    layers = {}
    for number in (1, 2):
        changed = recipe(
            "gpt-125m", f"model.num_layers={number}", "model.hidden_dropout=0.1", "train.micro_batch_size=2"
        )
        layers[number] = memory_of(changed).activations
    s, b, h, heads = 1024, 2, 768, 12
    # Korthikanti et al. 2022, section 4.1: 34 s b h a layer besides the attention matrix; then the kernel's
    # log-sum-exp of each row.
    assert layers[2] - layers[1] == 34 * s * b * h + 4 * s * b * heads


def test_recomputation_and_smaller_batches_need_less() -> None:
    def activations(*overrides: str) -> int:
        changed = recipe("gpt-1b", *overrides)
        return memory_of(changed).activations

    full = ("train.recompute_granularity=full", "train.recompute_num_layers=1")
    nothing = activations()
    selective = activations("train.recompute_granularity=selective")
    uniform = activations(*full, "train.recompute_method=uniform")
    block = activations(*full, "train.recompute_method=block")
    assert uniform < nothing / 10 < selective < nothing
    assert uniform < block <= nothing
    assert activations("train.micro_batch_size=4") == nothing / 2


def test_what_fits_passes_and_what_does_not_is_refused_with_a_way_out() -> None:
    tiny = recipe("gpt-tiny")
    check(tiny, derive(tiny, 1, LAPTOP), LAPTOP)
    llama = recipe("llama3-8b")
    plan = derive(llama, 1, LAPTOP)
    assert not plan.fits
    with pytest.raises(UserError) as caught:
        check(llama, plan, LAPTOP)
    text = str(caught.value)
    assert caught.value.code == 2
    assert "there are 12.0 GiB here (no GPU, 4 CPU cores, 12.0 GiB of available memory)" in text
    assert "weights 15.0 GiB" in text
    assert "make smoke RECIPE=llama3-8b" in text
    assert "it runs on 8 × H100 80GB" in text


def test_a_recipe_that_no_number_of_gpus_holds_says_so() -> None:
    huge = recipe("llama3-8b", "model.num_layers=400")
    with pytest.raises(UserError, match="does not fit") as caught:
        check(huge, derive(huge, 8, NODE), NODE)
    assert "no number of NVIDIA H100 80GB HBM3 is enough" in caught.value.fix


def test_little_headroom_is_a_warning_and_enough_is_none() -> None:
    llama = recipe("llama3-8b")
    plan = derive(llama, 8, NODE)
    need = plan.memory.total
    plans = {
        share: derive(llama, 8, replace(NODE, gpus=(replace(GPU, memory_free_bytes=int(need * share)),) * 8))
        for share in (0.99, 1.02, 1.2)
    }
    assert {share: (each.fits, len(each.warnings)) for share, each in plans.items()} == {
        0.99: (False, 0), 1.02: (True, 1), 1.2: (True, 0),
    }  # fmt: skip
    assert "headroom is 2.0%" in plans[1.02].warnings[0]
    assert plans[1.02].as_dict()["warnings"] == list(plans[1.02].warnings)
    assert plans[1.02].as_dict()["memory_headroom"] == pytest.approx(1 - 1 / 1.02, abs=1e-4)


@pytest.mark.parametrize(("precision", "bytes_a_parameter"), [("fp32", 16), ("bf16", 14), ("fp16", 14)])
def test_a_checkpoint_has_weights_and_fp32_state(precision: str, bytes_a_parameter: int) -> None:
    changed = recipe("gpt-tiny", f"train.precision={precision}")
    assert derive(changed, 1, LAPTOP).checkpoint_bytes == 2_458_752 * bytes_a_parameter


def test_ranks_share_the_memory_of_a_machine_without_gpus() -> None:
    changed = recipe("gpt-tiny", "train.micro_batch_size=4")
    assert derive(changed, 4, LAPTOP).memory_capacity_bytes == 3 * GIB
    busy = replace(GPU, memory_free_bytes=GIB)
    assert derive(recipe("gpt-125m"), 2, replace(NODE, gpus=(GPU, busy))).memory_capacity_bytes == GIB


def test_experts_split_otherwise_than_dense_layers_need_expert_parallelism() -> None:
    # With EP 1 megatron-core 0.16 and 0.19 leave the tensor-parallel ranks out of the experts' reduction.
    layers = ("parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true")
    split = recipe(
        "moe-tiny", *layers, "parallelism.expert_model_parallel_size=1", "parallelism.expert_tensor_parallel_size=1"
    )
    with pytest.raises(UserError, match="expert_model_parallel_size 1") as refused:
        derive(split, 2, gpus(2))
    assert "expert_model_parallel_size 2 or more" in refused.value.fix
    together = recipe(
        "moe-tiny", *layers, "parallelism.expert_model_parallel_size=2", "parallelism.expert_tensor_parallel_size=1"
    )
    assert derive(together, 2, gpus(2)).layout["expert_model_parallel_size"] == 2
