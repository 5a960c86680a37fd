"""Layouts: degrees against ranks and machines, and what every rank then has."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.former import UNGATED
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.check import recommend
from llmrecipes.plan.derive import default_world_size, derive
from llmrecipes.plan.layout import Layout, layout
from llmrecipes.plan.memory import GIB
from llmrecipes.plan.parameters import count, count_on_rank, flops_per_token
from llmrecipes.plan.peak import peak
from llmrecipes.plan.pending import in_flight
from llmrecipes.recipe.derived.degrees import smallest_world
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.derived.stage_layout import layers_per_stage
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Model, Recipe
from tests.refusals import refused

LAPTOP = Cluster(gpus=(), cpu_cores=4, memory_bytes=16 * GIB, memory_available_bytes=12 * GIB, disk_free_bytes=GIB)
GPU = DetectedGpu("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, 989.4)


def gpus(number: int) -> Cluster:
    return replace(LAPTOP, gpus=(GPU,) * number)


SIXTEEN_STAGES: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 64,
    "virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 1,
}  # fmt: skip

ONE_STAGE: dict[str, Any] = {"pipeline_model_parallel_size": 1, "pipeline_model_parallel_layout": None}


def recipe(name: str, **parallelism: Any) -> Recipe:
    shown = {key: json.dumps(value) if value in (True, False, None) else value for key, value in parallelism.items()}
    return load(name, [f"layout.{key}={value}" for key, value in shown.items()]).recipe


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # As the weights on the Hub have them (DeepSeek-V3 without its expert biases, which are no parameters here, and
        # without its extra layer); active ones as the reports round them.
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
        ("deepseek-v3", 671_026_404_352, 37e9),
        ("llama3-70b", 70_553_706_496, 70.6e9),
        ("llama3-405b", 405_853_388_800, 405.9e9),
        ("gpt-175b", 174.6e9, 174.6e9),  # arXiv 2104.04473, table 2
    ],
)
def test_parameter_counts_of_known_models(name: str, total: float, active: float) -> None:
    parameters = count(recipe(name).model, shape(recipe(name).model))
    whole = parameters.total - parameters.mtp
    assert whole == total if isinstance(total, int) else whole == pytest.approx(total, rel=1e-3)
    assert parameters.active == pytest.approx(active, rel=0.02)


def test_flops_of_experts_are_those_of_the_experts_a_token_visits() -> None:
    # 6 FLOPs an active parameter that is a matrix, and attention over half of the sequence (arXiv 2001.08361).
    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        model = recipe(name).model
        parameters = count(model, shape(model))
        matrices = parameters.active - model.vocab_size * model.hidden_size  # the embedding is a lookup
        channels = model.num_attention_heads * (model.kv_channels or model.hidden_size // model.num_attention_heads)
        attention = 6 * model.num_layers * model.seq_length * channels
        assert flops_per_token(model, shape(model), causal=True) == pytest.approx(6 * matrices + attention, rel=1e-3)


def test_flops_of_latent_attention_and_multi_token_prediction() -> None:
    model = recipe("deepseek-v3").model
    parameters = count(model, shape(model))
    matrices = parameters.active - model.vocab_size * model.hidden_size
    # A query meets a key over 128 + 64 channels and a value over 128.
    attention = 6 * 61 * 4096 * 128 * (128 + 64 + 128) / 2
    plain = model.model_copy(update={"mtp_num_layers": None})
    without = flops_per_token(plain, shape(plain), causal=True)
    assert without == pytest.approx(6 * matrices + attention, rel=1e-3)
    # One layer in 61 more (all but three have experts), the joining product, and the output layer once more.
    extra = 6 * (2 * 7168**2 + 129280 * 7168)
    assert flops_per_token(model, shape(model), causal=True) - without == pytest.approx(without / 61 + extra, rel=0.06)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gpt-tiny-3d", {}, ((2,), (2,))),
        ("gpt-tiny-3d", {"virtual_pipeline_model_parallel_size": 2}, ((1, 1), (1, 1))),
        ("gpt-tiny-3d", {"num_layers_in_first_pipeline_stage": 1}, ((1,), (3,))),
        ("gpt-tiny-3d", {"num_layers_in_last_pipeline_stage": 1}, ((3,), (1,))),
        (
            "gpt-tiny-3d",
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            ((2,), (2,)),
        ),
        ("gpt-tiny-3d", {"pipeline_model_parallel_layout": "E|ttttL"}, ((0,), (4,))),
        (
            "gpt-tiny-3d",
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|t|L"},
            ((1, 1), (2, 0)),
        ),
        ("deepseek-v3", SIXTEEN_STAGES, ((4,),) * 15 + ((1,),)),
        ("deepseek-v3", {}, ((2, 2),) * 15 + ((1, 0),)),
        ("llama3-405b", {}, ((1,) + (2,) * 7, *((2,) * 8,) * 6, (2,) * 7 + (1,))),
    ],
)
def test_layers_of_the_stages(name: str, changes: dict[str, Any], expected: tuple[tuple[int, ...], ...]) -> None:
    assert layers_per_stage(recipe(name, **changes)) == expected


def test_chunks_are_in_the_order_of_the_layers() -> None:
    plan = derive(recipe("llama3-405b"), 128, gpus(128)).layout
    order = [(chunk, stage) for chunk in range(8) for stage in range(8)]
    starts = [plan.first_layer(stage, chunk) for chunk, stage in order]
    ends = [start + plan.layers_per_stage[stage][chunk] for start, (chunk, stage) in zip(starts, order, strict=True)]
    assert [0, *ends[:-1]] == starts
    assert ends[-1] == 126


@pytest.mark.parametrize(
    ("name", "ranks", "dense", "experts"),
    [("gpt-tiny-3d", 8, 2, 2), ("moe-tiny", 2, 2, 1), ("deepseek-v3", 1024, 64, 8), ("qwen3-30b-a3b", 32, 16, 2),
     ("llama3-70b", 64, 2, 4), ("mixtral-8x7b", 64, 16, 2)],
)  # fmt: skip
def test_data_parallel_sizes(name: str, ranks: int, dense: int, experts: int) -> None:
    plan = derive(recipe(name), ranks, gpus(ranks))
    assert (plan.layout.data_parallel_size, plan.layout.expert_data_parallel_size) == (dense, experts)
    assert plan.layout.as_dict()["world_size"] == ranks
    assert "layers_per_stage" not in plan.layout.as_dict()
    shipped = recipe(name)
    assert plan.num_microbatches * dense * shipped.layout.micro_batch_size == shipped.train.global_batch_size


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "cluster", "where", "rule"),
    [
        (
            "gpt-tiny-3d", {}, 6, LAPTOP, "layout",
            ("6", "tensor_model_parallel_size 2 × pipeline_model_parallel_size 2 = 4", "4 or 8"),
        ),
        (
            "gpt-tiny", {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, 12, LAPTOP, "layout",
            ("12", "8 or 16", "tensor_model_parallel_size 2"),
        ),
        ("gpt-tiny", {"context_parallel_size": 2}, 3, LAPTOP, "layout", ("context_parallel_size 2", "2 or 4")),
        (
            "moe-tiny", {"expert_model_parallel_size": 4}, 2, LAPTOP, "layout.expert_model_parallel_size",
            ("expert_model_parallel_size 4", "4"),
        ),
        (
            "moe-tiny", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4, LAPTOP,
            "layout.expert_tensor_parallel_size",
            ("expert_tensor_parallel_size 2", "tensor_model_parallel_size", "expert_tensor_parallel_size 1"),
        ),
        (
            "moe-tiny", {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1,
                         "expert_model_parallel_size": 1}, 2, LAPTOP,
            "layout.expert_model_parallel_size",
            ("expert_tensor_parallel_size 1", "expert_model_parallel_size 2", "expert_tensor_parallel_size 2"),
        ),
        ("llama3-405b", {}, 128, gpus(8), "layout", ("128", "8")),
        (
            "llama3-405b", {}, 128, gpus(4), "layout.tensor_model_parallel_size",
            ("8", "4", "tensor_model_parallel_size 4"),
        ),
        (
            "gpt-7b", {"tensor_model_parallel_size": 4}, 8, gpus(6), "layout.tensor_model_parallel_size",
            ("4", "6", "tensor_model_parallel_size 3 or 6"),
        ),
        ("gpt-tiny-3d", {}, 0, LAPTOP, "--nproc", "0"),
        (
            "gpt-tiny-3d", {"virtual_pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1,
                            "sequence_parallel": False}, 16, LAPTOP,
            "train.global_batch_size", ("1", "pipeline_model_parallel_size 2", "global_batch_size 32"),
        ),
    ],
)  # fmt: skip
def test_an_impossible_layout_suggests_a_possible_one(
    name: str, changes: dict[str, Any], ranks: int, cluster: Cluster, where: str, rule: str | tuple[str, ...]
) -> None:
    with refused(where, rule=rule) as caught:
        derive(recipe(name, **changes), ranks, cluster)
    assert caught.value.rule


def test_shared_experts_are_laid_out_on_gpus() -> None:
    changed = recipe("moe-tiny", tensor_model_parallel_size=2, sequence_parallel=True)
    assert derive(changed, 4, gpus(4)).layout.expert_tensor_parallel_size == 2


def test_the_default_number_of_ranks() -> None:
    assert default_world_size(recipe("gpt-tiny-3d"), LAPTOP) == 4
    assert default_world_size(recipe("moe-tiny"), LAPTOP) == 2
    assert default_world_size(recipe("gpt-tiny"), LAPTOP) == 1
    assert default_world_size(recipe("gpt-tiny-3d"), gpus(8)) == 8
    assert default_world_size(recipe("gpt-tiny-3d"), gpus(6)) == 4
    # Not enough for one replica: the plan then says so.
    assert default_world_size(recipe("llama3-70b"), gpus(8)) == 32


def test_ranks_of_experts_and_dense_layers_are_shared() -> None:
    assert smallest_world(recipe("deepseek-v3", **SIXTEEN_STAGES).layout) == 16 * 64
    assert smallest_world(recipe("deepseek-v3").layout) == 16 * 8
    assert smallest_world(recipe("mixtral-8x7b").layout) == 4 * 8
    wide = recipe("mixtral-8x7b", tensor_model_parallel_size=4, sequence_parallel=True, expert_tensor_parallel_size=1)
    assert smallest_world(wide.layout) == 4 * 8


def laid_out(changed: Recipe, ranks: int) -> Layout:
    return layout(changed, ranks, gpus(ranks))


def test_every_parameter_is_on_some_rank_and_shared_ones_on_all() -> None:
    shipped = recipe("deepseek-v3", **SIXTEEN_STAGES)
    plan = laid_out(shipped, 1024)
    ranks = [count_on_rank(shipped.model, shape(shipped.model), plan, stage, "cpu") for stage in range(16)]
    whole = count(shipped.model, shape(shipped.model))
    # 64 × 16 ranks have the experts once; an expert is on one of them.
    assert sum(rank.experts for rank in ranks) * 64 == whole.experts
    # Dense matrices are halved; norms and routers are on both halves, and the last stage has the embedding again.
    halves = 2 * sum(rank.dense for rank in ranks) - 129280 * 7168
    twice = halves - (whole.total - whole.experts)
    norms_and_routers = 61 * (2 * 7168 + 1536 + 512) + 58 * 256 * 7168 + 7168
    extra_layer = 2 * 7168 + 1536 + 512 + 256 * 7168 + 3 * 7168
    assert twice == norms_and_routers + extra_layer
    # TransformerEngine keeps the projections down to the latent vectors whole.
    down = 7168 * (1536 + 512 + 64)
    assert count_on_rank(shipped.model, shape(shipped.model), plan, 3, "cuda").dense - ranks[3].dense == 4 * down // 2


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline() -> None:
    tied = recipe("gpt-tiny-3d")
    plan = laid_out(tied, 4)
    first, last = (count_on_rank(tied.model, shape(tied.model), plan, stage, "cpu").total for stage in (0, 1))
    words, positions, final_norm = 4096 * 256 // 2, 256 * 256, 2 * 256
    assert first - positions == last - final_norm
    assert last > words


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "expected"),
    [(1, 1, 8, [1]), (4, 1, 8, [4, 3, 2, 1]), (4, 1, 2, [2, 2, 2, 1]), (4, 2, 8, [11, 9, 7, 5]), (2, 2, 2, [4, 3])],
)
def test_forward_passes_in_flight(stages: int, chunks: int, micro_batches: int, expected: list[int]) -> None:
    base = laid_out(recipe("gpt-tiny"), 1)
    plan = replace(base, pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks)
    assert [in_flight(plan, micro_batches, stage) for stage in range(stages)] == expected


def kept(changed: Recipe, ranks: int, stage: int = 0) -> int:
    return peak(changed, shape(changed.model), laid_out(changed, ranks), 64, stage, "cuda").activations


def test_activations_of_layouts_agree_with_the_published_factors() -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), sections 4.2 to 4.3, on a GPT without dropout."""
    shape = ["model.num_layers=24", "model.hidden_size=1024", "model.num_attention_heads=16", "model.seq_length=1024",
             "model.position_embedding_type=learned_absolute", "model.normalization=LayerNorm",
             "model.qk_layernorm=false", "model.add_bias_linear=true", *UNGATED]  # fmt: skip

    def layers(*changes: str) -> int:
        """Bytes of the transformer layers: a stack of 24 less one of 16, which has the same ends."""
        sizes = []
        for number in (24, 16):
            changed = load("gpt-tiny", [*shape, "train.precision=bf16", *changes, f"model.num_layers={number}"]).recipe
            sizes.append(kept(changed, smallest_world(changed.layout)))
        return sizes[0] - sizes[1]

    def tp(size: int) -> str:
        return f"layout.tensor_model_parallel_size={size}"

    sp = "layout.sequence_parallel=true"
    s, b, h, heads = 1024, 8, 1024, 16
    log_sum_exp = 4 * heads * s * b
    # 34 s b h without the two dropout masks: 8 h are inputs of norms and of products, 24 h on heads and in the MLP.
    assert layers() == 8 * (s * b * h * (8 + 24) + log_sum_exp)
    assert layers(tp(4)) == 8 * (s * b * h * (8 + 24 / 4) + log_sum_exp / 4)
    assert layers(tp(4), sp) == layers() / 4
    assert layers("layout.context_parallel_size=2") == layers() / 2
    # The first of p stages keeps p micro-batches of its share of the layers; with v chunks 1 + (p - 1) / (p v) as much.
    stages = "layout.pipeline_model_parallel_size=4"
    assert layers(stages) == layers()
    interleaved = layers(stages, "layout.virtual_pipeline_model_parallel_size=2")
    assert interleaved == pytest.approx(layers() * (1 + 3 / 8))


