"""Where the plan puts things, against megatron-core's own groups and layers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.placement import Placement, groups, place
from llmrecipes.recipe.load import load
from tests.dist.worlds import GlooWorld
from tests.refusals import require_message

SMALL = "layout.micro_batch_size=2"
LAYOUTS = [
    ("gpt-tiny-3d", 8, ()),
    ("gpt-tiny-3d", 8, ("layout.context_parallel_size=2",)),
    ("gpt-tiny", 8, ("layout.pipeline_model_parallel_size=2", "layout.context_parallel_size=2")),
    ("gpt-tiny", 4, ("layout.pipeline_model_parallel_size=2",
                     "layout.virtual_pipeline_model_parallel_size=2", "model.num_layers=4", SMALL)),
    ("gpt-tiny", 2, ("layout.pipeline_model_parallel_size=2",
                     "layout.num_layers_in_first_pipeline_stage=1")),
    ("moe-tiny", 4, (SMALL,)),
    ("moe-tiny", 8, ("layout.pipeline_model_parallel_size=2", "layout.tensor_model_parallel_size=2",
                     "layout.sequence_parallel=true", "layout.expert_tensor_parallel_size=1")),
    ("moe-tiny", 8, ("layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true",
                     "layout.expert_tensor_parallel_size=2", "layout.context_parallel_size=2")),
    ("deepseek-v3", 1024, ()),
]  # fmt: skip
IDS = [" ".join([name, str(ranks), *(text.split(".")[1] for text in changes)]) for name, ranks, changes in LAYOUTS]


def placed(name: str, ranks: int, changes: tuple[str, ...]) -> tuple[Layout, tuple[Placement, ...]]:
    return place(load(name, list(changes)).recipe, ranks)


def measure() -> list[dict[str, Any]]:
    """megatron-core's groups, and the layers of its stages, for each of LAYOUTS: job of a rank without a group."""
    import torch
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from llmrecipes.engine.core.world import RANK_ORDER

    found: list[dict[str, Any]] = []
    for name, ranks, changes in LAYOUTS:
        laid_out, _ = placed(name, ranks, changes)
        recipe = load(name, list(changes)).recipe
        tensor, stages = laid_out.tensor_model_parallel_size, laid_out.pipeline_model_parallel_size
        dense = RankGenerator(
            tp=tensor, ep=1, dp=laid_out.data_parallel_size, pp=stages, cp=laid_out.context_parallel_size,
            order=RANK_ORDER,
        )  # fmt: skip
        experts = RankGenerator(
            tp=laid_out.expert_tensor_parallel_size, ep=laid_out.expert_model_parallel_size,
            dp=laid_out.expert_data_parallel_size, pp=stages, cp=1, order=RANK_ORDER,
        )  # fmt: skip
        theirs = {token: dense.get_ranks(token) for token in ("tp", "cp", "dp", "dp-cp", "pp")}
        theirs |= {"ep": experts.get_ranks("ep")}
        theirs |= {f"expert_{token}": experts.get_ranks(token) for token in ("tp", "dp")}
        parallel = recipe.layout
        chunks = parallel.virtual_pipeline_model_parallel_size
        written = parallel.pipeline_model_parallel_layout
        if written:
            found.append({"groups": theirs, "layers": None})  # megatron-core knows those of its own rank only
            continue
        config = TransformerConfig(
            num_layers=recipe.model.num_layers, hidden_size=64, num_attention_heads=4,
            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks,
            num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
            pipeline_dtype=torch.float32,
        )  # fmt: skip
        layers = [
            [
                [get_transformer_layer_offset(config, chunk, stage), get_num_layers_to_build(config, chunk, stage)]
                for chunk in (range(chunks) if chunks else (None,))
            ]
            for stage in range(stages)
        ]
        found.append({"groups": theirs, "layers": layers})
    return found


