"""The section `zero`: free keys under `extra`, and the rules between zero, layout and engine."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.former import ADAMW
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import DETERMINED, INSIDE, UNSUPPORTED, Zero
from tests.refusals import has_token, refused

NAME = "gpt-tiny"


def test_extra_is_set_by_its_dotted_names_and_survives_a_resolved_recipe(tmp_path: Path) -> None:
    loaded = load(
        NAME,
        [
            *ADAMW,
            "layout.zero.stage=3",
            "layout.zero.extra.zero_optimization.contiguous_gradients=false",
            "layout.zero.extra.comms_logger={enabled: true, prof_ops: [a, b]}",
            "layout.zero.extra.comms_logger.prof_ops.1=c",
        ],
    )
    zero = loaded.recipe.layout.zero
    assert zero is not None
    assert zero.extra == {
        "zero_optimization": {"contiguous_gradients": False},
        "comms_logger": {"enabled": True, "prof_ops": ["a", "c"]},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(loaded.recipe))
    again = load(str(path))
    assert again.recipe == loaded.recipe
    assert load(NAME, [*ADAMW, "layout.zero.stage=3"]).hash == loaded.hash, "it says how, not what"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("layout.zero.extra.comms_logger=.nan", "layout.zero.extra.comms_logger"),
        ("layout.zero.extra.comms_logger=[1, {a: -.inf}]", "layout.zero.extra.comms_logger"),
        ("layout.zero.extra=null", "layout.zero.extra"),
        ("layout.zero.extra..comms_logger=1", "layout.zero.extra..comms_logger"),
        ("zero.extr.comms_logger=1", "zero.extr.comms_logger"),
        ("layout.zero.stage=4", "layout.zero.stage"),
        ("layout.zero.stage=true", "layout.zero.stage"),
        ("layout.zero.stage=3.0", "layout.zero.stage"),
        ("layout.zero.offload_param=nvme", "layout.zero.offload_param"),
    ],
)
def test_extra_is_plain_json(override: str, key: str) -> None:
    with refused(key):
        load(NAME, ["layout.zero.stage=3", override])


def test_an_item_of_a_list_in_extra_has_a_number() -> None:
    with refused("layout.zero.extra.comms_logger.b", rule="layout.zero.extra.comms_logger.0"):
        load(NAME, ["layout.zero.stage=3", "layout.zero.extra.comms_logger=[1]", "layout.zero.extra.comms_logger.b=2"])


def test_a_section_that_may_be_null_has_its_keys_in_the_reference() -> None:
    known: dict[str, Any] = keys()
    assert known["layout.zero"].section
    assert known["layout.zero.stage"].required
    assert known["layout.zero.extra"].free
    assert load(NAME, ["layout.zero=null"]).hash == load(NAME).hash


def make(zero: dict[str, Any] | None, engine: str = "auto", **sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 4, "hidden_size": 96, "num_attention_heads": 12, "seq_length": 96, "vocab_size": 512},
        "train": {"train_iters": 10, "global_batch_size": 8},
        "optimizer": {"lr": 1e-3},
        "layout": {"micro_batch_size": 2},
    }
    merged = {key: {**value, **sections.get(key, {})} for key, value in base.items()}
    merged["layout"] |= {"engine": engine, "zero": zero}
    return Recipe.model_validate({"name": "t", **merged})


def stage(number: int, engine: str = "auto", **keys: Any) -> Recipe:
    return make({"stage": number, **keys}, engine, layout={"use_distributed_optimizer": number > 0})


def with_extra(extra: dict[str, Any], **keys: Any) -> Recipe:
    return stage(3, extra=extra, **keys)


def on_deepspeed(*, zero: int = 1, **sections: dict[str, Any]) -> Recipe:
    return make({"stage": zero}, "deepspeed", **sections)


PP, VPP, CP, EP = (
    f"{kind}_parallel_size" for kind in ("pipeline_model", "virtual_pipeline_model", "context", "expert_model")
)
MOE = {"num_moe_experts": 4, "add_bias_linear": False}
NVME = {"offload_optimizer": "nvme", "nvme_path": "/nvme"}


@pytest.mark.parametrize(
    ("recipe", "key", "tokens"),
    [
        (make({"stage": 2}, layout={PP: 2}), "layout.zero.stage", (f"{PP} 2", "layout.zero.stage 1")),
        (make({"stage": 3}, layout={PP: 4}), "layout.zero.stage", (f"{PP} 4", f"{PP} 1")),
        (on_deepspeed(layout={PP: 2}), f"layout.{PP}", ("engine deepspeed", f"{PP} 1")),
        (make({"stage": 2}, layout={CP: 2}), f"layout.{CP}", ("engine deepspeed", f"{CP} 1")),
        (on_deepspeed(zero=3, layout={EP: 2}, model=MOE), f"layout.{EP}", ("layout.zero.stage 2", f"{EP} 1")),
        (on_deepspeed(zero=0, layout={EP: 2}, model=MOE), f"layout.{EP}", ("layout.zero.stage 2", f"{EP} 1")),
        (
            on_deepspeed(model={"mtp_num_layers": 1, "position_embedding_type": "rope"}),
            "model.mtp_num_layers", "engine deepspeed",
        ),
        (
            on_deepspeed(
                model={**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
            ),
            "model.moe_router_enable_expert_bias", "engine deepspeed",
        ),
        (on_deepspeed(layout={"torch_compile": True}), "layout.torch_compile", "engine deepspeed"),
        (
            on_deepspeed(layout={"overlap_grad_reduce": True}),
            "layout.overlap_grad_reduce", ("layout.zero.overlap_comm", "engine megatron"),
        ),
        (
            on_deepspeed(train={"precision": "fp16", "initial_loss_scale": 1000.0}),
            "train.initial_loss_scale", ("512", "1024"),
        ),
        (
            on_deepspeed(train={"precision": "fp16", "min_loss_scale": 0.5}),
            "train.min_loss_scale", "min_loss_scale 1",
        ),
        (
            make({"stage": 0}, "deepspeed", layout={"use_distributed_optimizer": False}),
            "train.precision", ("layout.zero.stage 0", "layout.zero.stage 1", "megatron"),
        ),
        (make(None, "deepspeed"), "layout.zero", "layout.zero.stage"),
        (stage(2, "megatron"), "layout.engine", ("stage 2", "layout.zero.stage 1")),
        (stage(1, "megatron", offload_optimizer="cpu"), "layout.engine", "offload_optimizer cpu"),
        (stage(1, reduce_bucket_size=7), "layout.zero.reduce_bucket_size", "engine megatron"),
        (stage(1, overlap_comm=True), "layout.zero.overlap_comm", "engine deepspeed"),
        (stage(1, extra={"aio": {}}), "layout.zero.extra", "engine deepspeed"),
        (make({"stage": 0}), "layout.use_distributed_optimizer", ("layout.zero.stage 0", "false")),
        (
            make({"stage": 1}, layout={"use_distributed_optimizer": False}),
            "layout.use_distributed_optimizer", ("layout.zero.stage 1", "true"),
        ),
        (stage(0, offload_optimizer="cpu"), "layout.zero.offload_optimizer",
         ("cpu", "layout.zero.stage 0", "layout.zero.stage 2")),
        (stage(2, **NVME), "layout.zero.offload_optimizer", ("layout.zero.stage 2", "layout.zero.stage 3")),
        (stage(2, offload_param="cpu"), "layout.zero.offload_param", ("layout.zero.stage 2", "layout.zero.stage 3")),
        (stage(3, offload_optimizer="nvme"), "layout.zero.nvme_path", "offload_optimizer nvme"),
        (stage(3, offload_optimizer="nvme", nvme_path=" "), "layout.zero.nvme_path", "offload_optimizer nvme"),
        (stage(3, offload_optimizer="cpu", nvme_path="/nvme"), "layout.zero.nvme_path", "/nvme"),
        (stage(2, stage3_prefetch_bucket_size=1), "layout.zero.stage3_prefetch_bucket_size", "layout.zero.stage 2"),
        (stage(2, sub_group_size=1), "layout.zero.sub_group_size",
         ("layout.zero.stage 3", "layout.zero.sub_group_size=1000000000")),
        (make({"stage": 2}, train={"zero_quantized_weights": True}), "train.zero_quantized_weights",
         "layout.zero.stage 3"),
        (stage(1, "deepspeed", zero_hpz_partition_size=8), "layout.zero.zero_hpz_partition_size",
         "layout.zero.stage 3"),
        (
            make({"stage": 3, "zero_hpz_partition_size": 2}, layout={"tensor_model_parallel_size": 2}),
            "layout.zero.zero_hpz_partition_size", "tensor_model_parallel_size 2",
        ),
        (make({"stage": 3}, train={"zero_quantized_gradients": True}), "train.zero_quantized_gradients",
         ("bf16", "grad_reduce_in_fp32")),
        (
            make({"stage": 3}, train={"precision": "fp16", "zero_quantized_gradients": True}),
            "train.zero_quantized_gradients", "grad_reduce_in_fp32 true",
        ),
        (stage(3, allgather_bucket_size=2), "layout.zero.allgather_bucket_size", "layout.zero.stage 3"),
        (stage(2, allgather_bucket_size=3), "layout.zero.allgather_bucket_size", "4"),
        (stage(0, "deepspeed", reduce_bucket_size=2), "layout.zero.reduce_bucket_size", "layout.zero.stage 0"),
    ],
)  # fmt: skip
def test_what_is_refused(recipe: Recipe, key: str, tokens: str | tuple[str, ...]) -> None:
    _require(recipe, key, tokens)


@pytest.mark.parametrize(
    ("extra", "key", "tokens"),
    [
        ({"train_batch_size": 16}, "train_batch_size", "train.global_batch_size"),
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu", "layout.micro_batch_size"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "train.global_batch_size"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer", "optimizer"),
        ({"scheduler": {}}, "scheduler", "scheduler"),
        ({"bf16": {"enabled": True}}, "bf16", "train.precision"),
        ({"gradient_clipping": 0.5}, "gradient_clipping", "optimizer.clip_grad"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "train.grad_reduce_in_fp32"),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype", "train.grad_reduce_in_fp32",
        ),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "layout.zero.stage"),
        (
            {"zero_optimization": {"prefetch_bucket_size": 2}},
            "zero_optimization.prefetch_bucket_size", "layout.zero.stage3_prefetch_bucket_size",
        ),
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload",
         "layout.zero.offload_optimizer"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device", "layout.zero.offload_optimizer",
        ),
        (
            {"zero_optimization": {"offload_param": {"buffer_count": 5}}},
            "zero_optimization.offload_param", "layout.zero.offload_param none",
        ),
        ({"zero_optimization": True}, "zero_optimization", "layout.zero.stage"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size", "layout.context_parallel_size"),
        ({"coms_logger": {}}, "coms_logger", "comms_logger"),
        ({"zero_optimization": {"contiguous": True}}, "zero_optimization.contiguous", "contiguous_gradients"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients", ()),
        ({"zero_optimization": {"mics_shard_size": 2}}, "zero_optimization.mics_shard_size", ()),
        ({"aio": {"bloc_size": 1}}, "aio.bloc_size", "block_size"),
        ({"aio": {"block_size": True}}, "aio.block_size", ()),
        ({"flops_profiler": {"profile_step": "x"}}, "flops_profiler.profile_step", ()),
        ({"data_types": {"x": 1}}, "data_types.x", "grad_accum_dtype"),
        ({"data_types": 3}, "data_types", ()),
        ({"steps_per_print": 0}, "steps_per_print", "train.log_interval"),
        ({"TRAIN_BATCH_SIZE": 2}, "TRAIN_BATCH_SIZE", "train_batch_size"),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}},
            "zero_optimization.offload_optimizer.ratio", (),
        ),
        ({"weight_quantization": {}}, "weight_quantization", "train.precision"),
    ],
)  # fmt: skip
def test_what_extra_refuses(extra: dict[str, Any], key: str, tokens: str | tuple[str, ...]) -> None:
    _require(with_extra(extra, offload_optimizer="cpu"), f"layout.zero.extra.{key}", tokens)


@pytest.mark.parametrize(
    "recipe",
    [
        make(None),
        make(None, "megatron"),
        stage(0),
        stage(1, "megatron"),
        stage(1, "deepspeed", overlap_comm=True, allgather_bucket_size=100, reduce_bucket_size=7),
        stage(1, offload_optimizer="cpu"),
        make({"stage": 1}, layout={PP: 2, "use_distributed_optimizer": True}),
        make({"stage": 2}, model=MOE, layout={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        make({"stage": 3}, train={"precision": "fp16"}),
        # Combinations that stage3.py handles one by one.
        stage(3, offload_param="cpu"),
        stage(3, **NVME, zero_hpz_partition_size=8, stage3_max_live_parameters=0),
        make({"stage": 3}, train={"zero_quantized_weights": True}),
        make(
            {"stage": 3},
            train={"precision": "fp16", "grad_reduce_in_fp32": False, "zero_quantized_gradients": True},
        ),
        with_extra({"zero_optimization": {"offload_optimizer": {"pipeline_read": True}}, "aio": {}}, **NVME),
    ],
)
def test_what_is_valid(recipe: Recipe) -> None:
    assert check(recipe) == []


def test_every_key_of_deepspeed_has_its_answer() -> None:
    """The names of `DeepSpeedZeroConfig`, read from its source: importing DeepSpeed takes seconds."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        pytest.skip("DeepSpeed is not installed: make setup-zero")
    tree = ast.parse((Path(found.origin).parent / "runtime/zero/config.py").read_text())
    section = next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedZeroConfig"
    )
    names = set()
    for node in section.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            calls = node.value.keywords if isinstance(node.value, ast.Call) else []
            alias = [call.value.value for call in calls if call.arg == "alias" and isinstance(call.value, ast.Constant)]
            names.add(str(alias[0]) if alias else node.target.id)
    assert len(names) > 40
    answered = {key.removeprefix("zero_optimization.") for key in (*DETERMINED, *UNSUPPORTED)} | set(INSIDE)
    assert names <= answered
    assert set(INSIDE) <= names


