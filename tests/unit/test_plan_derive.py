"""Plans: exact counts, batch arithmetic, memory, and the gate."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.former import ADAMW
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.plan.check import check, check_run
from llmrecipes.plan.derive import LEAST_HEADROOM, Plan, default_world_size, derive
from llmrecipes.plan.kernels import recomputed_layers
from llmrecipes.plan.layout import layout
from llmrecipes.plan.memory import GIB, Memory, differing_stages, estimate, of_stage
from llmrecipes.plan.parameters import count, count_on_rank, flops_per_token
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.derived.degrees import least_ranks, smallest_world
from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.workflow.plan import laid_out
from tests.helpers import ROOMY
from tests.refusals import refused

LAPTOP = Cluster(gpus=(), cpu_cores=4, memory_bytes=16 * GIB, memory_available_bytes=12 * GIB, disk_free_bytes=GIB)
GPU = DetectedGpu("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, 989.4)
NODE = replace(LAPTOP, gpus=(GPU,) * 8, memory_available_bytes=8 * 256 * GIB)


def recipe(name: str, *overrides: str) -> Recipe:
    return load(name, overrides).recipe


def gpus(number: int) -> Cluster:
    return replace(LAPTOP, gpus=(GPU,) * number, memory_available_bytes=number * 256 * GIB)


def memory_of(changed: Recipe, ranks: int = 1, device: str = "cuda") -> Memory:
    """Memory of a rank where every rank does one micro-batch after another."""
    return estimate(
        changed, shape(changed.model), layout(changed, ranks, gpus(ranks)), num_microbatches=64, device=device
    )


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
    checked = Model.model_validate(model)
    parameters = count(checked, shape(checked))
    assert parameters.total == total
    assert parameters.embedding + parameters.non_embedding == total


def test_padding_adds_rows_to_the_embedding() -> None:
    gpt = recipe("gpt-125m")
    assert count(gpt.model, shape(gpt.model)).total == 124_439_808 + 47 * 768


def test_flops_agree_with_the_published_formula() -> None:
    model = Model(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=1024, vocab_size=51200)
    layers, h, s, v = 24, 2048, 1024, 51200
    # Narayanan et al. 2021, equation 3, with 72 for 96 (no recomputed forward pass; the logits never were).
    published = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert flops_per_token(model, shape(model), causal=False) == pytest.approx(published, rel=1e-12)
    attention = 72 * layers * h**2 * s / (6 * h)
    assert flops_per_token(model, shape(model), causal=True) == pytest.approx(published - attention / 2, rel=1e-12)


SITES = {
    "deepseek-v3": ("h100-ib", 64, 671e9),
    "deepseek-v3-stages": ("h100-ib", 64, 671e9),
    "dpo-tiny": ("laptop", 1, None),
    "gpt-125m": ("h100-ib", 1, 125e6),
    "gpt-175b": ("h100-ib", 16, 174.6e9),
    "gpt-1b": ("h100-ib", 1, 1.3e9),
    "gpt-350m": ("h100-ib", 1, 356e6),
    "gpt-7b": ("h100-ib", 1, 7.5e9),
    "gpt-tiny": ("laptop", 1, None),
    "gpt-tiny-3d": ("laptop", 4, None),
    "gpt-tiny-clean": ("laptop", 1, None),
    "gpt-tiny-continual": ("laptop", 1, None),
    "gpt-tiny-distil": ("laptop", 1, None),
    "gpt-tiny-minitron": ("laptop", 1, None),
    "gpt-tiny-stages": ("laptop", 1, None),
    "gpt-tiny-zero": ("laptop", 2, None),
    "llama3-405b": ("h100-ib", 32, 405e9),
    "llama3-405b-stages": ("h100-ib", 128, 405e9),
    "llama3-70b": ("h100-ib", 8, 70.6e9),
    "llama3-70b-lora": ("h100-ib", 1, 70.6e9),
    "llama3-8b": ("h100-ib", 1, 8.03e9),
    "llama3-8b-sft": ("h100-ib", 1, 8.03e9),
    "lora-tiny": ("laptop", 1, None),
    "mixtral-8x7b": ("h100-ib", 4, 46.7e9),
    "moe-tiny": ("laptop", 2, None),
    "qwen3-30b-a3b": ("h100-ib", 2, 30.5e9),
    "sft-tiny": ("laptop", 1, None),
}
"""Of each shipped recipe: a profile, the fewest of its nodes (1, 2, 4, …) that hold it, and the published size."""


def test_every_shipped_recipe_has_a_site() -> None:
    assert sorted(SITES) == names()


@pytest.mark.parametrize("name", SITES)
def test_shipped_recipes_fit_where_they_are_meant_to_run(name: str) -> None:
    cluster, nodes, size = SITES[name]
    shipped, profile = recipe(name), load_profile(cluster)
    site = machine(profile, nodes)
    run = laid_out(shipped, nodes * profile.ranks_per_node, site, profile)
    plan = run.largest
    check_run(run, site)
    assert run.fits
    assert plan.shape.vocab_size >= shipped.model.vocab_size
    train = plan.recipe.train
    assert (
        plan.layout.data_parallel_size * plan.num_microbatches * plan.recipe.layout.micro_batch_size
        == train.global_batch_size
    )
    if size is not None:
        # deepseek-v3's source counts its model without the layer for multi-token prediction.
        assert plan.num_parameters.total - plan.num_parameters.mtp == pytest.approx(size, rel=0.015)
    told = re.search(r"on (\d+)B tokens", shipped.description)
    if told:
        assert run.total_tokens == pytest.approx(int(told[1]) * 1e9, rel=0.02)
    if nodes > 1 and cluster != "laptop":
        fewer = machine(profile, nodes // 2)
        parallel, ranks = shipped.layout, nodes // 2 * profile.ranks_per_node
        experts = parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size > ranks
        key = "layout" if least_ranks(shipped) > ranks else f"recipe {name}"
        with refused("layout.expert_model_parallel_size" if experts else key):
            check_run(laid_out(shipped, ranks, fewer, profile), fewer)


FOUR_STAGES = ("layout.pipeline_model_parallel_size=4", "layout.tensor_model_parallel_size=2")
RECOMPUTED = (
    "layout.recompute_granularity=full", "layout.recompute_method=uniform", "layout.recompute_num_layers=1",
)  # fmt: skip
SHORT_ENDS = (
    "layout.num_layers_in_first_pipeline_stage=2", "layout.num_layers_in_last_pipeline_stage=2",
    "layout.loss_chunk_tokens=256",
)  # fmt: skip
FROZEN = "train.freeze=['decoder.layers.[2-9].*', 'decoder.layers.1[01].*']"  # of the second stage


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3-405b", ()),
        ("deepseek-v3", ()),
        ("llama3-8b", (*FOUR_STAGES, *RECOMPUTED)),  # where the logits are decides
        ("llama3-8b", (*FOUR_STAGES, *RECOMPUTED, *SHORT_ENDS, FROZEN)),  # the third, whose layers are trained
    ],
)
def test_stages_that_are_like_an_earlier_one_do_not_decide(name: str, changes: tuple[str, ...]) -> None:
    changed = recipe(name, *changes)
    ranks = 8 * smallest_world(changed.layout)
    placed, s = layout(changed, ranks, gpus(ranks)), shape(changed.model)
    stages = range(placed.pipeline_model_parallel_size)
    each = [of_stage(changed, s, placed, 64, stage, "cuda") for stage in stages]
    assert len(stages) >= 4 and len(set(each)) > 2
    assert estimate(changed, s, placed, 64, "cuda") == max(each, key=lambda memory: memory.total)
    parameters = [count_on_rank(changed.model, s, placed, stage, "cuda").total for stage in stages]
    assert max(parameters[stage] for stage in differing_stages(changed, s, placed)) == max(parameters)


# Dense with tensor, pipeline and context parallelism; experts with latent attention; data parallelism alone.
@pytest.mark.parametrize(
    ("name", "micro"), [("llama3-405b", ()), ("deepseek-v3", ()), ("gpt-125m", ("layout.micro_batch_size=32",))]
)
def test_every_number_of_a_plan(name: str, micro: tuple[str, ...], golden: Callable[[str, Any], None]) -> None:
    shipped = recipe(name, *micro)
    cluster = gpus(max(8, smallest_world(shipped.layout)))
    golden(f"plan-{name}.json", derive(shipped, default_world_size(shipped, cluster), cluster).as_dict())


def test_a_plan_derives_the_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    derived = []

    def counted(model: Model) -> Shape:
        derived.append(model)
        return shape(model)

    for module in [module for name, module in sys.modules.items() if name.startswith("llmrecipes.plan.")]:
        if hasattr(module, "shape"):
            monkeypatch.setattr(module, "shape", counted)
    tiny = recipe("gpt-tiny-3d")
    plan = derive(tiny, 4, LAPTOP)
    assert derived == [tiny.model]
    assert (plan.recipe, plan.shape) == (tiny, shape(tiny.model))


def test_batch_arithmetic() -> None:
    plan = derive(recipe("gpt-125m", "train.global_batch_size=96", "layout.micro_batch_size=4"), 8, NODE)
    assert (plan.layout.data_parallel_size, plan.num_microbatches) == (8, 3)
    assert (plan.tokens_per_step, plan.total_tokens) == (96 * 1024, 96 * 1024 * 19000)


def test_a_batch_that_does_not_divide_names_what_does() -> None:
    with refused("train.global_batch_size", rule=("16", "4", "3", "= 12")) as caught:
        derive(recipe("gpt-tiny", "layout.micro_batch_size=4", "train.global_batch_size=16"), 3, LAPTOP)
    assert caught.value.fix == "global_batch_size 12 or 24, or 2 data-parallel ranks"


def test_the_default_number_of_ranks() -> None:
    micro = "layout.micro_batch_size=32"
    assert default_world_size(recipe("gpt-125m", micro), NODE) == 8
    assert default_world_size(recipe("gpt-125m", micro), LAPTOP) == 1
    # A batch of six micro-batches leaves two of eight GPUs idle rather than being refused.
    assert default_world_size(recipe("gpt-125m", micro, "train.global_batch_size=192"), NODE) == 6


def test_more_ranks_than_gpus_are_refused() -> None:
    with refused("--nproc", rule=("16", "8")):
        derive(recipe("gpt-125m"), 16, NODE)
    with refused("--nproc", rule="0"):
        derive(recipe("gpt-125m"), 0, NODE)


@pytest.mark.parametrize(
    ("precision", "fp32_reduce", "weights", "gradients", "optimizer"),
    [("fp32", True, 4, 4, 8), ("fp32", False, 4, 4, 8), ("bf16", True, 2, 4, 12), ("fp16", False, 2, 2, 12)],
)
def test_bytes_of_a_parameter(precision: str, fp32_reduce: bool, weights: int, gradients: int, optimizer: int) -> None:
    changed = recipe("gpt-125m", f"train.precision={precision}", f"train.grad_reduce_in_fp32={fp32_reduce}".lower())
    n = count(changed.model, shape(changed.model))
    memory = memory_of(changed)
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        weights * n.total, gradients * n.total, optimizer * n.total,
    )  # fmt: skip
    assert memory_of(changed, ranks=4).optimizer == optimizer * n.total // 4


def test_without_the_distributed_optimizer_every_rank_keeps_all_of_its_state() -> None:
    changed = recipe("gpt-125m", "layout.use_distributed_optimizer=false")
    assert memory_of(changed, ranks=8).optimizer == 12 * count(changed.model, shape(changed.model)).total


def test_activations_agree_with_the_published_formula() -> None:
    layers = {}
    for number in (1, 2):
        changed = recipe(
            "gpt-125m", f"model.num_layers={number}", "model.hidden_dropout=0.1", "layout.micro_batch_size=2"
        )
        layers[number] = memory_of(changed).activations
    s, b, h, heads = 1024, 2, 768, 12
    # Korthikanti et al. 2022, section 4.1: 34 s b h a layer besides the attention matrix; then the kernel's
    # log-sum-exp of each row.
    assert layers[2] - layers[1] == 34 * s * b * h + 4 * s * b * heads


def test_recomputation_and_smaller_batches_need_less() -> None:
    def activations(*overrides: str, device: str = "cuda") -> int:
        changed = recipe("gpt-1b", "layout.micro_batch_size=8", *overrides)
        return memory_of(changed, device=device).activations

    full = ("layout.recompute_granularity=full", "layout.recompute_num_layers=1")
    nothing = activations()
    assert activations("layout.recompute_granularity=selective") == nothing, "the kernel keeps no scores"
    scores = "model.attention_dropout=0.1"
    selective = activations("layout.recompute_granularity=selective", scores, device="cpu")
    uniform = activations(*full, "layout.recompute_method=uniform")
    block = activations(*full, "layout.recompute_method=block")
    assert uniform < nothing / 10
    assert selective < activations(scores, device="cpu")
    assert uniform < block <= nothing
    # The tables of rotary positions are the same for all sequences.
    assert activations("layout.micro_batch_size=4") == pytest.approx(nothing / 2, rel=0.002)


def test_auto_recomputes_the_least_that_leaves_headroom() -> None:
    """On machines from one where everything is kept down to one where nothing fits."""
    for name, nodes in (("llama3-8b", 1), ("llama3-70b", 4), ("deepseek-v3", 128)):
        of_type = recipe(name, "layout.recompute_granularity=auto")
        before, memory = 0.0, 1 << 60
        kinds = set()
        for gib in (400, 140, 100, 80, 64, 48, 40, 24, 8):
            gpu = replace(GPU, memory_bytes=gib * GIB, memory_free_bytes=gib * GIB)
            of_size = replace(LAPTOP, gpus=(gpu,) * 8 * nodes, nodes=nodes)
            plan = derive(of_type, 8 * nodes, of_size)
            assert plan.recompute_auto and plan.recipe.layout.recompute_granularity != "auto"
            kinds.add((plan.recompute_granularity, plan.recipe.layout.recompute_method))
            work = recomputed(plan)
            assert work >= before and plan.memory.total <= memory, "less memory, more work"
            before, memory = work, plan.memory.total
            if work < 1:
                assert plan.memory_headroom >= LEAST_HEADROOM
        assert (None, None) in kinds and ("full", "uniform") in kinds, name
        less = recipe(name, "layout.recompute_granularity=null")
        assert derive(less, 8 * nodes, of_size).memory.total > memory


def test_the_loss_is_in_chunks_where_its_logits_take_too_much() -> None:
    """Of a GPU, and only where the output weight's gradient in fp32 takes less."""
    auto, whole, of_64 = (
        recipe("gpt-125m", "layout.micro_batch_size=64", *keys)
        for keys in ((), ("layout.loss_chunk_tokens=0",), ("layout.loss_chunk_tokens=64",))
    )
    plans = [derive(each, 8, NODE) for each in (auto, whole, of_64)]
    assert [plan.loss_chunk_tokens for plan in plans] == [4096, 0, 64]
    assert plans[2].memory.logits < plans[0].memory.logits < plans[1].memory.logits / 8
    assert derive(recipe("gpt-125m"), 8, NODE).loss_chunk_tokens == 0, "compiled, its logits stay in 16 bits"
    assert derive(auto, 1, ROOMY).loss_chunk_tokens == 256, "64 MiB of logits on a CPU"
    assert derive(whole, 1, ROOMY).loss_chunk_tokens == 0
    for name in names():
        if "tiny" in name:
            cpu = recipe(name)
            stages = derive_run(cpu, smallest_world(cpu.layout), ROOMY).stages
            chosen = {plan.loss_chunk_tokens for plan in stages}
            assert chosen == {cpu.layout.loss_chunk_tokens or 0}, "recipes for CPUs stay as they are"
    small = replace(NODE, gpus=tuple(replace(gpu, memory_bytes=8 * GIB) for gpu in NODE.gpus))
    nodes = replace(small, gpus=small.gpus * 4, nodes=4)
    assert derive(recipe("llama3-70b"), 32, nodes).loss_chunk_tokens == 0, "its logits take less than the gradient"
    with refused("layout.loss_chunk_tokens", rule="ZeRO 3"):
        recipe("gpt-1b", "layout=zero3", "layout.loss_chunk_tokens=64")


