"""Ranks of which one fails while the others wait for it, or has another device."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.platform.cuda import CudaPlatform
from llmrecipes.engine.core.world import join
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch.ranks import Rank
from llmrecipes.recipe.schema import LayoutKeys
from llmrecipes.train.rank import failure_reported, leave, process_exit_code
from llmrecipes.train.spec import RankSpec
from tests.dist.worlds import say
from tests.helpers import tiny
from tests.refusals import refused

HUNG = 77
"""Exit code of a rank that did not leave by itself."""

ERRORS = {
    "defect": RuntimeError("a defect"),
    "mistake": UserError("a mistake", code=ExitCode.STOP),
    "stuck": RuntimeError("a defect, and a checkpoint whose writing never ends"),
}


def fail_alone(port: int, turns: Path, what: str) -> None:
    """Join as a rank that a launcher started, where the teardown of the process group waits for all ranks, as NCCL's,
    and so does the end of the interpreter.

    Args:
        port: of the rendezvous.
        turns: a folder in which the processes find their ranks.
        what: key of `ERRORS`, raised on rank 1 while rank 0 waits for it in an all-reduce.
    """
    rank = next(number for number in range(2) if _taken(turns / str(number)))
    os.environ.update(Rank(rank, 2, rank, 2, "127.0.0.1", port).variables())
    watchdog = threading.Timer(120, os._exit, (HUNG,))
    watchdog.daemon = True
    watchdog.start()
    threading.Thread(target=_never_returns).start()  # what the end of an interpreter waits for
    recipe = tiny(train={"exit_grace_seconds": 1.0 if what == "stuck" else 240.0})

    def run(_spec: RankSpec) -> ExitCode:
        with join(select(), 1, LayoutKeys()), ExitStack() as stack, failure_reported(recipe):
            if what == "stuck":
                stack.callback(_never_returns)
            dist.barrier()
            if rank == 1:
                raise ERRORS[what]
            say("waits")
            dist.all_reduce(torch.ones(1))
        return ExitCode.DONE

    patch = pytest.MonkeyPatch()  # for good: this process ends
    patch.setattr(dist, "destroy_process_group", _never_returns)
    with Path(turns / f"{rank}.err").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    leave(process_exit_code(run, RankSpec(recipe=recipe, data_dir=turns)))


def join_with_another_device(port: int, turns: Path) -> str:
    """Join as one of two ranks, of which the second has a GPU; returns what the error is about."""
    rank = next(number for number in range(2) if _taken(turns / str(number)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in Rank(rank, 2, rank, 2, "127.0.0.1", port).variables().items():
            patch.setenv(name, value)
        mine = CudaPlatform(0) if rank else select()
        with refused("torch.cuda", rule=("1", "2", "0")) as caught, join(mine, 1, LayoutKeys()):
            pass
    return caught.value.where


def _taken(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _never_returns(*_: Any) -> None:
    threading.Event().wait()
