"""Jobs of ranks that save, for the checkpoint tests to interrupt."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.checkpoint.loader import load
from tests.dist.worlds import say

TENSORS, ROWS, COLUMNS = 4, 64, 2000


class TinyState:
    """Stands in for a model: row-sharded tensors over the ranks, whose values follow from the step."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tensors = [torch.zeros(ROWS // self.world, COLUMNS) for _ in range(TENSORS)]

    def advance(self, step: int) -> None:
        for index, tensor in enumerate(self.tensors):
            tensor.fill_(step * TENSORS + index)

    def sharded(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            f"tensor{index}": ShardedTensor.from_rank_offsets(f"tensor{index}", tensor, (0, self.rank, self.world))
            for index, tensor in enumerate(self.tensors)
        }
        random_state = {"generator": torch.get_rng_state(), "python": [1, 2, (3, None)]}
        state["rng"] = ShardedObject("rng", random_state, (self.world,), (self.rank,))
        state["scheduler"] = {"step": step, "groups": [{"lr": 0.1 * step}]}
        return state

    def check(self, loaded: dict[str, Any], step: int) -> None:
        assert loaded["scheduler"] == {"step": step, "groups": [{"lr": 0.1 * step}]}
        for index in range(TENSORS):
            assert torch.all(loaded[f"tensor{index}"] == step * TENSORS + index), (step, index)


def info(step: int) -> CheckpointInfo:
    world = dist.get_world_size()
    return CheckpointInfo(
        step=step, consumed_samples=step, consumed_tokens=step, layout={"world_size": world}, recipe_hash="tiny"
    )


def save_until_killed(directory: Path) -> None:
    """Resume from the newest valid checkpoint, prove that it is whole, and save on and on."""
    state = TinyState()
    store = CheckpointStore(directory)
    with AsyncSaver(store, saver_group(), ShardedFormat()) as saver:
        entry = store.latest_valid()
        step = entry.step if entry else 0
        if entry:
            state.check(load(entry, state.sharded(0)), step)
        say("resumed", step)
        while True:
            step += 1
            state.advance(step)
            saver.save(state.sharded(step), info(step))
            state.advance(-1)
            for report in saver.wait():
                say("announced", report.step)


class _Told(logging.Handler):
    """Tells the test of each alarm."""

    def emit(self, record: logging.LogRecord) -> None:
        say("log", record.levelname)


def train_in_two(directory: Path) -> None:
    """Two ranks that reduce all the time while they save; the second one's disk is full for a while."""
    state, store = TinyState(), CheckpointStore(directory)
    total = torch.zeros(1)
    told = _Told(logging.WARNING)
    logging.getLogger().addHandler(told)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with AsyncSaver(store, saver_group(), ShardedFormat()) as saver:
            for step in (1, 2, 3):
                if step == 2 and state.rank == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
                state.advance(step)
                saver.save(state.sharded(step), info(step))
                state.advance(-1)
                for _ in range(50):
                    total.fill_(1.0)
                    dist.all_reduce(total)
                    assert total.item() == dist.get_world_size()
                for report in saver.wait():
                    say("report", report.step, report.path is not None, str(report.error))
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            dist.barrier()
            entry = store.latest_valid()
            assert entry is not None
            state.check(load(entry, state.sharded(0)), entry.step)
            say("loaded", entry.step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logging.getLogger().removeHandler(told)
