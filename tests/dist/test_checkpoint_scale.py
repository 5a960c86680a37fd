"""What a save and a resume cost a rank: memory, messages and reads, which do not grow with the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.traffic import Recorder
from llmrecipes.checkpoint import rank_groups
from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.rank_groups import Ranks, row_length, sockets
from llmrecipes.checkpoint.saver import LONGEST_SAVE, saver_group, write_checkpoint
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import Engine, Progress, World
from llmrecipes.engine.core.checkpoint import loader
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.checkpoint.index import INDEX_NAME, decode
from llmrecipes.engine.megatron import state
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.resume import choose, resume
from tests.dist.table import Row
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

WHOLE: dict[str, dict[str, Any]] = {"layout": {"use_distributed_optimizer": False}}
OVERLAPPED: dict[str, dict[str, Any]] = {"layout": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
LARGE: dict[str, dict[str, Any]] = {"model": {"hidden_size": 256}}
"""So large that numbers, names and the index are next to nothing."""


def info(engine: Engine, step: int) -> CheckpointInfo:
    return CheckpointInfo(
        step=step,
        consumed_samples=0,
        consumed_tokens=0,
        layout=engine.plan.layout.as_dict(),
        recipe_hash="scale",
        engine=engine.name,
    )


def save(engine: Engine, folder: Path, step: int) -> tuple[ShardedFormat, int]:
    """Save in this thread; returns the format and the bytes that this rank has sent."""
    store, ranks, files = CheckpointStore(folder), saver_group(), engine.checkpoint_format()
    assert isinstance(files, ShardedFormat)
    sent = 0
    pickled = rank_groups._bytes

    def counted(value: Any) -> torch.Tensor:
        nonlocal sent
        data = pickled(value)
        sent += data.numel()
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_groups, "_bytes", counted)
        with Recorder() as traffic:
            taken = files.snapshot(engine.state(Progress(step=step)))
            write_checkpoint(taken, store.temporary_path(step, "t"), info(engine, step), store, ranks, files)
    assert traffic.calls == []
    return files, sent


def held_and_sent(recipe: Recipe, folder: Path) -> list[tuple[int, int, int]] | None:
    """Bytes that each rank holds for a save, writes, and sends."""
    with training(recipe) as (engine, world):
        engine.train_step(loaders(recipe, world))
        files, sent = save(engine, folder, 1)
        written = (folder / "step-00000001" / f"__{world.rank}_0.distcp").stat().st_size
        found: list[Any] = [None] * world.size
        dist.all_gather_object(found, (files.held_bytes, written, sent))
        return found if world.is_first else None


@pytest.mark.parametrize(
    ("layout", "changes"),
    [("dp4", LARGE), ("dp4", {**LARGE, **WHOLE}), ("tp2 dp2", {**LARGE, **OVERLAPPED})],
    ids=["distributed optimizer", "whole optimizer", "overlapped"],
)
@pytest.mark.rotating
def test_a_rank_holds_what_it_writes_and_sends_only_names(
    worlds: dict[int, GlooWorld], tmp_path: Path, layout: str, changes: dict[str, dict[str, Any]]
) -> None:
    found = worlds[4].run(held_and_sent, Row("gpt", layout, changes).recipe, tmp_path)
    index = decode((tmp_path / "step-00000001" / INDEX_NAME).read_bytes())
    elements = sum(prod(tensor.shape) for tensor in index.tensors if not tensor.name.startswith("random."))
    total = 4 * elements  # fp32 weights, master weights and two moments
    held, written, sent = (list(column) for column in zip(*found, strict=True))
    assert sum(held) == pytest.approx(total, rel=0.01)
    assert max(held) < 1.1 * total / 4
    assert all(file == pytest.approx(memory, rel=0.05) for file, memory in zip(written, held, strict=True))
    assert max(sent[1:]) < total / 500, "names, places and hashes"


def test_a_large_tensor_that_all_ranks_have_is_cut_among_them(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    recipe = Row("llama", "dp4", {**LARGE, **WHOLE}).recipe
    held = [memory for memory, _, _ in worlds[4].run(_held_with_small_pieces, recipe, tmp_path)]
    assert max(held) < 1.02 * min(held)


def _held_with_small_pieces(recipe: Recipe, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "LEAST_PIECE", 1000)
        return held_and_sent(recipe, folder)


def read_on_resume(recipe: Recipe, folder: Path) -> list[list[int]] | None:
    """Bytes of each tensor that each rank reads when it resumes, but random states."""
    sizes: list[int] = []
    plain = loader.load_plain

    def counted(*arguments: Any) -> Any:
        value = plain(*arguments)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            sizes.append(value.nbytes)
        return value

    with training(recipe) as (engine, world), pytest.MonkeyPatch.context() as patch:
        entry = choose(CheckpointStore(folder), world).entry
        assert entry is not None
        patch.setattr(loader, "load_plain", counted)
        resume(engine, entry, world)
        found: list[Any] = [None] * world.size
        dist.all_gather_object(found, sizes)
        return found if world.is_first else None


# -- resuming ----------------------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: tuple[tuple[str, Callable[[Path], None]], ...] = (
    ("__3_0.distcp", flipped),
    ("__1_0.distcp", cut),
    ("__2_0.distcp", Path.unlink),
    (INDEX_NAME, flipped),
    (INDEX_NAME, cut),
    ("manifest.json", flipped),
    ("manifest.json", Path.unlink),
)


def resumed_from(engine: Engine, folder: Path, world: World) -> list[Any]:
    """Step, files that each rank has hashed, and the notes of damage."""
    hashed: list[str] = []
    compare = rank_groups.mismatch

    def watched(path: Path, files: Any) -> str:
        hashed.extend(f"{path.name}/{name}" for name in files)
        return compare(path, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_groups, "mismatch", watched)
        start = choose(CheckpointStore(folder), world)
        assert start.entry is not None
        step = resume(engine, start.entry, world).step
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, (step, hashed, [note.details["reason"] for note in start.notes]))
    return found


def resumed_after_damage(recipe: Recipe, folder: Path) -> list[Any] | None:
    """Save steps 1 and 2 and resume; then damage step 2 and resume, and save it again, for each kind of damage."""
    with training(recipe) as (engine, world):
        save(engine, folder, 1)
        save(engine, folder, 2)
        dist.barrier()
        found = [resumed_from(engine, folder, world)]
        for name, damage in DAMAGES:
            if world.is_first:
                damage(folder / "step-00000002" / name)
            dist.barrier()
            found.append(resumed_from(engine, folder, world))
            save(engine, folder, 2)
            dist.barrier()
        return found if world.is_first else None


@pytest.mark.rotating
def test_each_file_is_hashed_by_one_rank_and_damage_is_known_to_all(
    worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    whole, *damaged = worlds[4].run(resumed_after_damage, Row("gpt", "dp4", LARGE).recipe, tmp_path)
    assert [step for step, _, _ in whole] == [2] * 4
    (entry,) = [entry for entry in CheckpointStore(tmp_path).entries() if entry.step == 2]
    everything = sorted(name for _, hashed, _ in whole for name in hashed)
    assert everything == sorted(f"step-00000002/{name}" for name in entry.manifest.files)
    assert [sum(name.endswith(".distcp") for name in hashed) for _, hashed, _ in whole] == [1] * 4
    for (name, _), found in zip(DAMAGES, damaged, strict=True):
        assert [step for step, _, _ in found] == [1] * 4
        assert all(reason.startswith(f"{name}: ") for _, _, (reason,) in found)
    assert len(list(tmp_path.glob("damaged-step-00000002-*"))) == len(DAMAGES)


# -- messages ----------------------------------------------------------------------------------------------------------


def _relayed(row: int) -> list[tuple[list[str] | None, str]] | None:
    ranks = Ranks(LONGEST_SAVE, row)
    gathered = ranks.gather("x" * ranks.rank)
    word = ranks.broadcast("from the first" if ranks.rank == 0 else None)
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, (gathered, word))
    return found if ranks.rank == 0 else None


@pytest.mark.parametrize("row", [1, 2, 3, 4])
def test_values_go_to_the_first_rank_and_back_by_rows(worlds: dict[int, GlooWorld], row: int) -> None:
    found = worlds[4].run(_relayed, row)
    assert found == [(["", "x", "xx", "xxx"] if rank == 0 else None, "from the first") for rank in range(4)]


def test_no_rank_is_connected_with_all_of_many() -> None:
    assert sockets(64) == 63
    assert sockets(16_384) == 254
    assert all(row_length(size) ** 2 >= size for size in (65, 1000, 16_384, 100_000))


def _lost() -> str:
    ranks = Ranks(LONGEST_SAVE)
    dist.barrier()  # a rank that leaves while another one connects to it would be that one's error
    ranks._row._gloo.set_timeout(timedelta(seconds=1))  # only now: connecting takes longer on a busy machine
    if ranks.rank:
        return ""
    try:
        ranks.gather(None)
    except RuntimeError:
        return "refused"
    return "waited"


def test_a_rank_that_does_not_answer_is_an_error(worlds: dict[int, GlooWorld]) -> None:
    assert worlds[2].run(_lost) == "refused"
