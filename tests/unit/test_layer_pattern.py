"""`model.hybrid_layer_pattern` is short for other keys: a recipe with it is the recipe with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from llmrecipes.recipe.derived import layer_pattern
from llmrecipes.recipe.document import parse
from llmrecipes.recipe.load import Loaded, load_values, short, to_yaml
from llmrecipes.recipe.reading.keys import json_schema
from tests.helpers import MODEL, TRAIN
from tests.refusals import refused

MIXTURE = {"num_moe_experts": 4, "add_bias_linear": False}
PREDICTING = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
TWO = {"pipeline_model_parallel_size": 2}
CHUNKS = {**TWO, "virtual_pipeline_model_parallel_size": 2}
ONE = {"hybrid_layer_pattern": "*-"}
LAYOUT = "pipeline_model_parallel_layout"


def values(model: dict[str, Any], parallelism: dict[str, Any] | None = None) -> dict[str, Any]:
    """A recipe of these keys, without a number of layers of its own."""
    section = {key: value for key, value in MODEL.items() if key != "num_layers"} | model
    rest = {"train": TRAIN, "optimizer": {"lr": 1e-3}, "layout": parallelism or {}}
    return {"name": "tiny", "model": section, **rest}


def read(model: dict[str, Any], parallelism: dict[str, Any] | None = None, *overrides: str) -> Loaded:
    return load_values(values(model, parallelism), Path("tiny.yaml"), overrides)


@pytest.mark.parametrize(
    ("pattern", "beside", "degrees", "model", "parallelism"),
    [
        ("*-*-*-", {}, {}, {"num_layers": 3}, {}),
        ("*-*-*-", {"num_layers": 3}, {}, {"num_layers": 3}, {}),
        ("*E*E", MIXTURE, {}, {"num_layers": 2}, {}),
        ("*-*E*-", MIXTURE, {}, {"num_layers": 3, "moe_layer_freq": [0, 1, 0]}, {}),
        ("*E*-*E*-", {**MIXTURE, "moe_layer_freq": 2}, {}, {"num_layers": 4, "moe_layer_freq": 2}, {}),
        ("+-+-", {"position_embedding_type": "rope"}, {}, {"num_layers": 2, "multi_latent_attention": True}, {}),
        ("*-*-", {}, TWO, {"num_layers": 2}, TWO),
        ("*-*-|*-*-", {}, {}, {"num_layers": 4}, TWO),
        ("*-|*E*E", MIXTURE, TWO, {"num_layers": 3, "moe_layer_freq": [0, 1, 1]}, {**TWO, LAYOUT: "Et|ttL"}),
        ("*-|*-|*-|*-", {}, TWO, {"num_layers": 4}, CHUNKS),
        ("*-*-|*-|*-|*-", {}, TWO, {"num_layers": 5}, {**CHUNKS, LAYOUT: "Ett|t|t|tL"}),
        ("*-*-|*-/*-/*-", PREDICTING, TWO, {"num_layers": 3, "mtp_num_layers": 2}, {**TWO, LAYOUT: "Ett|tmmL"}),
        (
            "*-|*-*-*-", {}, {**TWO, "num_layers_in_first_pipeline_stage": 1},
            {"num_layers": 4}, {**TWO, "num_layers_in_first_pipeline_stage": 1},
        ),
    ],
)  # fmt: skip
def test_a_recipe_by_pattern_is_the_one_by_keys(
    pattern: str, beside: dict[str, Any], degrees: dict[str, Any], model: dict[str, Any], parallelism: dict[str, Any]
) -> None:
    by_pattern = read({**beside, "hybrid_layer_pattern": pattern}, degrees)
    by_keys = read({**beside, **model}, parallelism)
    assert by_pattern.recipe == by_keys.recipe
    assert by_pattern.hash == by_keys.hash
    assert to_yaml(by_pattern.recipe) == to_yaml(by_keys.recipe)
    assert short(by_pattern.recipe) == short(by_keys.recipe)
    made = layer_pattern.layer_pattern(by_pattern.recipe)  # what megatron-core gets
    assert pattern in (made, made.replace("|", ""))


@pytest.mark.parametrize(
    ("pattern", "model", "parallelism", "rule"),
    [
        ("*-M-", {}, {}, "M"),
        ("*-G-", {}, {}, "G"),
        ("D-*-", {}, {}, "D"),
        ("*-*", {}, {}, "*-*"),
        ("-*", {}, {}, "-*"),
        ("*|-", {}, {}, "*|-"),
        ("*-+-", {}, {}, "*-+-"),
        ("", {}, {}, "*"),
        ("|", {}, {}, "|"),
        ("*-*E/*-", {**MIXTURE, **PREDICTING}, {}, "*E"),
        ("*-*-/", PREDICTING, {}, "*-"),
        ("*-/*|-", PREDICTING, {}, "*-"),
        ("*-*E", {}, {}, "num_moe_experts"),
        ("*-*-", MIXTURE, {}, "num_moe_experts"),
        ("*-|*-|*-", {}, TWO, "pipeline_model_parallel_size"),
        ("*-*-", {"num_layers": 3}, {}, "num_layers"),
        ("*E*-", {**MIXTURE, "moe_layer_freq": [0, 1]}, {}, "moe_layer_freq"),
        ("*-*-", {"multi_latent_attention": True, "position_embedding_type": "rope"}, {}, "multi_latent_attention"),
        ("*-*-", {**PREDICTING, "mtp_num_layers": 1}, {}, "mtp_num_layers"),
        ("*-|*-*-*-", {}, {**TWO, "num_layers_in_first_pipeline_stage": 2}, "*-*-|*-*-"),
        ("*-|*-*-*-", {}, {**TWO, LAYOUT: "Ett|ttL"}, "*-*-|*-*-"),
    ],
)  # fmt: skip
def test_other_patterns_and_contradictions_are_refused(
    pattern: str, model: dict[str, Any], parallelism: dict[str, Any], rule: str
) -> None:
    with refused(layer_pattern.KEY, rule=rule):
        read({**model, "hybrid_layer_pattern": pattern}, parallelism)


def test_a_pattern_that_is_refused_is_all_that_is_said_of_the_layers() -> None:
    with refused(layer_pattern.KEY) as caught:
        read({"hybrid_layer_pattern": "M*", "vocab_size": "many"})
    assert [part.where.rpartition(": ")[2] for part in caught.value.parts] == [layer_pattern.KEY, "model.vocab_size"]


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"stages": [{"name": "a", "train_iters": 1}, {"name": "b", "model": ONE}]}, "stages.1.model"),
        ({"distill": {"teacher": "runs/a/b", "model": ONE}}, "distill.model"),
    ],
)  # fmt: skip
def test_sections_that_change_keys_have_no_pattern(section: dict[str, Any], where: str) -> None:
    with refused(f"{where}.hybrid_layer_pattern"):
        load_values({**values({"num_layers": 2}), **section}, Path("tiny.yaml"))


def test_a_pattern_on_a_command_line_is_quoted() -> None:
    with refused("model.hybrid_layer_pattern=*-*-", rule="*"):
        read({"num_layers": 2}, {}, "model.hybrid_layer_pattern=*-*-")
    assert read({"num_layers": 2}, {}, 'model.hybrid_layer_pattern="*-*-"').recipe.model.num_layers == 2


def test_symbols_and_schema_are_those_of_megatron_core_and_the_recipe() -> None:
    import jsonschema  # takes a second, and every process of a test run imports this module

    ours = (layer_pattern.ATTENTION, layer_pattern.LATENT, layer_pattern.MLP, layer_pattern.EXPERTS)
    assert ours == (Symbols.ATTENTION, Symbols.MLA, Symbols.MLP, Symbols.MOE)
    assert (layer_pattern.CUT, layer_pattern.PREDICTION) == (Symbols.PIPE, Symbols.MTP_SEPARATOR)
    schema = parse(json_schema()).data
    for model, valid in (({"num_layers": 2}, True), ({"hybrid_layer_pattern": "*-"}, True), ({}, False)):
        assert jsonschema.Draft202012Validator(schema).is_valid(values(model)) is valid
