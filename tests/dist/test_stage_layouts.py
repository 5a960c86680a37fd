"""Runs whose stages have other layouts, by the worker of a rank: boundaries, and ends in every stage."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from llmrecipes.data.prepare import prepare
from llmrecipes.engine.base import Platform, Rank
from llmrecipes.engine.core.backend import CoreBackend
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train import worker
from llmrecipes.train.spec import RunSpec
from tests.dist.table import BOUND
from tests.dist.worlds import GlooWorld, say
from tests.helpers import curve, lines, require_same_checkpoints, tiny_on

pytestmark = pytest.mark.dist

Stages = list[dict[str, Any]]

TWO: Stages = [
    {"name": "short", "train_iters": 3},
    {
        "name": "long",
        "model": {"seq_length": 128},
        "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
]
THREE: Stages = [
    {
        "name": "first",
        "train_iters": 3,
        "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    },
    {
        "name": "long",
        "train_iters": 3,
        "model": {"seq_length": 128},
        "layout": {"tensor_model_parallel_size": 1, "sequence_parallel": False, "pipeline_model_parallel_size": 1,
            "context_parallel_size": 2}
    },
    {
        "name": "last",
        "layout": {"context_parallel_size": 1, "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2}
    },
]  # fmt: skip


def staged(corpus: Path, data_dir: Path, stages: Stages, dropout: float = 0.0) -> Recipe:
    one = tiny_on(
        corpus,
        model={"num_layers": 4 if stages is THREE else 2, "position_embedding_type": "rope", "hidden_dropout": dropout},
        train={
            "train_iters": 9 if stages is THREE else 6, "global_batch_size": 4,
            "eval_interval": 4
        },
        data={"num_workers": 0},  # ranks of the pool may have no children
        checkpoint={"save_interval": 2, "most_recent_k": 8},
    layout={"micro_batch_size": 1})  # fmt: skip
    recipe = Recipe.model_validate({**one.model_dump(mode="json"), "stages": stages})
    prepare(recipe, data_dir)
    return recipe


def spec_of(recipe: Recipe, folder: Path, data_dir: Path) -> RunSpec:
    run_dir = folder / "runs" / recipe.name / "r"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return RunSpec(recipe=recipe, run_dir=run_dir, runs_dir=folder / "runs", data_dir=data_dir, sample=False)


def train_run(spec: RunSpec, wait_after: int | None = None) -> int:
    """The worker of each rank, in the process group of the pool; the second one waits after a step to be killed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    real = MegatronEngine.train_step

    @contextmanager
    def connect(_backend: CoreBackend, _platform: Platform) -> Iterator[Rank]:
        yield Rank(rank, size)

    def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        if rank == 1 and engine.steps == wait_after:
            say("waits")
            signal.pause()
        return real(engine, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)):
            patch.setenv(name, str(value))
        patch.setattr(CoreBackend, "connect", connect)
        patch.setattr(MegatronEngine, "train_step", step)
        return int(worker.run(spec))


def test_a_second_stage_of_another_layout_trains_what_one_process_does(
    corpus: Path, data_dir: Path, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    plain = [{key: value for key, value in stage.items() if key != "layout"} for stage in TWO]
    one, two = (spec_of(staged(corpus, data_dir, stages), tmp_path / name, data_dir) for name, stages in
                (("one", plain), ("two", TWO)))  # fmt: skip
    assert worlds[1].run(train_run, one) == 0
    assert worlds[2].run(train_run, two) == 0
    for ours, theirs in zip(curve(two.run_dir), curve(one.run_dir), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == other or mine == pytest.approx(other, rel=BOUND)
    notes = [line for line in lines(two.run_dir) if "event" in line]
    assert [note["details"]["layout"] for note in notes if note["event"] == "stage"] == [
        "data 2",
        "tensor 2 × data 1",
    ]
    assert "resized" not in {note["event"] for note in notes}
    executed = [note["details"]["executed"] for note in notes if note["event"] == "started"]
    assert [how.get("layout.tensor_model_parallel_size") for how in executed] == [None, 2]


@pytest.mark.slow
@pytest.mark.rotating
def test_a_run_that_is_killed_in_stages_of_other_layouts_goes_on_bit_for_bit(
    corpus: Path, data_dir: Path, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    recipe = staged(corpus, data_dir, THREE, dropout=0.1)
    whole, killed = (spec_of(recipe, tmp_path / name, data_dir) for name in ("whole", "killed"))
    assert worlds[4].run(train_run, whole) == 0
    for after in (1, 3, 7):  # in the first stage, before the first step of the second, and in the third
        running = worlds[4].start(train_run, killed, after)
        assert running.said() == (1, ("waits",))
        for rank in range(4):  # as their launcher ends them when one is gone
            running.kill(rank)
        assert running.end() == [-signal.SIGKILL] * 4
    assert worlds[4].run(train_run, killed) == 0
    assert curve(killed.run_dir) == curve(whole.run_dir)
    newest = "checkpoints/step-00000009"
    require_same_checkpoints(killed.run_dir / newest, whole.run_dir / newest)
    assert "resized" not in {line.get("event") for line in lines(killed.run_dir)}