def recomputed(plan: Plan) -> float:
    """Share of the layers, or less than the first of them for modules."""
    if plan.recompute_granularity == "full":
        layers = max(chunk for stage in plan.layout.layers_per_stage for chunk in stage)
        return recomputed_layers(plan.recipe, layers) / layers
    return len(plan.recompute_modules) / 1000


def test_what_fits_passes_and_what_does_not_is_refused_with_a_way_out() -> None:
    tiny = recipe("gpt-tiny")
    check(derive(tiny, 1, LAPTOP), LAPTOP)
    llama = recipe("llama3-8b", "layout.recompute_granularity=auto")
    plan = derive(llama, 1, LAPTOP)
    assert not plan.fits
    with refused("recipe llama3-8b", rule=("12.0 GiB", "15.0 GiB", "RECIPE=llama3-8b", "4 × H100 80GB")):
        check(plan, LAPTOP)


@pytest.mark.rotating
def test_a_recipe_that_fits_on_no_number_of_gpus_is_refused() -> None:
    huge = recipe("llama3-8b", "model.num_layers=400")
    with refused("recipe llama3-8b", rule="H100") as caught:
        check(derive(huge, 8, NODE), NODE)
    assert "× NVIDIA H100" not in caught.value.fix


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


def test_emulated_bf16_is_a_warning() -> None:
    emulates = replace(LAPTOP, cpu_has_bf16=False)
    medium = ("optimizer.muon_fp32_matmul_prec=medium",)
    for changes, key in (
        (("train.precision=bf16",), "train.precision bf16"),
        (medium, "optimizer.muon_fp32_matmul_prec medium"),
    ):
        (warning,) = derive(recipe("gpt-tiny", *changes), 1, emulates).warnings
        assert key in warning
        assert not derive(recipe("gpt-tiny", *changes), 1, LAPTOP).warnings
    assert not derive(recipe("gpt-tiny"), 1, emulates).warnings


