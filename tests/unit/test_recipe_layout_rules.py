"""What the degrees must divide, and what experts, latent attention and multi-token prediction go with."""

from __future__ import annotations

from typing import Any

import pytest

from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe

MOE = {"num_moe_experts": 8, "add_bias_linear": False}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope", "add_bias_linear": False}
ROPE = {"position_embedding_type": "rope"}
UNTIED = {**ROPE, "share_embeddings_and_output_weights": False}
YARN = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 30}


def make(model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, /, **parallelism: Any) -> Recipe:
    shape = {"num_layers": 8, "hidden_size": 96, "num_attention_heads": 12, "seq_length": 96, "vocab_size": 512}
    length = {"train_iters": 10, "global_batch_size": 8}
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {**shape, **(model or {})},
            "layout": {"micro_batch_size": 2, **parallelism},
            "train": {**length, **(train or {})},
            "optimizer": {"lr": 1e-3},
        }
    )


TP, PP, CP, EP = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
)  # fmt: skip
VPP, ETP = "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
WRITTEN = "pipeline_model_parallel_layout"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.mark.parametrize(
    ("recipe", "key", "what", "fix"),
    [
        (make(tensor_model_parallel_size=8), TP, "num_attention_heads 12, num_query_groups 12", "4"),
        (make({"num_query_groups": 2}, **{TP: 4}), TP, "num_query_groups 2", f"{TP} 2"),
        (make({"ffn_hidden_size": 50}, **{TP: 4}), TP, "ffn_hidden_size 50", f"{TP} 2"),
        (
            make({"vocab_size": 501, "make_vocab_size_divisible_by": 1}, **{TP: 2}),
            TP, "padded vocab_size 501", f"{TP} 1",
        ),
        (
            make({**MOE, "moe_shared_expert_intermediate_size": 7}, **{TP: 2, ETP: 1}, sequence_parallel=True),
            TP, "moe_shared_expert_intermediate_size 7", f"{TP} 1",
        ),
        (
            make({**LATENT, "q_lora_rank": 31, "kv_lora_rank": 33}, **{TP: 2}),
            TP, "kv_lora_rank + qk_pos_emb_head_dim 97, q_lora_rank 31", f"{TP} 1",
        ),
        (make(sequence_parallel=True), "sequence_parallel", f"{TP} 1", f"{TP} 2"),
        (make(MOE, {"precision": "fp16"}, **{EP: 2}), "train.precision", f"{EP} 2", f"{EP} 1"),
        (make(MOE, **{TP: 2, ETP: 1}), "sequence_parallel", f"{TP} 2", "true"),
        (make({"seq_length": 90}, **{TP: 4}, sequence_parallel=True), "model.seq_length", "90", "seq_length 88 or 92"),
        (make({"seq_length": 98}, **{CP: 2}), "model.seq_length", f"2 × {CP} 2", "96 or 100"),
        (
            make({"seq_length": 92}, **{CP: 2, TP: 4}, sequence_parallel=True),
            "model.seq_length", f"{CP} 2 × {TP} 4", "88 or 96",
        ),
        (make(**{PP: 3}), PP, f"{PP} 3", f"{PP} 2 or 4, or num_layers 6 or 9"),
        (make(**{PP: 2, VPP: 3}), PP, f"{PP} 2 × {VPP} 3", "num_layers 6 or 12"),
        (make(**{PP: 2, LOSS: True}), PP, f"{PP} 2", "num_layers 7 or 9"),
        (make(**{PP: 16}), PP, f"{PP} 16", f"{PP} 8"),
        (make(**{VPP: 2}), VPP, f"{PP} 1", f"{PP} 2"),
        (make(**{FIRST: 2}), FIRST, f"{PP} 1", f"{PP} 2"),
        (make(**{EMBEDDING: True}), EMBEDDING, f"{PP} 1", EMBEDDING),
        (make(**{PP: 4, FIRST: 2, LOSS: True}), FIRST, LOSS, FIRST),
        (make(**{PP: 4, FIRST: 3}), FIRST, "5 of 8", f"{FIRST} 2 or 5"),
        (make(**{PP: 2, FIRST: 3, LAST: 4}), FIRST, "1 of 8", f"{FIRST} 4"),
        (make(**{PP: 2, FIRST: 8}), FIRST, "0 of 8", f"{FIRST} 6 or 7"),
        (make(**{PP: 2, VPP: 2, FIRST: 3}), FIRST, f"{VPP} 2", f"{FIRST} 2 or 4"),
        (make(**{WRITTEN: "Et*8L"}), WRITTEN, f"{PP} 1", f"{PP} 2"),
        (make(**{PP: 2, WRITTEN: "Et*4|t*4L", FIRST: 4}), WRITTEN, FIRST, WRITTEN),
        (make(**{PP: 2, WRITTEN: "Et*4|t*4L", EMBEDDING: True, LOSS: True}), WRITTEN, f"{EMBEDDING}, {LOSS}", WRITTEN),
        (make(**{PP: 2, WRITTEN: "auto"}), WRITTEN, "'a', 'o', 'u'", "--search"),
        (make(**{PP: 2, WRITTEN: "Et*4|(t*4L"}), WRITTEN, "'('", "Et*3|(tt|)*2tL"),
        (make(**{PP: 2, WRITTEN: "Et*999999999999|L"}), WRITTEN, "100,000", "--search"),
        (make(**{PP: 2, WRITTEN: "Et*2|t*2|t*2|t*2L"}), WRITTEN, f"{PP} 2", f"{VPP} 2"),
        (make(**{PP: 2, VPP: 2, WRITTEN: "Et*4|t*4L"}), WRITTEN, f"{VPP} 2", f"{VPP} null"),
        (make(**{PP: 2, WRITTEN: "Et|t*4|t*3L"}), WRITTEN, f"{PP} 2", f"{PP} 3"),
        (make(**{PP: 2, WRITTEN: "Et*4|t*3L"}), WRITTEN, "num_layers 8", "8 t"),
        (make(**{PP: 2, WRITTEN: "Et*4|Et*4L"}), WRITTEN, "2 E", "1 E"),
        (make(**{PP: 2, WRITTEN: "tE|t*7L"}), WRITTEN, "tE", "E"),
        (make(**{PP: 2, WRITTEN: "Et*8L|"}), WRITTEN, "nothing", "L"),
        (make(**{PP: 4, WRITTEN: "Et*4||t*4|L"}), WRITTEN, "1", WRITTEN),
        (make(**{PP: 2, WRITTEN: "Et*4|t*4mL"}), WRITTEN, "mtp_num_layers 0", "mtp_num_layers 1"),
        (make({**UNTIED, "mtp_num_layers": 1}, **{PP: 2, WRITTEN: "Et*4|t*4L"}), WRITTEN, "0 m", "mtp_num_layers null"),
        (
            make({**UNTIED, "mtp_num_layers": 1}, **{PP: 2, WRITTEN: "Et*4m|t*4L"}),
            WRITTEN, "m", "t",
        ),
        (
            make({**UNTIED, "mtp_num_layers": 1}, **{PP: 3, WRITTEN: "Et*4|t*4m|L"}),
            WRITTEN, "1", "mL",
        ),
        (make(**{EP: 2}), EP, "model.num_moe_experts", "num_moe_experts"),
        (make(**{ETP: 1}), ETP, "model.num_moe_experts", ETP),
        (make(MOE, **{EP: 3}), EP, "num_moe_experts 8", f"{EP} 2 or 4"),
        (make({**MOE, "moe_ffn_hidden_size": 50}, **{ETP: 4}), ETP, "moe_ffn_hidden_size 50", "2 or 5"),
        (make({"moe_router_topk": 1}), "model.moe_router_topk", "num_moe_experts", "model.num_moe_experts"),
        (
            make({"num_moe_experts": 8, "moe_shared_expert_intermediate_size": 64}),
            "model.add_bias_linear", "moe_shared_expert_intermediate_size", "add_bias_linear false",
        ),
        (
            make({"num_moe_experts": 8}, **{TP: 2, EP: 2, "sequence_parallel": True}),
            ETP, f"2 (unset: {TP})", f"{ETP} 1",
        ),
        (make({**MOE, "moe_router_topk": 9}), "model.moe_router_topk", "9 of 8", "8"),
        (
            make({**MOE, "moe_router_topk": 1}),
            "model.moe_router_topk", "moe_router_pre_softmax false", "moe_router_pre_softmax true",
        ),
        (make({**MOE, "moe_layer_freq": [0, 1]}), "model.moe_layer_freq", "8", "num_layers 2"),
        (
            make({**MOE, "moe_pad_expert_input_to_capacity": True}),
            "model.moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor", "1.25",
        ),
        (
            make({**MOE, "moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 4.5}),
            "model.moe_expert_capacity_factor", "4.5", "moe_pad_expert_input_to_capacity false",
        ),
        (
            make({**MOE, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}),
            "model.moe_aux_loss_coeff", "0.1", "moe_aux_loss_coeff 0",
        ),
        (
            make({**MOE, "moe_router_enable_expert_bias": True}),
            "model.moe_router_enable_expert_bias", "softmax", "sigmoid",
        ),
        (
            make({**MOE, "moe_router_group_topk": 2}),
            "model.moe_router_group_topk", "moe_router_num_groups", "model.moe_router_num_groups",
        ),
        (
            make({**MOE, "moe_router_num_groups": 3, "moe_router_group_topk": 2}),
            "model.moe_router_num_groups", "8", "2 or 4",
        ),
        (
            make({**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 4}),
            "model.moe_router_group_topk", "4 of 2", "2",
        ),
        (
            make({**MOE, "moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 4}),
            "model.moe_router_group_topk", "moe_router_topk 4", "1",
        ),
        (make({"kv_lora_rank": 64}), "model.kv_lora_rank", "multi_latent_attention", "kv_lora_rank"),
        (
            make({**LATENT, "num_query_groups": 4}),
            "model.num_query_groups", "multi_latent_attention", "num_query_groups",
        ),
        (
            make({**LATENT, "position_embedding_type": "learned_absolute"}),
            "model.position_embedding_type", "learned_absolute", "rope",
        ),
        (
            make({**LATENT, "position_embedding_type": "yarn", **YARN}),
            "model.position_embedding_type", "yarn", "rope_type yarn",
        ),
        (make({**LATENT, "mscale_all_dim": 1.0}), "model.mscale_all_dim", "rope_type yarn", "mscale_all_dim"),
        (make({"rope_type": "yarn"}), "model.rope_type", "multi_latent_attention", "rope_type"),
        (
            make({**LATENT, "rope_type": "yarn", "original_max_position_embeddings": 30}, **{CP: 2}),
            "model.original_max_position_embeddings", "30", "28 or 32",
        ),
        (
            make({"position_embedding_type": "yarn", **YARN}, **{CP: 2}),
            "model.yarn_original_max_position_embeddings", "30", "28 or 32",
        ),
        (make({**LATENT, "qk_pos_emb_head_dim": 9}), "model.qk_pos_emb_head_dim", "9", "10"),
        (
            make({"mtp_loss_scaling_factor": 0.3}),
            "model.mtp_loss_scaling_factor", "mtp_num_layers", "mtp_loss_scaling_factor",
        ),
        (make({"mtp_num_layers": 1}), "model.mtp_num_layers", "learned_absolute", "rope"),
        (
            make({**ROPE, "mtp_num_layers": 1}, **{PP: 2}),
            "model.share_embeddings_and_output_weights", "mtp_num_layers", "share_embeddings_and_output_weights false",
        ),
        (
            make(
                {**ROPE, "mtp_num_layers": 1},
                **{"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            ),
            "layout.recompute_num_layers", "mtp_num_layers", "recompute_method block",
        ),
    ],
)  # fmt: skip
def test_a_broken_rule_names_values_and_what_works(recipe: Recipe, key: str, what: str, fix: str) -> None:
    (problem,) = check(recipe)
    assert problem.key == (key if "." in key else f"layout.{key}")
    assert what in problem.what
    assert fix in problem.fix
    assert problem.rule


@pytest.mark.parametrize(
    "recipe",
    [
        make(**{TP: 4, PP: 2, VPP: 2, CP: 3}, sequence_parallel=True),
        make(**{PP: 3, EMBEDDING: True}),
        make(**{PP: 4, FIRST: 1, LAST: 1}),
        make(**{PP: 2, FIRST: 3, LAST: 5}),
        make(**{PP: 5, VPP: 2, EMBEDDING: True, LOSS: True}),
        make({**MOE, "ffn_hidden_size": 51, "moe_ffn_hidden_size": 64}, **{TP: 2, EP: 4}, sequence_parallel=True),
        make({**MOE, "moe_layer_freq": [0, 1] * 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}, **{EP: 8}),
        make({**LATENT, "hidden_size": 100}),
        make({**LATENT, "rope_type": "yarn", "mscale_all_dim": 1.0}, **{CP: 2}),
        make({"position_embedding_type": "yarn", **YARN, "mtp_num_layers": 1}, **{CP: 3}),
        make(
            {**ROPE, "mtp_num_layers": 1},
            **{"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        ),
        make({**UNTIED, "mtp_num_layers": 1}, **{PP: 2, VPP: 2, WRITTEN: "Et*3|ttt|tt|mL"}),
        make({**ROPE, "mtp_num_layers": 2, "share_embeddings_and_output_weights": False}, **{PP: 2, TP: 2}),
    ],
)
def test_what_the_rules_allow(recipe: Recipe) -> None:
    assert check(recipe) == []


def test_absurd_numbers_are_answered_at_once() -> None:
    huge = 2**62
    for degrees in ({TP: huge}, {PP: huge - 1}, {PP: huge, FIRST: 5}, {CP: huge}):
        assert check(make({"num_layers": huge + 1, "seq_length": huge + 2}, **degrees))
    windows = {"window_size": [3, 0], "window_attn_skip_freq": 7, "num_layers": huge + 1}
    assert check(make(windows, **{PP: huge}))
    assert shape(make(windows).model).keys_seen(causal=True) > huge
    assert check(make({**MOE, "num_moe_experts": huge}, **{EP: huge - 1}))[0].fix
