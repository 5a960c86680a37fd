"""What users of other frameworks are told when they write those frameworks' names."""

from __future__ import annotations

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.recipe.load import load
from llmrecipes.recipe.reading.keys import hint, keys
from llmrecipes.recipe.reading.overrides import parse_override
from llmrecipes.recipe.reading.synonyms import NOTES, SAME, SYNONYMS
from tests.refusals import refused, require_message, require_refusal

LEAVES = {key.rpartition(".")[2] for key in keys()}

# The keys of config.json of Llama 3.1, Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-2.
CONFIG = """
architectures attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size
initializer_range intermediate_size max_position_embeddings mlp_bias model_type num_attention_heads num_hidden_layers
num_key_value_heads pretraining_tp rms_norm_eps rope_scaling rope_theta tie_word_embeddings torch_dtype
transformers_version use_cache vocab_size
num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef sliding_window
decoder_sparse_step max_window_layers mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
use_sliding_window
aux_loss_alpha first_k_dense_replace kv_lora_rank moe_layer_freq n_group n_routed_experts n_shared_experts
num_nextn_predict_layers q_lora_rank qk_nope_head_dim qk_rope_head_dim routed_scaling_factor scoring_func seq_aux
topk_group topk_method v_head_dim
activation_function attn_pdrop embd_pdrop layer_norm_epsilon n_ctx n_embd n_head n_inner n_layer n_positions resid_pdrop
"""


def test_the_table_names_keys_that_exist_and_none_of_a_recipes_own() -> None:
    assert set(SAME) <= set(keys())
    # A mapping in config.json, true or false here; and keys of data, distill, lora and train.adversarial.
    assert not set(SYNONYMS) & LEAVES - {"rope_scaling", "max_length", "dropout", "steps", "top_k", "norm"}
    noted = [name for names, _ in NOTES for name in names.split()]
    assert len(noted) == len(set(noted))
    assert all(found.keys or found.note for found in SYNONYMS.values())


def test_every_key_of_a_config_json_is_known_or_answered() -> None:
    assert [name for name in CONFIG.split() if name not in LEAVES and name not in SYNONYMS] == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.num_key_value_heads", ["model.num_query_groups"]),
        ("num_hidden_layers", ["model.num_layers"]),
        ("parallelism.rms_norm_eps", ["model.layernorm_epsilon"]),
        ("model.rope_scaling.factor", ["model.rope_scaling_factor"]),
        ("tp", ["layout.tensor_model_parallel_size"]),
        ("--pipeline-model-parallel-size", ["layout.pipeline_model_parallel_size"]),
        ("train.learning_rate", ["optimizer.lr"]),
        ("batch_size", ["layout.micro_batch_size", "train.global_batch_size"]),
        ("optimizer.betas", ["optimizer.adam_beta1", "optimizer.adam_beta2"]),
        ("data.sources.3.text_column", ["data.sources.3.text_key"]),
        ("data.dataset_path", ["data.sources.0.path"]),
    ],
)
def test_another_frameworks_name_is_answered_with_ours(name: str, meant: list[str]) -> None:
    assert list(hint(name).keys) == meant


@pytest.mark.parametrize(
    "name",
    [
        "dp",
        "parallelism.data_parallel_size",
        "sliding_window",
        "model.layer_types",
        "bos_token_id",
        "optimizer.type",
        "model.type",
        "model.softmax_scale",
        "optimizer.overlap_cpu_optimizer_d2h_h2d",
    ],
)
def test_what_a_recipe_has_no_key_for_is_explained(name: str) -> None:
    with refused(name) as caught:
        parse_override(f"{name}=2")
    assert caught.value.fix == hint(name).note != ""


def test_a_pasted_config_is_answered_key_by_key_and_nothing_is_called_missing() -> None:
    text = "num_hidden_layers: 2, n_embd: 64, rope_scaling: {factor: 8.0, rope_type: llama3}, torch_dtype: bfloat16"
    with refused("train.precision", rule="bf16") as caught:
        load("gpt-tiny", [f"model={{{text}, n_head: 4, block_size: 64, vocab_size: 512}}", "train.precision=bfloat16"])
    assert len(caught.value.parts) == 7
    meant = {
        "num_hidden_layers": "model.num_layers", "n_embd": "model.hidden_size", "n_head": "model.num_attention_heads",
        "block_size": "model.seq_length", "rope_scaling": "rope_scaling: true",
    }  # fmt: skip
    for name, key in meant.items():
        require_refusal(caught.value, f"model.{name}", rule=key)


def test_an_option_that_is_a_key_here_is_named_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", "gpt-tiny", "--tensor-model-parallel-size", "2"]) == 2
    require_message(
        capsys.readouterr().err, "--tensor-model-parallel-size", rule="layout.tensor_model_parallel_size=..."
    )
    assert cli.run(["show", "gpt-tiny", "--lr=1"]) == 2
    require_message(capsys.readouterr().err, "--lr", rule="optimizer.lr=...")
    assert cli.run(["show", "gpt-tiny", "--no-such-thing"]) == 2
    assert "=..." not in capsys.readouterr().err