@pytest.mark.parametrize(("precision", "bytes_a_parameter"), [("fp32", 16), ("bf16", 14), ("fp16", 14)])
def test_a_checkpoint_has_weights_and_fp32_state(precision: str, bytes_a_parameter: int) -> None:
    changed = recipe("gpt-tiny", *ADAMW, f"train.precision={precision}")
    assert derive(changed, 1, LAPTOP).checkpoint_bytes == 2_458_752 * bytes_a_parameter


def test_ranks_share_the_memory_of_a_machine_without_gpus() -> None:
    changed = recipe("gpt-tiny", "layout.micro_batch_size=4")
    assert derive(changed, 4, LAPTOP).memory_capacity_bytes == 3 * GIB
    busy = replace(GPU, memory_free_bytes=GIB)
    assert derive(recipe("gpt-125m"), 2, replace(NODE, gpus=(GPU, busy))).memory_capacity_bytes == GIB


def test_experts_split_otherwise_than_dense_layers_need_expert_parallelism() -> None:
    # With EP 1 megatron-core leaves the tensor-parallel ranks out of the experts' reduction.
    layers = ("layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true")
    split = recipe("moe-tiny", *layers, "layout.expert_model_parallel_size=1", "layout.expert_tensor_parallel_size=1")
    with refused("layout.expert_model_parallel_size", rule="expert_model_parallel_size 1") as caught:
        derive(split, 2, gpus(2))
    assert "expert_model_parallel_size 2" in caught.value.fix
    together = recipe(
        "moe-tiny", *layers, "layout.expert_model_parallel_size=2", "layout.expert_tensor_parallel_size=1"
    )
    assert derive(together, 2, gpus(2)).layout.expert_model_parallel_size == 2


