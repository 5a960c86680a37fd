"""Every field of megatron-core's configurations, for each shipped recipe, layer implementation and GPU.

A default that changes here or in megatron-core is seen in review of the golden file. A field is named where it differs:
`common` has what most recipes share, a recipe what differs from that, and a variant of it the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from packaging.version import Version

from llmrecipes.engine.core.model.config import transformer_config
from llmrecipes.engine.megatron.data_parallel import data_parallel_config
from llmrecipes.engine.megatron.optimizer import optimizer_config
from llmrecipes.hardware.cluster import DetectedGpu
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.derived.degrees import least_ranks
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.reading.core_fields import core_fields
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOMY, TRANSFORMER_ENGINES

GIB = 1 << 30
IN_FP8 = ("llama3-8b", "mixtral-8x7b", "deepseek-v3")
"""Recipes whose configuration with `train.fp8` is in the golden file, too."""
RECORDED = ("llama3-8b", "mixtral-8x7b")
"""The same of CUDA graphs."""
GPUS = {"H100": (79, 989.4), "H200": (139, 989.4), "B200": (178, 2250.0)}


def value(field: Any) -> Any:
    """A field as JSON; functions by their name."""
    if field is None or isinstance(field, bool | int | float | str):
        return field
    if isinstance(field, list | tuple):
        return [value(part) for part in field]
    return getattr(field, "__name__", str(field))


def configured(recipe: Recipe, gpu: str, transformer_engine: bool) -> dict[str, Any]:
    """`Class.field` and its value."""
    memory, peak = GPUS[gpu]
    ranks = least_ranks(recipe)
    devices = (DetectedGpu(f"NVIDIA {gpu}", memory * GIB, memory * GIB, peak),) * ranks
    plan = derive_run(recipe, ranks, replace(ROOMY, gpus=devices)).largest
    parts = {
        "TransformerConfig": transformer_config(plan, on_gpu=True, transformer_engine=transformer_engine),
        "DistributedDataParallelConfig": data_parallel_config(plan),
        "OptimizerConfig": optimizer_config(recipe),
    }
    return {
        f"{kind}.{field.name}": value(getattr(part, field.name, None))
        for kind, part in parts.items()
        for field in fields(part)
    }


def shared(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The most frequent value of every field that all of them have."""
    keys = [key for key in documents[0] if all(key in document for document in documents)]
    most = {key: Counter(repr(document[key]) for document in documents).most_common(1)[0][0] for key in keys}
    return {key: next(d[key] for d in documents if repr(d[key]) == most[key]) for key in keys}


def without(document: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Fields that the base lacks or has another value of."""
    return {key: value for key, value in document.items() if key not in base or repr(base[key]) != repr(value)}


@pytest.mark.filterwarnings("ignore")
def test_every_field_of_every_recipe(golden: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # megatron-core asks whether TransformerEngine has it.
    for name in TRANSFORMER_ENGINES:
        monkeypatch.setattr(f"megatron.core.{name}", configured, raising=False)
    monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version("2.9"))
    recipes = {name: load(name, []).recipe for name in names()}
    recipes |= {f"{name}, fp8": load(name, ["train.fp8=e4m3"]).recipe for name in IN_FP8}
    recipes |= {
        f"{name}, graphs": load(name, ["layout.cuda_graph_impl=transformer_engine"]).recipe for name in RECORDED
    }
    variants = {
        name: {
            f"{gpu}, {implementation}": configured(recipe, gpu, implementation != "local")
            for gpu in GPUS
            for implementation in ("local", "transformer_engine")
        }
        for name, recipe in recipes.items()
    }
    alike = {name: shared(list(of.values())) for name, of in variants.items()}
    common = shared(list(alike.values()))
    result: dict[str, Any] = {"common": common}
    for name, of in variants.items():
        differing = {variant: without(document, alike[name]) for variant, document in of.items()}
        result[name] = without(alike[name], common) | {key: each for key, each in differing.items() if each}
    golden("configuration.json", result)


def test_the_fields_that_messages_know_are_those_of_the_core() -> None:
    classes = (
        MLATransformerConfig, TransformerConfig, ModelParallelConfig, OptimizerConfig, DistributedDataParallelConfig,
    )  # fmt: skip
    assert set(core_fields()) == {field.name for each in classes for field in fields(each)}
    assert {each.__name__ for each in classes} == set(core_fields().values())
