"""Rules over several keys, the proxy, and the generated pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.recipe.halves import half_of
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.reading.keys import generated, hint, json_schema, keys, reference
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.plugins import declared
from llmrecipes.recipe.sections.section import EXECUTION, Section
from llmrecipes.recipe.variants.proxy import proxy
from tests.refusals import has_token, refused

ROOT = Path(__file__).parents[2]


YARN = {
    "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32,
}  # fmt: skip


def make(**sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512},
        "train": {"train_iters": 10, "global_batch_size": 8},
        "optimizer": {"lr": 1e-3},
        "layout": {"micro_batch_size": 2},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Recipe.model_validate({"name": "t", **base})


@pytest.mark.parametrize(
    ("sections", "key", "what", "fix"),
    [
        ({"model": {"num_attention_heads": 3}}, "model.num_attention_heads", "3", "2 or 4"),
        ({"model": {"num_query_groups": 3}}, "model.num_query_groups", "3", "2 or 4"),
        ({"model": {"max_position_embeddings": 32}}, "model.seq_length", "64", "seq_length 32"),
        ({"model": {"rope_scaling": True}}, "model.rope_scaling", "learned_absolute", "position_embedding_type rope"),
        ({"model": {"position_embedding_type": "rope", "kv_channels": 5}}, "model.rotary_percent", "5", "kv_channels"),
        ({"model": {"yarn_beta_fast": 16}}, "model.yarn_beta_fast", "without", "position_embedding_type yarn"),
        (
            {"model": {**YARN, "yarn_original_max_position_embeddings": None}},
            "model.yarn_original_max_position_embeddings", "yarn", "64",
        ),
        ({"model": {**YARN, "rotary_percent": 0.5}}, "model.rotary_percent", "0.5", "rotary_percent 1"),
        ({"model": {**YARN, "rope_scaling": True}}, "model.rope_scaling", "yarn", "position_embedding_type rope"),
        ({"model": {"vocab_size": 100}}, "model.vocab_size", "100", "257"),
        ({"optimizer": {"min_lr": 1}}, "optimizer.min_lr", "lr 0.001", "0.0001"),
        ({"scheduler": {"lr_warmup_iters": 10}}, "scheduler.lr_warmup_iters", "train.train_iters 10", "1"),
        (
            {"scheduler": {"lr_warmup_iters": 5, "lr_decay_iters": 4}},
            "scheduler.lr_warmup_iters", "lr_decay_iters 4", "0",
        ),
        (
            {"scheduler": {"lr_decay_style": "WSD"}},
            "scheduler.lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_iters 2",
        ),
        ({"scheduler": {"lr_wsd_decay_iters": 3}}, "scheduler.lr_wsd_decay_iters", "lr_decay_style", "WSD"),
        (
            {"scheduler": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_iters": 2}},
            "scheduler.lr_wsd_decay_iters", "9", "8",
        ),
        (
            {"scheduler": {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 2, "lr_decay_iters": 9}},
            "scheduler.lr_decay_iters", "9 of 10", "lr_decay_iters 10",
        ),
        ({"layout": {"micro_batch_size": 3}}, "train.global_batch_size", "8", "6 or 9"),
        (
            {"layout": {"recompute_granularity": "full", "recompute_num_layers": 1}},
            "layout.recompute_granularity", "recompute_method", "recompute_method uniform",
        ),
        (
            {"layout": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}},
            "layout.recompute_num_layers", "3 of 2", "2",
        ),
        (
            {"layout": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}},
            "layout.recompute_modules", "add_bias_linear", "add_bias_linear false",
        ),
        (
            {"layout": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
            "layout.recompute_modules", "model.num_moe_experts", "moe",
        ),
        (
            {"layout": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1,
                       "recompute_modules": ["layernorm"]}},
            "layout.recompute_modules", "recompute_granularity full", "recompute_granularity selective",
        ),
        (
            {"layout": {"recompute_granularity": "auto", "recompute_modules": ["layernorm"]}},
            "layout.recompute_modules", "recompute_granularity auto", "recompute_granularity selective",
        ),
        (
            {"layout": {"recompute_method": "block"}},
            "layout.recompute_method", "recompute_granularity", "recompute_granularity full",
        ),
        ({"train": {"initial_loss_scale": 0.5}}, "train.min_loss_scale", "initial_loss_scale", "0.5"),
        (
            {"layout": {"overlap_param_gather": True}},
            "layout.overlap_param_gather", "overlap_grad_reduce false", "overlap_grad_reduce true",
        ),
        (
            {"checkpoint": {"save_interval": 3, "keep_interval": 10}},
            "checkpoint.keep_interval", "10", "9 or 12",
        ),
        (
            {"checkpoint": {"non_persistent_save_interval": 3}},
            "checkpoint.non_persistent_save_interval", "non_persistent_local_ckpt_dir",
            "checkpoint.non_persistent_local_ckpt_dir",
        ),
        (
            {"layout": {"zero": {"stage": 2},
             }, "checkpoint": {"non_persistent_save_interval": 3, "non_persistent_local_ckpt_dir": "/nvme"}},
            "checkpoint.non_persistent_save_interval", "deepspeed", "megatron",
        ),
        (
            {"faults": {"rank_heartbeat_timeout": None, "initial_rank_heartbeat_timeout": 9.0}},
            "faults.initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "faults.rank_heartbeat_timeout",
        ),
        ({"faults": {"loss_spike_window": 9}}, "faults.loss_spike_window", "none", "loss_spike_action rewind"),
        ({"faults": {"loss_spike_max_rewinds": 9}}, "faults.loss_spike_max_rewinds", "none", "loss_spike_action"),
        (
            {"checkpoint": {"save_interval": 30}, "faults": {"loss_spike_action": "rewind"}},
            "faults.loss_spike_rewind_steps", "100 with 2", "checkpoint.most_recent_k 5",
        ),
        (
            {"faults": {"check_results_across_dp_replicas_interval": 9},
             "model": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
             "layout": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
                             "tensor_model_parallel_size": 2, "sequence_parallel": True}},
            "faults.check_results_across_dp_replicas_interval", "expert_model_parallel_size 2", "remove",
        ),
        (
            {"faults": {"check_results_across_dp_replicas_interval": 9}, "layout": {"zero": {"stage": 2}}},
            "faults.check_results_across_dp_replicas_interval", "9", "remove",
        ),
    ],
)  # fmt: skip
def test_a_broken_rule_names_values_and_what_works(sections: Any, key: str, what: str, fix: str) -> None:
    (problem,) = check(make(**sections))
    assert problem.key == key
    assert what in problem.what
    assert fix in problem.fix
    assert problem.rule


def test_what_the_rules_allow() -> None:
    assert check(make(model={"num_attention_heads": 3, "kv_channels": 20})) == []
    assert check(make(data={"tokenizer": {"type": "huggingface", "path": "x"}}, model={"vocab_size": 100})) == []
    huge = make(model={"hidden_size": 2**62 + 1, "num_attention_heads": 2**61})
    assert check(huge)[0].fix  # answered at once, whatever the numbers


SWITCHES = (
    "position_embedding_type", "rotary_base", "rope_scaling", "normalization", "layernorm_epsilon", "activation_func",
    "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "share_embeddings_and_output_weights",
    "attention_dropout", "hidden_dropout", "init_method", "init_method_std",
)  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_a_rehearsal_keeps_every_switch_and_is_small(name: str) -> None:
    recipe = load(name).recipe
    small = proxy(recipe)
    for switch in SWITCHES:
        assert getattr(small.model, switch) == getattr(recipe.model, switch), switch
    assert small.optimizer == recipe.optimizer
    for switch in ("precision", "label_smoothing", "seed"):
        assert getattr(small.train, switch) == getattr(recipe.train, switch), switch
    for switch in ("recompute_granularity", "recompute_method"):
        assert getattr(small.layout, switch) == getattr(recipe.layout, switch), switch
    assert small.model.num_layers <= 6
    assert small.model.hidden_size <= 128
    assert small.model.seq_length <= 128
    assert small.model.vocab_size <= 1024
    assert small.scheduler.lr_decay_style == recipe.scheduler.lr_decay_style
    assert all(source.type != "hub" for source in small.data.sources)
    assert small.data.tokenizer.type == "bpe"


@pytest.mark.parametrize(
    ("heads", "groups", "expected"),
    [(32, 8, (8, 2)), (32, 32, (8, 8)), (32, 1, (8, 1)), (12, 4, (6, 2)), (64, 4, (8, 2)), (2, 1, (2, 1)),
     (25, None, (8, None)), (3, 3, (3, 3))],
)  # fmt: skip
def test_a_rehearsal_keeps_the_head_structure(heads: int, groups: int | None, expected: tuple[int, int | None]) -> None:
    model = {"num_attention_heads": heads, "num_query_groups": groups, "hidden_size": heads * 64}
    small = proxy(make(model=model)).model
    assert (small.num_attention_heads, small.num_query_groups) == expected


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"hidden_size": 3072, "num_attention_heads": 16, "kv_channels": 256, "ffn_hidden_size": 24576}},
        {"model": {"hidden_size": 128, "position_embedding_type": "rope", "rotary_percent": 0.0625}},
        {"model": {"max_position_embeddings": 4096, "seq_length": 4096}},
        {"model": {**YARN, "seq_length": 4098, "yarn_original_max_position_embeddings": 30},
             "layout": {"context_parallel_size": 3}},
        {"scheduler": {"lr_decay_style": "WSD", "lr_warmup_iters": 8, "lr_wsd_decay_iters": 2}},
        {"scheduler": {"lr_warmup_iters": 9, "lr_decay_iters": 10}, "train": {"train_iters": 100_000}},
        {"model": {"num_layers": 40},
         "layout": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 40}},
        {"checkpoint": {"save_interval": 7, "keep_interval": 21}},
        {"data": {"tokenizer": {"type": "huggingface", "path": "x"}}, "model": {"vocab_size": 100}},
    ],
)  # fmt: skip
def test_a_rehearsal_of_an_unusual_recipe_is_valid(sections: Any) -> None:
    recipe = make(**sections)
    assert check(recipe) == []
    small = proxy(recipe)
    assert Recipe.model_validate(small.model_dump()) == small
    assert check(small) == []


def test_a_rehearsal_divides_over_ranks_and_keeps_its_local_sources() -> None:
    small = proxy(make(data={"sources": [{"type": "text", "path": "a"}, {"type": "hub", "path": "b"}]}))
    assert [source.location for source in small.data.sources] == ["a"]
    assert small.train.global_batch_size % (4 * small.layout.micro_batch_size) == 0
    long_name = Recipe.model_validate({**make().model_dump(), "name": "a" * 63})
    assert Recipe.model_validate(proxy(long_name).model_dump()).name.endswith("-smoke")


def test_generated_pages_are_up_to_date() -> None:
    for path, text in generated(ROOT).items():
        assert path.read_text("utf-8") == text, f"{path.name} is stale: run llmrecipes docs"


def test_the_reference_has_every_key_with_a_meaning() -> None:
    page = reference()
    for key in keys().values():
        assert key.description, key.name
        source = keys().get(key.name.replace(".valid_sources.", ".sources."), key)
        of_sources = source is not key and source.description == key.description
        if not key.section:
            mark = " \\*" if half_of(key.name) is EXECUTION else ""
            assert (f"| `{key.name}`{mark} |" in page) != of_sources
    assert "| `data.valid_sources.N.label` |" in page, "its own text, not that of its base class"
    assert "| integer > 0 |" in page and "integer > 0 or null | `null`" not in page
    assert '"additionalProperties": false' in json_schema()


@pytest.mark.parametrize(
    "url",
    ["/mnt/runs", "runs", "https://example.org/runs", "hf://me/runs", "s3://me:very-secret@bucket/runs",
     "s3://bucket/runs?X-Amz-Signature=very-secret", "s3://bucket/runs#x", ""],
)  # fmt: skip
def test_checkpoints_are_copied_to_stores_that_can_be_written_and_without_credentials(url: str) -> None:
    with refused("checkpoint.copy_to", rule="s3://") as caught:
        load("gpt-tiny", [f"checkpoint.copy_to='{url}'"])
    assert "very-secret" not in str(caught.value)
    assert load("gpt-tiny", ["checkpoint.copy_to=s3://bucket/a b"]).recipe.checkpoint.copy_to == "s3://bucket/a b"


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("optimizer.qk_clip_alpha", 0.3, "qk_clip"),
        ("scheduler.lr_warmup_init", 1e-4, "lr_warmup_iters"),
        ("checkpoint.also_export_interval", 160, "also_export"),
        ("data.sources", "[{type: jsonl, path: a, label_value: de}]", "label_key"),
        ("data.steps", "[{type: length, max_characters: 9}, {type: duplicates, min_words: 9}]", "cut_spans"),
    ],
)
def test_a_key_that_is_only_used_with_another_one_is_refused_without_it(key: str, value: object, other: str) -> None:
    place = {"data.steps": "data.steps.1.min_words", "data.sources": "data.sources.0.label_value"}.get(key, key)
    with refused(place, rule=other) as caught:
        load("gpt-tiny", ["scheduler.lr_warmup_iters=0", f"{key}={value}"])
    assert has_token(caught.value.fix, f"{place.rpartition('.')[0]}.{other}")


@pytest.mark.parametrize(
    ("section", "values", "key", "types"),
    [
        ("sources", "[{type: stdlib, path: x}]", "0.path", "text jsonl parquet hub megatron"),
        ("sources", "[{type: docstrings, path: x}]", "0.path", "text jsonl parquet hub megatron"),
        ("sources", "[{type: text, path: x, name: y}]", "0.name", "hub"),
        ("sources", "[{type: text, path: x, text_key: y}]", "0.text_key", "jsonl parquet hub"),
        ("sources", "[{type: megatron, path: x, text_key: y}]", "0.text_key", "jsonl parquet hub"),
        ("sources", "[{type: megatron, path: x, fim_rate: 0.5}]", "0.fim_rate", "stdlib machine text jsonl"),
        ("sources", "[{type: megatron, path: x, label_key: a}]", "0.label_key", "jsonl parquet hub"),
        ("valid_sources", "[{type: text, path: x, label: a, split: b}]", "0.split", "hub"),
        ("tokenizer", "{path: gpt2}", "path", "huggingface"),
        ("tokenizer", "{type: bpe, add_bos_token: true}", "add_bos_token", "huggingface"),
        ("tokenizer", "{type: huggingface, path: x, pattern: llama3}", "pattern", "bpe"),
        ("steps", "[{type: html, languages: [en]}]", "0.languages", "language"),
    ],
)  # fmt: skip
def test_a_key_of_another_type_is_refused_with_the_types_that_have_it(
    section: str, values: str, key: str, types: str
) -> None:
    with refused(f"data.{section}.{key}") as caught:
        load("gpt-tiny", [f"data.{section}={values}"])
    error = (*caught.value.parts, caught.value)[0]
    having = error.rule.partition(";")[0]
    assert all(has_token(having, kind) for kind in types.split())
    # A type to change to is named where only one has the key.
    assert has_token(error.fix, types) == (" " not in types)


@pytest.mark.parametrize(
    ("section", "values", "key", "fix"),
    [
        ("sources", "[{type: text}]", "0.path", ""),
        ("sources", "[{type: hub, path: ''}]", "0.path", ""),
        ("tokenizer", "{type: huggingface}", "path", ""),
        ("steps", "[{typ: html}]", "0.typ", "data.steps.0.type"),
        ("steps", "[{type: length, min_charactres: 3}]", "0.min_charactres", "data.steps.0.min_characters"),
        ("steps", "[{type: c4, min_sentence: 3}]", "0.min_sentence", "data.steps.0.min_sentences"),
        ("sources", "[{type: jsonl, pth: a}]", "0.pth", "data.sources.0.path"),
    ],
)
def test_a_missing_or_misspelt_key_of_a_type_is_named(section: str, values: str, key: str, fix: str) -> None:
    with refused(f"data.{section}.{key}") as caught:
        load("gpt-tiny", [f"data.{section}={values}"])
    assert fix in caught.value.fix


def test_a_recorded_section_has_the_keys_of_all_types() -> None:
    """As recorded before each type had only its own keys, so that hashes stay the same and old files are read."""
    data = Recipe.model_validate(load("gpt-tiny").recipe.model_dump(mode="json")).data
    assert data.sources[0].model_dump() == {
        "type": "stdlib", "path": None, "name": None, "split": None, "revision": None, "text_key": "text",
        "label_key": None, "label_value": None, "label": None, "weight": 1.0, "max_tokens": None, "fim_rate": 0.0,
    }  # fmt: skip
    assert data.tokenizer.model_dump() == {
        "type": "bpe", "path": None, "revision": None, "pattern": "words", "add_bos_token": None,
    }  # fmt: skip


def test_the_other_key_is_one_of_the_same_section() -> None:
    found = {(section, other.key) for section in sections(Section) for other in declared(section, OnlyWith).values()}
    assert len(found) >= 6 and all(other in section.model_fields for section, other in found)


def sections(above: type[Section]) -> Iterator[type[Section]]:
    for section in above.__subclasses__():
        yield section
        yield from sections(section)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("model.n_layers", "model.num_layers"), ("micro_batch_size", "layout.micro_batch_size"),
        ("optimizer.weight_deca", "optimizer.weight_decay"), ("train.lr_warmup_iters", "scheduler.lr_warmup_iters"),
        ("data.sources.3.pth", "data.sources.3.path"), ("zzzzqqq", ""),
    ],
)  # fmt: skip
def test_the_nearest_key(wrong: str, right: str) -> None:
    assert "".join(hint(wrong).keys) == right