@pytest.fixture(scope="module")
def theirs(worlds: dict[int, GlooWorld]) -> list[Any]:
    found: list[Any] = worlds[1].start(measure, group=False).result()
    return found


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=IDS)
def test_groups_and_layers_are_megatron_cores(number: int, theirs: list[Any]) -> None:
    laid_out, ranks = placed(*LAYOUTS[number])
    for name, expected in theirs[number]["groups"].items():
        assert groups(laid_out)[name] == sorted(tuple(group) for group in expected), name
    for share in ranks if theirs[number]["layers"] else ():
        expected = [(first, first + size) for first, size in theirs[number]["layers"][share.stage]]
        assert list(share.layers) == expected


@pytest.mark.parametrize("case", LAYOUTS, ids=IDS)
def test_everything_is_held_exactly_once_by_a_replica(case: tuple[str, int, tuple[str, ...]]) -> None:
    recipe = load(case[0], list(case[2])).recipe
    laid_out, ranks = placed(*case)
    stages, tensor = laid_out.pipeline_model_parallel_size, laid_out.tensor_model_parallel_size
    column = [share for share in ranks if share.tensor == share.context == share.data == 0]
    assert covered(part for share in column for part in share.layers) == list(range(recipe.model.num_layers))
    tensor_group = ranks[:tensor]
    assert covered(share.query_heads for share in tensor_group) == list(range(recipe.model.num_attention_heads))
    assert covered(share.vocabulary for share in tensor_group)[-1] + 1 == -(-recipe.model.vocab_size // 128) * 128
    context_group = [share for share in ranks if share.tensor == share.data == share.stage == 0]
    assert covered(part for share in context_group for part in share.tokens) == list(range(recipe.model.seq_length))
    if laid_out.sequence_parallel:
        sharing = [share for share in ranks if share.data == share.stage == 0]
        parts = [part for share in sharing for part in share.residual_tokens]
        assert covered(parts) == list(range(recipe.model.seq_length))
    data_group = [share for share in ranks if share.tensor == share.context == share.stage == 0]
    batch = list(range(recipe.train.global_batch_size))
    assert covered(part for share in data_group for part in share.sequences) == batch
    if recipe.model.num_moe_experts:
        of_one = [share for share in ranks if share.expert_tensor == share.expert_data == share.stage == 0]
        assert covered(share.experts for share in of_one) == list(range(recipe.model.num_moe_experts))
    assert {share.stage for share in ranks if share.has_output} == {stages - 1}


def covered(parts: Any) -> list[int]:
    """All numbers of some ranges, in order; none may be there twice."""
    numbers = sorted(number for first, last in parts for number in range(first, last))
    assert len(set(numbers)) == len(numbers)
    return numbers


def test_context_parallel_ranks_have_an_early_and_a_late_chunk() -> None:
    _, ranks = placed("gpt-tiny-3d", 8, ("layout.context_parallel_size=2",))
    # 256 tokens in 4 chunks of 64; the residual stream of a rank's 128 tokens is on two tensor-parallel ranks.
    assert ranks[0].tokens == ranks[1].tokens == ((0, 64), (192, 256))
    assert ranks[2].tokens == ((64, 128), (128, 192))
    assert [share.residual_tokens for share in ranks[:4]] == [((0, 64),), ((192, 256),), ((64, 128),), ((128, 192),)]


def test_the_command_shows_what_differs_between_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "gpt-tiny-3d", "--placement", "--nproc", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[:3] == ["rank", "stage", "layers"]
    assert lines[6].split()[:4] == ["5", "1", "2-3", "2048-4095"]
    assert "every rank: tokens 0-255" in lines
    assert "tensor-parallel: (0 1) (2 3) (4 5) (6 7)" in lines
    assert "pipeline-parallel: (0 4) (1 5) (2 6) (3 7)" in lines
    assert cli.run(["plan", "gpt-tiny-3d", "--placement", "--nproc", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["data_parallel_size"] == 2
    assert found["ranks"][5]["query_heads"] == [2, 4]


def test_the_command_shows_one_slice_of_a_large_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "deepseek-v3", "--placement", "--nproc", "1024"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    assert lines[-1] == "16 of 1024 ranks are shown: data-parallel slice 0 of 64; --json has all"


def test_the_command_refuses_ranks_that_the_layout_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "gpt-tiny-3d", "--placement", "--nproc", "6"]) == 2
    require_message(capsys.readouterr().err, "layout", rule="6")
