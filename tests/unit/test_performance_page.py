"""The table of docs/guide/performance.md, against the recipe's keys and megatron-core's classes."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig

from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.speedups.features import FEATURES, key_of
from tests.helpers import ROOT

ROW = re.compile(r"^\| `([A-Za-z]+|initialize_model_parallel)\.(\w+)` \| (?:`([\w.]+)`|none) \|", re.MULTILINE)
PAGE = (ROOT / "docs/guide/performance.md").read_text("utf-8")
ROWS = [(f"{owner}.{field}", key or None) for owner, field, key in ROW.findall(PAGE)]


def known() -> set[str]:
    owners = {
        "TransformerConfig": {field.name for field in fields(MLATransformerConfig)},
        "DistributedDataParallelConfig": {field.name for field in fields(DistributedDataParallelConfig)},
        "OptimizerConfig": {field.name for field in fields(OptimizerConfig)},
        "initialize_model_parallel": set(inspect.signature(initialize_model_parallel).parameters),
    }
    return {f"{owner}.{name}" for owner, names in owners.items() for name in names}


def test_every_row_is_a_field_of_megatron_core() -> None:
    assert len(ROWS) > 40 and len(dict(ROWS)) == len(ROWS)
    assert {field for field, _ in ROWS} <= known()


def test_what_the_page_calls_reachable_is_a_key() -> None:
    ours = keys()
    assert not [key for _, key in ROWS if key is not None and key not in ours]


def test_what_the_page_calls_unreachable_has_no_key() -> None:
    names = {name.rpartition(".")[2] for name in keys()}
    set_by_features = {feature.field for feature in FEATURES.values()}
    for field, key in ROWS:
        if key is None:
            assert field.partition(".")[2] not in names, field
            assert field not in set_by_features, field


def test_the_page_has_every_feature() -> None:
    table = dict(ROWS)
    for name, feature in FEATURES.items():
        if feature.field:
            assert table[feature.field] == key_of(name)
        else:
            assert f"`{key_of(name)}`" in PAGE
