"""The halves of a recipe: which keys are of which, and what depends on the learned one only."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from llmrecipes.checkpoint.compatibility import FREE, compatibility
from llmrecipes.nested import leaves
from llmrecipes.recipe.halves import half_of, halves, learned, learned_half
from llmrecipes.recipe.load import executed, load, recipe_hash
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.sections.section import EXECUTION, LEARNED

APART = ("layout.overlap_grad_reduce=false", "layout.overlap_param_gather=false")
OTHERWISE = (
    *APART,
    "layout.engine=deepspeed", "layout.zero.stage=2", "layout.zero.overlap_comm=true", "layout.micro_batch_size=1",
    "train.log_interval=7",
    "layout.recompute_granularity=full", "layout.recompute_method=uniform", "layout.recompute_num_layers=1",
    "data.num_workers=0", "checkpoint.save_interval=500", "tracking.mlflow=false", "description=other",
)  # fmt: skip


def plain(*overrides: str, recipe: str = "gpt-1b") -> dict[str, Any]:
    return load(recipe, list(overrides)).recipe.model_dump(mode="json")


def test_every_key_has_a_half() -> None:
    assert halves().keys() == {name for name in keys() if not name.endswith(".N")}


def test_a_recipe_is_the_same_however_it_is_executed() -> None:
    base = load("gpt-1b").recipe
    assert learned_half(load("gpt-1b", list(OTHERWISE)).recipe) == learned_half(base)
    assert learned_half(load("gpt-1b", ["train.seed=7"]).recipe) != learned_half(base)
    assert recipe_hash(load("gpt-1b", list(OTHERWISE)).recipe) == recipe_hash(base)
    assert recipe_hash(load("gpt-1b", ["train.seed=7"]).recipe) != recipe_hash(base)
    assert learned_half(base)["model"]["num_layers"] == base.model.num_layers


def test_how_steps_are_computed_is_what_differs_from_the_defaults() -> None:
    found = executed(load("gpt-1b", list(OTHERWISE)).recipe)
    expected = {
        "layout.engine": "deepspeed",
        "layout.zero.stage": 2,
        "data.num_workers": 0,
        "layout.recompute_granularity": "full",
    }
    assert expected.items() <= found.items()
    assert not {"name", "description", "tracking.mlflow", "train.seed", "model.num_layers"} & found.keys()


def test_a_value_counts_if_its_key_is_learned() -> None:
    """Whatever key changes, also one that the recipe leaves out."""
    sections = (
        *APART,
        "layout.zero.stage=3",
        "train.eval_tasks={tasks: [x], interval: 5}",
        "train.early_stop.patience=2",
    )
    base = plain(*sections)
    for name, value in leaves(base):
        if value == {}:
            continue
        changed = copy.deepcopy(base)
        *above, last = name.split(".")
        inside = changed
        for section in above:
            inside = inside[section]
        inside[last] = ["other"]
        assert (learned(changed) != learned(base)) is (half_of(name) is LEARNED), name


def test_learned_keys_of_a_section_that_may_be_absent_count_if_they_are_set() -> None:
    eval_tasks = {"layout": {"zero": {"stage": 3}}, "train": {"eval_tasks": {"interval": 5}}}
    assert learned(eval_tasks) == learned({"layout": {"zero": None}}) == learned({}) == {}


@pytest.mark.parametrize(
    ("key", "half"),
    [
        ("stages.0.layout.tensor_model_parallel_size", EXECUTION),
        ("stages.0.train.grad_reduce_in_fp32", LEARNED),
        ("stages.0.layout.micro_batch_size", EXECUTION),
        ("stages.0.train.global_batch_size", LEARNED),
        ("stages.0.name", LEARNED),
        ("distill.model.transformer_impl", EXECUTION),
        ("distill.model.num_layers", LEARNED),
        ("layout.zero.extra.prescale_gradients", EXECUTION),
        ("search.sampler.seed", EXECUTION),
        ("layout.gone_in_this_version", EXECUTION),
        ("model.gone_in_this_version", LEARNED),
        ("data.sources.11.label", EXECUTION),
        ("data.sources.11.path", LEARNED),
    ],
)
def test_the_half_of_a_key_in_lists_stages_and_other_versions(key: str, half: object) -> None:
    assert half_of(key) is half


def test_a_stage_back_at_a_default_is_learned() -> None:
    stage = {"layout": {"tensor_model_parallel_size": 2}, "train": {"grad_reduce_in_fp32": True}}
    assert learned({"stages": [stage]}) == {"stages": [{"train": {"grad_reduce_in_fp32": True}}]}


def test_what_may_change_on_resume_beyond_execution_is_learned() -> None:
    assert all(key in keys() and half_of(key) is LEARNED for key in FREE)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("layout", {"zero": {"stage": 3}}),
        ("layout", {"manual_gc": True}),
        ("faults", {"loss_spike_action": "skip"}),
        ("model", {"transformer_impl": "local", "moe_token_dispatcher_type": "allgather"}),
        ("optimizer", {"muon_tp_mode": "distributed"}),
        ("train", {"grad_reduce_in_fp32": False}),
        ("train", {"early_stop": {"patience": 3, "min_delta": 0.0}}),
    ],
)
def test_a_resumed_run_may_be_executed_otherwise(section: str, values: dict[str, Any]) -> None:
    then = plain()
    assert not compatibility({**then, section: {**(then[section] or {}), **values}}, then)


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        ("train", {"zero_quantized_weights": True}, "train.zero_quantized_weights"),
        ("train", {"fp8": "e4m3"}, "train.fp8"),
        ("train", {"monitor": "web"}, "train.monitor"),
    ],
)
def test_a_resumed_run_keeps_its_precision(section: str, values: dict[str, Any], key: str) -> None:
    then = plain()
    changed = compatibility({**then, section: {**(then[section] or {}), **values}}, then)
    assert [difference.key for difference in changed] == [key]