def test_experts_share_memory_over_expert_parallel_ranks() -> None:
    few, many = (
        derive(recipe("qwen3-30b-a3b", **ONE_STAGE, expert_model_parallel_size=size), 16, gpus(16)) for size in (2, 16)
    )
    experts = many.num_parameters.experts
    assert few.num_parameters_on_rank - many.num_parameters_on_rank == experts // 2 - experts // 16
    # The optimizer's shares are as small either way: experts are on 8 ranks here, and on one of them there.
    assert few.memory.optimizer == pytest.approx(many.memory.optimizer, rel=1e-6)


def test_recommendations_are_whole_layouts() -> None:
    assert recommend(recipe("deepseek-v3"), shape(recipe("deepseek-v3").model), LAPTOP).startswith(
        "it runs on 512 × H100 80GB"
    )
    assert recommend(recipe("gpt-175b"), shape(recipe("gpt-175b").model), LAPTOP).startswith(
        "it runs on 128 × H100 80GB"
    )
    for name in ("llama3-70b", "llama3-405b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-7b"):
        assert "it runs on" in recommend(recipe(name), shape(recipe(name).model), LAPTOP), name


@pytest.mark.parametrize(
    ("implementation", "machine", "is_refused"),
    [
        ("auto", gpus(8), True),
        ("transformer_engine", gpus(8), True),
        ("transformer_engine", LAPTOP, True),
        ("local", gpus(8), False),
        ("auto", LAPTOP, False),  # its layers sum the gradient
    ],
)
def test_latent_attention_over_tensor_parallel_ranks_needs_sequence_parallelism(
    implementation: str, machine: Cluster, is_refused: bool
) -> None:
    document = load("deepseek-v3", []).recipe.model_dump()
    document["model"] |= {"transformer_impl": implementation} | {
        name: Model.model_fields[name].default for name in document["model"] if name.startswith(("moe_", "mtp_"))
    }
    document["model"] |= {"num_moe_experts": None, "num_layers": 4}
    document["layout"] = {"tensor_model_parallel_size": 2}
    document["train"] |= {"global_batch_size": 64}
    made = Recipe.model_validate(document)
    with refused("layout.sequence_parallel", rule="model.transformer_impl") if is_refused else nullcontext():
        layout(made, 2, machine)
    shared = made.model_copy(update={"layout": made.layout.model_copy(update={"sequence_parallel": True})})
    layout(shared, 2, machine)
