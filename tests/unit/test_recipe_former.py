"""Recipes in the form of version 0.1.0: read as today's, once, with a note."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.checkpoint.manifest import Manifest
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.recipe.reading.former import current, translated
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.schema import Recipe
from tests.refusals import refused

OLD = """\
name: old
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64, vocab_size: 512}
parallelism: {tensor_model_parallel_size: 2, grad_reduce_in_fp32: false}
train:
  train_iters: 10
  micro_batch_size: 2
  global_batch_size: 8
  recompute_granularity: selective
optimizer: {lr: 1e-3}
speed: {manual_gc: true, reduce_scatter_with_fp32_accumulation: true}
zero: {stage: 3, sub_group_size: 1000, zero_quantized_weights: true}
engine: deepspeed
search:
  space:
    - {key: train.micro_batch_size, choices: [1, 2]}
stages:
  - name: one
    train_iters: 5
    train: {micro_batch_size: 1, global_batch_size: 4}
    parallelism: {sequence_parallel: true}
  - {name: two, speed: {manual_gc: null}}
"""
NEW = {
    "name": "old",
    "train": {
        "train_iters": 10, "global_batch_size": 8, "grad_reduce_in_fp32": False,
        "reduce_scatter_with_fp32_accumulation": True, "zero_quantized_weights": True,
    },
    "layout": {
        "name": None, "engine": "deepspeed", "tensor_model_parallel_size": 2, "micro_batch_size": 2,
        "recompute_granularity": "selective", "manual_gc": True, "zero": {"stage": 3, "sub_group_size": 1000},
    },
    "search": {"space": [{"key": "layout.micro_batch_size", "choices": [1, 2]}]},
    "stages": [
        {
            "name": "one", "train_iters": 5, "train": {"global_batch_size": 4},
            "layout": {"micro_batch_size": 1, "sequence_parallel": True},
        },
        {"name": "two", "layout": {"manual_gc": None}},
    ],
}  # fmt: skip


def parsed(text: str) -> dict[str, Any]:
    from llmrecipes.recipe import document

    return dict(document.parse(text).data)


def test_each_key_is_where_it_is_today() -> None:
    found = translated(parsed(OLD))
    assert {name: found[name] for name in NEW} == NEW
    assert not {"parallelism", "speed", "zero", "engine"} & found.keys()
    assert translated(found) == found


def test_a_recipe_of_today_is_as_it_was() -> None:
    recipe = load("gpt-1b").recipe.model_dump(mode="json")
    assert translated(recipe) == recipe


def test_a_file_is_read_with_a_note_and_errors_have_its_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old.yaml"
    plain = OLD.split("speed:")[0]
    path.write_text(plain, "utf-8")
    with caplog.at_level(logging.WARNING):
        loaded = load(str(path))
    assert loaded.recipe.layout.tensor_model_parallel_size == 2
    assert loaded.recipe.layout.name is None, "nothing was chosen for the machine"
    assert caplog.text.count("keys of layout now") == 1
    assert loaded.where("layout.micro_batch_size") == f"{path}:6"
    path.write_text(plain.replace("micro_batch_size: 2", "micro_batch_size: two"), "utf-8")
    with refused(f"{path}:6: layout.micro_batch_size"):
        load(str(path))


def test_a_recorded_recipe_is_read_without_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(OLD.split("speed:")[0], "utf-8")
    load(str(path))
    assert not caplog.text
    path.write_text(to_yaml(load(str(path)).recipe), "utf-8")
    assert load(str(path)).recipe.layout.tensor_model_parallel_size == 2


def test_a_key_in_both_forms_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(OLD.split("speed:")[0] + "layout: {tensor_model_parallel_size: 4}\n", "utf-8")
    with refused("parallelism"):
        load(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "train: 5\nspeed: {fp8: e4m3}",
        "zero: {stage: 3}\nlayout: {zero: 1}",
        "parallelism: 5",
        "zero: []",
        "stages: [5]",
    ],
)
def test_values_that_are_no_sections_are_left_to_the_schema(text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(f"name: old\n{text}\n", "utf-8")
    with refused(str(path)):
        load(str(path))


def test_an_override_in_the_former_form_is_read_as_todays(caplog: pytest.LogCaptureFixture) -> None:
    recipe = load("gpt-1b", ["parallelism.tensor_model_parallel_size=2", "train.micro_batch_size=4"]).recipe
    assert (recipe.layout.tensor_model_parallel_size, recipe.layout.micro_batch_size) == (2, 4)
    assert "is layout.tensor_model_parallel_size now" in caplog.text


def test_a_whole_section_of_the_former_form_is_answered_with_todays() -> None:
    with refused("parallelism", rule="fp8"):
        load("gpt-1b", ["parallelism={tensor_model_parallel_size: 2}"])


def test_a_checkpoints_recipe_is_todays() -> None:
    values = {
        "step": 1, "consumed_samples": 8, "consumed_tokens": 8, "layout": {}, "recipe_hash": "", "created": "",
        "versions": {}, "files": {"a": {"size": 1, "sha256": "0" * 64}}, "recipe": parsed(OLD.split("search:")[0]),
    }  # fmt: skip
    recipe = Manifest.model_validate_json(json.dumps(values)).recipe
    assert recipe is not None
    assert Recipe.model_validate(recipe).layout.micro_batch_size == 2


def test_every_key_that_moved_has_a_place() -> None:
    for key in ("parallelism.context_parallel_size", "speed.fp8", "zero.extra", "train.loss_chunk_tokens", "engine"):
        assert current(key) in keys()
    assert current("train.seed") == "train.seed"
