"""Numbers of ranks that `train.elastic` allows: which they are, what is refused, and what a restart takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.launch.ranks import Node
from llmrecipes.launch.rendezvous import TOKEN
from llmrecipes.plan.derive import default_world_size
from llmrecipes.recipe.derived.degrees import elastic_worlds
from llmrecipes.recipe.load import load
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.workflow.run import Paths, TrainOptions, plan_run
from llmrecipes.workflow.train import elastic_size, train
from tests.helpers import ROOMY, tiny
from tests.refusals import refused

GIB = 1 << 30
GPU = DetectedGpu("H100 80GB", 79 * GIB, 79 * GIB, 989.4)
NODE = Cluster(
    gpus=(GPU,) * 8, cpu_cores=64, memory_bytes=512 * GIB, memory_available_bytes=500 * GIB, disk_free_bytes=1 << 45
)


def elastic(least: int, most: int, **sections: dict[str, Any]) -> Any:
    train = {"elastic": [least, most], "global_batch_size": 24, **sections.pop("train", {})}
    return tiny("elastic", train=train, **sections)


@pytest.mark.parametrize(
    ("recipe", "worlds"),
    [
        (elastic(1, 8), (1, 2, 3, 4, 6)),
        (elastic(4, 100), (4, 6, 12)),
        (elastic(1, 4, layout={"tensor_model_parallel_size": 2}), (2, 4, 6, 8)),
        # Virtual stages take micro-batches in groups of one for each stage.
        (
            elastic(
                1,
                4,
                model={"num_layers": 4},
                layout={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            ),
            (2, 4, 6),
        ),
    ],
)
def test_the_batch_divides_over_every_allowed_number(recipe: Any, worlds: tuple[int, ...]) -> None:
    assert elastic_worlds(recipe) == worlds
    for ranks in worlds:
        assert plan_run(recipe, ROOMY, ranks).world_size == ranks


@pytest.mark.parametrize(
    ("value", "rule"),
    [("[3,1]", "[1, 3]"), ("[3,3]", ("global_batch_size", "1 or 2")), ("[0,2]", ()), ("2", ())],
)
def test_ranges_without_a_number_are_refused(value: str, rule: Any) -> None:
    with refused("train.elastic", rule=rule):
        load("gpt-tiny", [f"train.elastic={value}"])


def test_the_message_of_a_single_number_names_the_type_once() -> None:
    takes = keys()["train.elastic"].takes
    assert takes.count("integer") == 1
    assert "2" in takes


@pytest.mark.parametrize(("ranks", "near"), [(5, "4 or 6 ranks"), (12, "6 ranks")])
def test_a_start_on_another_number_is_refused_with_the_nearest(ranks: int, near: str) -> None:
    with refused("train.elastic", rule=(f"{ranks} ranks", near)):
        plan_run(elastic(2, 8), ROOMY, ranks)


@pytest.mark.parametrize(
    ("override", "options", "where", "rule"),
    [
        ("train.elastic=null", {}, "--min-nodes", "train.elastic"),
        ("train.elastic=[1,2]", {"min_nodes": 2, "nproc": 8}, "--min-nodes", "4 ranks"),
        ("train.elastic=[1,2]", {"node": None}, "--min-nodes", "--nnodes"),
        ("train.elastic=[1,2]", {"node": Node(0, 2, "127.0.0.1", 65535)}, "--rdzv", "--min-nodes"),
        ("train.elastic=[1,2]", {}, TOKEN, ()),
    ],
)
def test_a_start_with_those_nodes_that_come_is_refused(
    override: str, options: dict[str, Any], where: str, rule: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    wanted = {"node": Node(0, 2, "127.0.0.1", 29500), "run_id": "mine", "nproc": 2, "min_nodes": 1, **options}
    with refused(where, rule=rule):
        train(load("gpt-tiny", [override]).recipe, Paths(tmp_path, tmp_path), TrainOptions(**wanted), print)
    assert not list(tmp_path.iterdir())


def test_what_would_not_fit_fewer_ranks_is_refused_before_the_run_starts() -> None:
    """Eight ranks share the optimizer state of seven billion parameters and fit GPUs of 60 GiB; four do not."""
    node = replace(NODE, gpus=(DetectedGpu("H100 60GB", 60 * GIB, 60 * GIB, 989.4),) * 8)
    plain = "layout.recompute_granularity=null"
    assert plan_run(load("gpt-7b", [plain, "train.elastic=[4,4]"]).recipe, node, 8).fits
    with refused("train.elastic", rule=("allows 4 ranks", "elastic [4, 4]")):
        plan_run(load("gpt-7b", [plain, "train.elastic=[1,4]"]).recipe, node, 8)


def test_a_start_takes_as_many_as_there_are() -> None:
    recipe = elastic(2, 8)
    assert [default_world_size(recipe, replace(NODE, gpus=(GPU,) * gpus)) for gpus in (8, 5, 2, 1)] == [6, 4, 2, 2]
    assert default_world_size(recipe, ROOMY) == 2


def test_a_restart_takes_fewer_where_gpus_are_gone_or_two_ends_saved_nothing() -> None:
    recipe = elastic(1, 8)
    assert elastic_size(recipe, None, [(6, 0)]) == 6
    assert elastic_size(recipe, None, [(6, 0), (6, 5)]) == 6, "it has saved"
    assert elastic_size(recipe, None, [(6, 5), (6, 5)]) == 4
    assert elastic_size(recipe, None, [(6, 5), (6, 5), (4, 5)]) == 4
    assert elastic_size(recipe, 8, [(6, 0)]) == 6
    assert elastic_size(recipe, 5, [(6, 0)]) == 4
    assert elastic_size(recipe, 3, [(6, 5), (6, 5)]) == 3
    assert elastic_size(recipe, None, [(1, 5), (1, 5)]) == 1
    assert elastic_size(elastic(4, 8), 3, [(6, 0)]) == 4, "which the plan refuses: the machine has 3 GPUs"