def _require(recipe: Recipe, key: str, tokens: str | tuple[str, ...]) -> None:
    found = [problem for problem in check(recipe) if problem.key == key]
    assert len(found) == 1, [problem.key for problem in check(recipe)]
    wanted = (tokens,) if isinstance(tokens, str) else tokens
    text = f"{found[0].what}\n{found[0].rule}\n{found[0].fix}"
    assert all(has_token(text, token) for token in wanted), text
    assert found[0].fix


@pytest.mark.parametrize(
    ("overrides", "engine", "ignored"),
    [
        ((), "deepspeed", set()),
        (("layout.zero.stage=2",), "deepspeed", {"prefetch_bucket_size", "max_live_parameters"}),
        (
            ("layout.zero.stage=2", "layout.zero.stage3_max_live_parameters=1000000000"),
            "deepspeed",
            {"prefetch_bucket_size"},
        ),
        (("layout.zero.stage=1",), "megatron", {"prefetch_bucket_size", "max_live_parameters", "reduce_bucket_size"}),
        (
            ("layout.zero.stage=1", "layout.engine=deepspeed"),
            "deepspeed",
            {"prefetch_bucket_size", "max_live_parameters"},
        ),
    ],
)
def test_keys_of_another_stage_in_a_file_have_no_effect_and_are_named(
    overrides: tuple[str, ...], engine: str, ignored: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load("gpt-tiny-zero", overrides)
    zero = loaded.recipe.layout.zero
    assert zero is not None
    short = {key.removeprefix("layout.zero.").removeprefix("stage3_") for key in loaded.ignored}
    assert short - {"param_persistence_threshold", "max_reuse_distance"} == ignored
    assert engine_name(loaded.recipe) == engine
    for key in loaded.ignored:
        assert getattr(zero, key.rpartition(".")[2]) == Zero.model_fields[key.rpartition(".")[2]].default
        assert key in caplog.text
    assert not check(loaded.recipe)
    assert bool(caplog.text) == bool(ignored)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("layout.zero.stage3_max_live_parameters=7", "layout.zero.stage3_max_live_parameters"),
        ("layout.zero.extra.comms_logger={enabled: true}", "layout.zero.extra"),
        ("layout.zero={stage: 1, sub_group_size: 7}", "layout.zero.sub_group_size"),
    ],
)
def test_a_key_of_another_stage_on_the_command_line_is_refused(override: str, key: str) -> None:
    with refused(key):
        load("gpt-tiny-zero", [override, "layout.zero.stage=1"])