@pytest.mark.parametrize(
    ("overrides", "a_key"),
    [
        ((), 2),  # the softmax in 16 bits
        (("model.attention_dropout=0.1",), 2 + 1 + 2),  # the mask, and the product with it
        (("layout.micro_batch_size=2", "layout.tensor_model_parallel_size=16"), 4 + 2),  # two matrices: no kernel
        (("model.seq_length=16384", "model.max_position_embeddings=16384"), 4 + 2),
        (("train.precision=fp32",), 4),
    ],
)
def test_unfused_attention_keeps_the_scores(overrides: tuple[str, ...], a_key: int) -> None:
    """TransformerEngine's UnfusedDotProductAttention: of each head's rows all keys, instead of a log-sum-exp."""
    shared = ["layout.micro_batch_size=4", "layout.recompute_granularity=null", *overrides]
    ranks = 16 if "layout.tensor_model_parallel_size=16" in overrides else 1
    changed = recipe("gpt-1b", *shared, "layout.attention_backend=unfused")
    model, layers = changed.model, changed.model.num_layers
    rows = changed.layout.micro_batch_size * model.seq_length * model.num_attention_heads // ranks
    more = memory_of(changed, ranks).activations - memory_of(recipe("gpt-1b", *shared), ranks).activations
    assert more == pytest.approx(layers * rows * (a_key * model.seq_length - 4), rel=1e-6)


def test_unfused_attention_is_worth_recomputing() -> None:
    selective = "layout.recompute_granularity=selective"
    assert derive(recipe("gpt-1b", selective), 1, gpus(1)).recompute_modules == ()
    changed = recipe("gpt-1b", selective, "layout.attention_backend=unfused")
    assert derive(changed, 1, gpus(1)).recompute_modules == ("core_attn",)
    assert memory_of(changed).activations < memory_of(recipe("gpt-1b", "layout.attention_backend=unfused")).activations
