"""Processes that save, for the checkpoint tests to interrupt.

It imports torch and megatron-core once, then forks a world of ranks for each line of JSON on its standard input:
`{"job": name, "directory": path, "world_size": n}`. Ranks print lines that start with what happened; after a world has
ended it prints `ended <exit codes>`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from llmrecipes.checkpoint.loader import load
from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore

TENSORS, ROWS, COLUMNS = 4, 64, 2000


def say(*words: object) -> None:
    """Print a line in one write: the ranks share a pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


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
    with AsyncSaver(store, saver_group()) as saver:
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


def train_in_two(directory: Path) -> None:
    """Two ranks that reduce all the time while they save; the second one's disk is full for a while."""
    logging.basicConfig(stream=sys.stdout, format="log %(levelname)s rank " + str(dist.get_rank()) + " %(message)s")
    state, store = TinyState(), CheckpointStore(directory)
    total = torch.zeros(1)
    with AsyncSaver(store, saver_group()) as saver:
        for step in (1, 2, 3):
            if step == 2 and state.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
            state.advance(step)
            saver.save(state.sharded(step), info(step))
            state.advance(-1)
            for _ in range(50):
                total.fill_(1.0)
                dist.all_reduce(total)
                assert total.item() == dist.get_world_size()
            for report in saver.wait():
                say("report", state.rank, report.step, report.path is not None, report.error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
        entry = store.latest_valid()
        assert entry is not None
        state.check(load(entry, state.sharded(0)), entry.step)
        say("loaded", state.rank, entry.step)


JOBS: dict[str, Callable[[Path], None]] = {"save_until_killed": save_until_killed, "train_in_two": train_in_two}


def run_rank(request: dict[str, Any], rank: int, rendezvous: str) -> None:
    world_size = request.get("world_size", 1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    say("pid", os.getpid())
    JOBS[request["job"]](Path(request["directory"]))
    dist.destroy_process_group()


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for rank in range(request.get("world_size", 1)):
                child = os.fork()
                if child == 0:
                    try:
                        run_rank(request, rank, f"{folder}/rendezvous")
                    except BaseException:
                        traceback.print_exc()
                        os._exit(1)
                    os._exit(0)
                children.append(child)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        say("ended", *codes)


if __name__ == "__main__":
    serve()
