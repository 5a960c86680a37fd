"""An export is the same from a checkpoint of any layout, and of any engine: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.backends import stored_weights
from llmrecipes.engine.base import Progress
from llmrecipes.hf.family import config_of, family_of
from llmrecipes.hf.safetensors import SafetensorsFolder, write
from llmrecipes.hf.weights import AsHuggingFace
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.schema import Recipe
from tests.dist.training import training
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

LLAMA: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "seq_length": 16, "vocab_size": 61, "make_vocab_size_divisible_by": 8, "position_embedding_type": "rope",
    "normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True, "add_bias_linear": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "num_moe_experts": 4, "share_embeddings_and_output_weights": False}
DEEPSEEK = {
    **MIXTRAL, "num_query_groups": None, "layernorm_epsilon": 1e-6, "multi_latent_attention": True,
    "qk_layernorm": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6, "moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 48,
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "mtp_num_layers": 1,
}  # fmt: skip
GPT2 = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 61,
    "make_vocab_size_divisible_by": 8,
}  # fmt: skip
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
EXPERTS = {
    **TP2_PP2, "sequence_parallel": True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
}  # fmt: skip


def recipe(model: dict[str, Any], parallelism: dict[str, Any], **more: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "hf",
            "model": model,
            "layout": {**parallelism, "micro_batch_size": 1},
            "train": {"train_iters": 1, "global_batch_size": 4, "precision": "bf16"},
            "optimizer": {"lr": 1e-3},
            **more,
        }
    )


def save(recipe: Recipe, folder: Path) -> None:
    """A checkpoint of initial weights, which are the same in every layout."""
    with training(recipe) as (engine, _):
        info = CheckpointInfo(
            step=0, consumed_samples=0, consumed_tokens=0, layout=engine.plan.layout.as_dict(), recipe_hash="",
            engine=engine.name,
        )  # fmt: skip
        with AsyncSaver(CheckpointStore(folder), saver_group(), engine.checkpoint_format()) as saver:
            saver.save(engine.state(Progress()), info)
            (report,) = saver.wait()
            assert report.error is None, report.error


def exported(recipe: Recipe, checkpoints: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that an export of the checkpoint has."""
    entry = CheckpointStore(checkpoints).latest_valid()
    assert entry is not None
    family = family_of(recipe.model)
    stored = stored_weights(recipe, entry)
    assert {name: stored.shape(name) for name in weights(recipe.model)} == weights(recipe.model)
    folder.mkdir()
    write(AsHuggingFace(stored, family, recipe.model), config_of(family, recipe.model), folder, shard_bytes=20_000)
    source = SafetensorsFolder(folder)
    return {name: source.read(name) for name in source.names()}


@pytest.mark.parametrize(
    ("model", "parallelism"),
    [(GPT2, TP2_PP2), (LLAMA, TP2_PP2), (MIXTRAL, EXPERTS), (DEEPSEEK, EXPERTS)],
    ids=["gpt2 tp2 pp2", "llama tp2 pp2", "mixtral tp2 pp2 ep2", "deepseek-v3 tp2 pp2 ep2"],
)
@pytest.mark.rotating
def test_an_export_does_not_depend_on_the_layout(
    worlds: dict[int, GlooWorld], tmp_path: Path, model: dict[str, Any], parallelism: dict[str, Any]
) -> None:
    alone, split = recipe(model, {}), recipe(model, parallelism)
    worlds[1].run(save, alone, tmp_path / "alone")
    worlds[4].run(save, split, tmp_path / "split")
    one = exported(alone, tmp_path / "alone", tmp_path / "one")
    other = exported(split, tmp_path / "split", tmp_path / "other")
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
    assert {value.dtype for name, value in one.items() if not name.endswith("_bias")} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.deepspeed
def test_a_checkpoint_of_deepspeed_is_exported_too(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    zero = recipe(LLAMA, {}, layout={"engine": "deepspeed", "zero": {"stage": 3}})
    worlds[1].run(save, recipe(LLAMA, {}), tmp_path / "megatron")
    worlds[2].run(save, zero, tmp_path / "deepspeed")
    one = exported(recipe(LLAMA, {}), tmp_path / "megatron", tmp_path / "one")
    other = exported(zero, tmp_path / "deepspeed", tmp_path / "other")
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
