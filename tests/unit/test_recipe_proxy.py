"""Rehearsals: small, valid on their own ranks, and with every switch and kind of parallelism of the recipe."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from pydantic import create_model

from benchmarks.former import ADAMW
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.nested import leaves
from llmrecipes.plan.derive import default_world_size, derive
from llmrecipes.recipe.derived.degrees import smallest_world
from llmrecipes.recipe.derived.stage_layout import parse
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe, Tracking
from llmrecipes.recipe.sections.plugins import MetricSink, declared, settings
from llmrecipes.recipe.sections.source import Curriculum
from llmrecipes.recipe.speedups.features import key_of, needing_a_gpu
from llmrecipes.recipe.variants.proxy import proxy, scaled

GIB = 1 << 30
LAPTOP = Cluster(gpus=(), cpu_cores=4, memory_bytes=16 * GIB, memory_available_bytes=12 * GIB, disk_free_bytes=GIB)
GPU = DetectedGpu("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, 989.4)

DEGREES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)  # fmt: skip
MAY_CHANGE = {
    "name", "description", "data.sources", "data.tokenizer.type", "data.tokenizer.path", "data.tokenizer.revision",
    "data.num_workers", "checkpoint.save_interval", "checkpoint.keep_interval", "scheduler.lr_decay_iters",
    "checkpoint.non_persistent_save_interval", "checkpoint.non_persistent_local_ckpt_dir",
    "scheduler.lr_warmup_iters", "scheduler.lr_wsd_decay_iters", "tracking.system_metrics_interval",
    "train.eval_interval", "train.eval_iters", "train.rampup_batch_size", "train.step_batch_size_schedule", "stages",
    "train.global_batch_size", "train.log_interval", "train.zero_quantized_weights", "train.zero_quantized_gradients",
    "layout.name", "layout.micro_batch_size", "train.train_iters",
    "distill.model.hidden_size", "distill.model.ffn_hidden_size", "train.pretrained", "lora.rank", "lora.alpha",
    "data.chat.chat_template",
    "layout.recompute_num_layers", "layout.torch_compile", *(f"layout.{name}" for name in DEGREES),
    "layout.expert_tensor_parallel_size", "layout.num_layers_in_first_pipeline_stage",
    "layout.num_layers_in_last_pipeline_stage", "layout.pipeline_model_parallel_layout",
    *map(key_of, needing_a_gpu()),
    *(f"optimizer.{name}" for name in ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")),
    *(f"layout.zero.{name}" for name in (
        "offload_optimizer", "offload_param", "nvme_path", "reduce_bucket_size", "allgather_bucket_size",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "zero_hpz_partition_size",
    )),
    *(f"tracking.{key}" for sink in declared(Tracking, MetricSink) for key in (sink, *settings(Tracking, sink))),
    *(f"model.{name}" for name in (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
        "seq_length", "max_position_embeddings", "yarn_original_max_position_embeddings",
        "original_max_position_embeddings", "rotary_percent", "vocab_size", "make_vocab_size_divisible_by",
        "transformer_impl", "mtp_num_layers", "num_moe_experts", "moe_router_topk", "moe_router_pre_softmax",
        "moe_router_num_groups", "moe_router_group_topk", "moe_ffn_hidden_size", "moe_layer_freq",
        "moe_token_dispatcher_type", "window_size", "window_attn_skip_freq", "no_rope_freq",
        "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
        "v_head_dim",
    )),
}  # fmt: skip
"""What a rehearsal may have otherwise than its recipe; every other key it has to keep."""


def assert_rehearses(recipe: Recipe) -> None:
    """The proxy is a valid small recipe on its own ranks and twice as many, and nothing but numbers is lost."""
    assert_same_kinds_on_gpus(recipe)
    small = proxy(recipe)
    assert Recipe.model_validate(small.model_dump()) == small
    assert check(small) == []
    ranks = default_world_size(small, LAPTOP)
    replicas = 2 if recipe.layout.zero is not None and recipe.layout.zero.stage >= 2 else 1
    assert ranks == replicas * smallest_world(small.layout) <= 8
    for world in {ranks, 2 * ranks} if 1 < ranks <= 4 else {ranks}:
        plan = derive(small, world, LAPTOP)
        assert plan.fits
        assert plan.num_microbatches >= plan.layout.pipeline_model_parallel_size
    for name in DEGREES:
        there, here = getattr(recipe.layout, name), getattr(small.layout, name)
        if name == "expert_model_parallel_size" and recipe.model.num_moe_experts:
            there = max(there, recipe.layout.tensor_model_parallel_size)  # ranks that share experts in some way
        assert here == there if there in (None, 1) else here == 2, name
    whole, scaled_down = (dict(leaves(each.model_dump())) for each in (recipe, small))
    assert {name for name in whole if whole[name] != scaled_down[name]} <= MAY_CHANGE
    for name in ("num_moe_experts", "moe_shared_expert_intermediate_size", "mtp_num_layers", "num_query_groups",
                 "q_lora_rank", "moe_router_num_groups"):  # fmt: skip
        assert (getattr(small.model, name) is None) == (getattr(recipe.model, name) is None), name
    pattern = recipe.model.moe_layer_freq
    if isinstance(pattern, list):
        assert isinstance(small.model.moe_layer_freq, list)
        assert set(small.model.moe_layer_freq) == set(pattern)
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    assert [bool(getattr(small.layout, end)) for end in ends] == [bool(getattr(recipe.layout, end)) for end in ends]
    written = [each.layout.pipeline_model_parallel_layout for each in (recipe, small)]
    if written[0]:
        there, here = (parse(each or "") for each in written)
        assert [part in here[-1] for part in "mL"] == [part in there[-1] for part in "mL"]
        assert {"t" in there[-1]} <= {"t" in here[-1], len(here) == 2}
    assert small.model.num_layers <= 8
    assert max(small.model.hidden_size, small.model.seq_length) <= 128
    assert (small.model.num_moe_experts or 0) <= 8


def assert_same_kinds_on_gpus(recipe: Recipe) -> None:
    """Every degree above 1 is 2 on GPUs, where NCCL gathers the tokens of experts that are split themselves."""
    small = proxy(recipe, "cuda")
    assert check(small) == []
    ranks = smallest_world(small.layout)
    assert ranks <= 8
    plan = derive(small, ranks, replace(LAPTOP, gpus=(GPU,) * ranks))
    found = scaled(recipe, plan.layout.as_dict())
    assert (found.added, found.not_run) == ((), ())
    assert {name: plan.layout.as_dict()[name] for name in found.asked} == {
        name: min(n, 2) for name, n in found.asked.items()
    }


def test_what_a_cpu_cannot_run_is_reported() -> None:
    changes = ["layout.tensor_model_parallel_size=4", "layout.sequence_parallel=true"]
    whole = load("mixtral-8x7b", [*changes, "layout.expert_model_parallel_size=1",
                                  "layout.expert_tensor_parallel_size=null"]).recipe  # fmt: skip
    small = proxy(whole)
    found = scaled(whole, derive(small, smallest_world(small.layout), LAPTOP).layout.as_dict())
    assert found.asked["expert_tensor_parallel_size"] == 4  # that of the dense layers
    assert [(each.degree, each.asked, each.ran) for each in found.not_run] == [("expert_tensor_parallel_size", 4, 1)]
    assert [(each.degree, each.asked, each.ran) for each in found.added] == [("expert_model_parallel_size", 1, 2)]
    assert all(each.reason for each in (*found.not_run, *found.added))
    assert "not verified" in dict(found.lines("not verified"))
    dense = load("gpt-tiny").recipe
    found = scaled(dense, derive(proxy(dense), 1, LAPTOP).layout.as_dict())
    assert not [name for name in found.asked if name.startswith("expert_")]
    assert found.lines("not verified") == []


@pytest.mark.parametrize(
    "section",
    [
        name
        for name in Recipe.model_fields
        if name not in ("name", "description", "engine", "stages", "layout", "layouts")
    ],
)
def test_a_new_key_reaches_the_rehearsal(section: str) -> None:
    elsewhere: dict[str, Any] = {"search": load("gpt-tiny").recipe.search, "lora": load("lora-tiny").recipe.lora}
    elsewhere |= {"distill": load("gpt-tiny-distil").recipe.distill, "dpo": load("dpo-tiny").recipe.dpo}
    elsewhere |= {"qat": load("gpt-tiny", ["qat.scheme=int8"]).recipe.qat}
    whole = load("gpt-tiny-zero").recipe.model_copy(update=elsewhere)
    old = getattr(whole, section)
    longer = create_model("WithNewKey", __base__=type(old), new_key=(int, 0)).model_validate(
        {**dict(old), "new_key": 1}
    )
    assert getattr(proxy(whole.model_copy(update={section: longer})), section).new_key == 1


def test_keys_that_no_shipped_recipe_sets_are_kept_too() -> None:
    assert_rehearses(
        load("deepseek-v3", [
            "data.split=[70,20,10]", "data.prefetch_factor=7", "data.pin_memory=false", "tracking.experiment=e",
            "tracking.wandb=true", "tracking.wandb_project=p", "optimizer.adam_eps=1e-5", "train.label_smoothing=0.1",
            "train.seed=7", "checkpoint.async_save=false", "layout.overlap_grad_reduce=true",
        ]).recipe
    )  # fmt: skip


def test_what_only_the_whole_recipe_has_is_left_out() -> None:
    groups = "[{pattern: 'decoder.layers.20.*', lr_mult: 2}, {pattern: 'decoder.*', wd_mult: 0}]"
    whole = load("gpt-1b", [f"optimizer.groups={groups}", "data.curriculum={score: loss, scores: a, share: 0.5}"])
    small = proxy(whole.recipe)
    assert check(small) == []
    assert [each.pattern for each in small.optimizer.groups] == ["decoder.*"]
    assert small.data.curriculum == Curriculum(score="length", share=0.5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout.zero.stage=0", "layout.use_distributed_optimizer=false"],
        ["layout.zero.stage=1"],
        ["layout.zero.stage=1", "layout.engine=deepspeed", "layout.zero.overlap_comm=true"],
        ["layout.zero.stage=2", "layout.zero.offload_optimizer=cpu"],
        [
            "layout.zero.stage=3", "layout.zero.offload_optimizer=nvme", "layout.zero.offload_param=cpu",
            "layout.zero.nvme_path=/nvme",
            "layout.zero.zero_hpz_partition_size=8", "train.zero_quantized_weights=true", "layout.zero.extra.aio={}",
        ],
    ],
)  # fmt: skip
def test_rehearsals_with_zero(overrides: list[str]) -> None:
    recipe = load("gpt-tiny", [*ADAMW, *overrides]).recipe
    assert_rehearses(recipe)
    small, whole = proxy(recipe).layout.zero, recipe.layout.zero
    assert small is not None and whole is not None
    assert small.stage == whole.stage
    assert (small.offload_optimizer == "none") == (whole.offload_optimizer == "none")
    assert (small.offload_param == "none") == (whole.offload_param == "none")


@pytest.mark.parametrize("name", names())
def test_rehearsals_of_shipped_recipes(name: str) -> None:
    assert_rehearses(load(name).recipe)


@pytest.mark.rotating
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
            ranks = smallest_world(recipe.layout)
            derive(recipe, ranks, replace(LAPTOP, gpus=(GPU,) * ranks))
        except UserError:  # the batch, or degrees that do not go together
            continue
        for name in DEGREES:
            found[name] = found.get(name, 0) + ((getattr(recipe.layout, name) or 1) > 1)
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
        uneven = draw.choice(("no", "first", "last", "both", "counted", "written"))
        if uneven == "written":
            places = pipeline * (parallel["virtual_pipeline_model_parallel_size"] or 1)
            cuts = sorted(draw.randint(0, layers) for _ in range(places - 1))
            counts = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
            parts = ["t" * number for number in counts]
            parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}{'m' * (model.get('mtp_num_layers') or 0)}L"
            parallel["pipeline_model_parallel_layout"] = "|".join(parts)
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
            "name": "t", "model": model, "layout": {**parallel, "micro_batch_size": micro}, "optimizer": {"lr": 1e-3},
            "train": {
                "train_iters": 10, "global_batch_size": micro * draw.choice((1, 4, 24, 48))
            }
        }
    )  # fmt: skip
