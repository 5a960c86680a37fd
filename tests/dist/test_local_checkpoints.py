"""Local checkpoints: retention, copies on another node, and the newest step of which every rank has its part."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llmrecipes.checkpoint.local_parts import LocalPart, LocalParts, newest_complete
from llmrecipes.checkpoint.local_saver import LocalSaver, neighbours
from llmrecipes.checkpoint.manifest import MANIFEST_NAME
from llmrecipes.checkpoint.saver import saver_group
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core.checkpoint.part import FILE
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.workflow.restarts import newest_step
from tests.dist.table import Row
from tests.dist.test_checkpoint_scale import WHOLE, info
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld
from tests.helpers import tiny

pytestmark = pytest.mark.dist

Seen = tuple[int, list[int]] | None


@pytest.mark.parametrize(
    ("ranks", "per_node", "together"),
    [
        (4, 4, [[0], [1], [2], [3]]),
        (4, 2, [[0, 2], [1, 3]]),
        (3, 1, [[0, 1, 2]]),
        (5, 1, [[0, 1], [2, 3, 4]]),
        (7, 1, [[0, 1], [2, 3], [4, 5, 6]]),
        (8, 1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_a_copy_is_on_another_node_and_few_ranks_talk(ranks: int, per_node: int, together: list[list[int]]) -> None:
    assert [neighbours(rank, ranks, per_node) for rank in range(ranks)] == [
        next(group for group in together if rank in group) for rank in range(ranks)
    ]


def test_parts_of_different_starts_or_worlds_are_not_one_checkpoint() -> None:
    parts = [
        LocalPart(5, "a", 0, 2),
        LocalPart(5, "b", 1, 2),
        LocalPart(4, "a", 0, 2),
        LocalPart(4, "a", 1, 2),
        LocalPart(4, "a", 0, 3),
    ]
    assert list(newest_complete(parts)) == [(4, "a")]


def test_a_restart_from_a_local_step_is_progress(tmp_path: Path) -> None:
    """What is judged before ranks run, of a run that has no other checkpoint."""
    local = {"non_persistent_save_interval": 1, "non_persistent_local_ckpt_dir": str(tmp_path / "{node}")}
    recipe, run = tiny(checkpoint=local), Run(tmp_path / "runs/tiny/r")
    run.path.mkdir(parents=True)
    assert newest_step(run, recipe, 2) == 0
    run.local_checkpoints.write_text('{"token": "ab", "resumed": 4, "ranks": 2}')
    assert newest_step(run, recipe, 2) == 4
    for number, rank in ((7, 0), (7, 1), (8, 0)):
        (tmp_path / "0/tiny-ab" / str(LocalPart(number, "0123abcd", rank, 2))).mkdir(parents=True)
    assert newest_step(run, recipe, 2) == 7
    assert newest_step(run, recipe, 1) == 0, "a start on one rank loads none of two"


def lost_and_found(recipe: Recipe, folder: Path) -> list[Seen] | None:
    """What a start finds after each of some losses, on two nodes of two ranks, whose disks are folders."""
    with training(recipe) as (engine, world):
        assert isinstance(engine, MegatronEngine)
        group, batches = saver_group(), loaders(recipe, world)
        parts = LocalParts(folder / str(world.rank // 2))

        def opened() -> LocalSaver:
            return LocalSaver(parts, group, 2, engine.plan.layout.as_dict())

        saver, states = opened(), {}
        for step in (1, 2, 3):
            engine.train_step(batches)
            progress = Progress(step=step, consumed_samples=step)
            states[step] = engine.weights()[0].tensor.clone()
            saver.save(engine.part_format(), engine.part(progress), info(engine, step))
        state = engine.part(Progress())
        copied = addresses(engine.part_format().snapshot(state))
        assert copied.isdisjoint(addresses(state)), "also of what another rank has, which a step changes meanwhile"
        engine.train_step(batches)  # while the last one is written
        saver.wait()
        dist.barrier()
        seen: list[Seen] = []

        def look() -> None:
            dist.barrier()
            found = opened().newest(after=0)
            seen.append(None if found is None else (found[0].step, found[1]))
            if found is not None:
                loaded = engine.load_state(found[0])
                assert asdict(loaded) == asdict(Progress(step=loaded.step, consumed_samples=loaded.step))
                assert torch.equal(engine.weights()[0].tensor, states[loaded.step])
            dist.barrier()

        assert {part.step for part in parts.all()} == {2, 3}
        assert {part.rank for part in parts.all()} == {0, 1, 2, 3}, "its own and its neighbours'"
        assert not list(parts.directory.glob(".tmp-*"))
        look()
        if world.rank == 1:
            flip(parts.path(next(part for part in parts.all() if (part.step, part.rank) == (3, 1))) / FILE)
        look()
        if world.rank in (1, 3):
            lost = parts.path(next(part for part in parts.all() if (part.step, part.rank) == (3, 1)))
            if world.rank == 1:
                flip(lost / FILE)
            else:
                (lost / MANIFEST_NAME).write_text("{")
        look()
        assert {part.step for part in parts.all()} == {2}, "of later steps, which would be kept in place of new ones"
        if world.rank == 2:
            shutil.rmtree(parts.directory)
            parts.directory.mkdir()
        look()
        if world.rank == 0:
            flip(parts.path(next(part for part in parts.all() if (part.step, part.rank) == (2, 0))) / FILE)
        look()
        assert not parts.all()
        saver.forget()
        return seen if world.is_first else None


def addresses(state: dict[str, Any]) -> set[int]:
    """Where the tensors of a state are in memory."""
    return {shard.data.data_ptr() for shard in nested_values(state) if isinstance(shard, ShardedTensor)}


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("layout", "changes"), [("tp2 pp2", {}), ("dp4", {}), ("dp4", WHOLE)])
@pytest.mark.rotating
def test_a_lost_node_or_part_is_restored_from_its_copy(
    worlds: dict[int, GlooWorld], tmp_path: Path, layout: str, changes: dict[str, Any]
) -> None:
    row = Row("gpt", layout, {**changes, "train": {"train_iters": 4}})
    found = worlds[4].run(lost_and_found, row.recipe, tmp_path)
    # The copy of the last part that is flipped was on the node that is lost before.
    assert found == [(3, []), (3, [1]), (2, []), (2, [2, 3]), None]
