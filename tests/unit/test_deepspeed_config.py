"""What `deepspeed.initialize` is given for a recipe; the package itself is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.former import ADAMW
from llmrecipes.engine.deepspeed.configuration import deepspeed_config
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load
from tests.helpers import ROOMY

PLAIN = ("layout.overlap_grad_reduce=false", "layout.overlap_param_gather=false")


def config(name: str, *overrides: str, ranks: int = 2) -> dict[str, Any]:
    return deepspeed_config(derive(load(name, overrides).recipe, ranks, ROOMY))


@pytest.mark.parametrize(
    ("case", "name", "overrides"),
    [
        ("stage-1-fp32", "gpt-tiny", (*ADAMW, "layout.engine=deepspeed", "layout.zero.stage=1")),
        (
            "stage-2-fp16-offload",
            "gpt-1b",
            (
                *PLAIN, "layout.micro_batch_size=8", "layout.zero.stage=2", "layout.zero.offload_optimizer=cpu",
                "train.precision=fp16",
            ),
        ),
        (
            "stage-3-nvme",
            "gpt-1b",
            (
                *PLAIN, "layout.micro_batch_size=8", "layout.zero.stage=3", "layout.zero.offload_optimizer=nvme",
                "layout.zero.offload_param=cpu", "layout.zero.nvme_path=/local_nvme",
                "layout.zero.extra.aio.block_size=1048576", "optimizer.clip_grad=0",
            ),
        ),
    ],
)  # fmt: skip
def test_the_configuration_of_a_recipe(
    case: str, name: str, overrides: tuple[str, ...], golden: Callable[[str, Any], None]
) -> None:
    golden(f"deepspeed-{case}.json", config(name, *overrides))


def test_extra_is_merged_into_the_sections() -> None:
    base = (*ADAMW, "layout.zero.stage=2", "layout.zero.extra.comms_logger={enabled: true}")
    merged = config("gpt-tiny", *base, "layout.zero.extra.zero_optimization.contiguous_gradients=false")
    plain = config("gpt-tiny", *base)
    assert plain["comms_logger"] == {"enabled": True}
    assert merged["zero_optimization"] == {**plain["zero_optimization"], "contiguous_gradients": False}


def test_changing_the_configuration_leaves_the_recipe_alone() -> None:
    plan = derive(
        load("gpt-tiny", [*ADAMW, "layout.zero.stage=2", "layout.zero.extra.aio={block_size: 1}"]).recipe, 2, ROOMY
    )
    deepspeed_config(plan)["aio"]["block_size"] = 2
    assert deepspeed_config(plan)["aio"] == {"block_size": 1}


def test_gradients_are_accumulated_and_reduced_in_the_type_of_the_recipe() -> None:
    half = config("gpt-1b", *PLAIN, "layout.zero.stage=2", "train.grad_reduce_in_fp32=false")
    assert half["communication_data_type"] == "bf16"
    assert "data_types" not in half
    full = config("gpt-1b", *PLAIN, "layout.zero.stage=2")
    assert full["communication_data_type"] == full["data_types"]["grad_accum_dtype"] == "fp32"


def test_gradients_go_to_their_owner_alone_where_ranks_are_few() -> None:
    def all_reduced(ranks: int, *overrides: str) -> bool:
        given = config("gpt-1b", *PLAIN, "layout.zero.stage=2", "train.global_batch_size=1024", *overrides, ranks=ranks)
        return bool(given["zero_optimization"]["use_multi_rank_bucket_allreduce"])

    assert not all_reduced(2)
    assert not all_reduced(64)
    assert all_reduced(128)
    assert all_reduced(2, "layout.zero.extra.zero_optimization.use_multi_rank_bucket_allreduce=true")
