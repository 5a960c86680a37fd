"""A rank of a run that is punished: the ordinary one, which has the faults it is ordered, and records its batches."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lab.punish import faults
from llmrecipes.errors import ExitCode
from llmrecipes.hardware.builds import import_megatron
from llmrecipes.train.rank import rank_main
from llmrecipes.train.spec import RunSpec
from llmrecipes.train.worker import import_all, run

IN_STEP = frozenset({"GIL held", "collective left out", "exception", "NaN", "NaN that stays"})
IN_COMPARED_STEP = frozenset({"flipped weight bit"})
IN_EVALUATION, IN_SAVE = frozenset({"exception in evaluation"}), frozenset({"killed in a save"})


class OnPurpose(RuntimeError):
    """An exception that `punish` asked for."""


def run_punished(spec: RunSpec) -> ExitCode:
    """`train.worker.run` with faults."""
    import_megatron()
    install(spec.run.logs / faults.ORDERS, int(os.environ["RANK"]))
    return run(spec)


def install(folder: Path, rank: int) -> None:
    """Replace three functions of this process by ones that look for orders first.

    Args:
        folder: with orders; each step of this rank is recorded there.
    """
    from llmrecipes.engine.core.checkpoint.format import ShardedFormat
    from llmrecipes.engine.megatron.engine import MegatronEngine

    train_step, evaluate, write = MegatronEngine.train_step, MegatronEngine.evaluate, ShardedFormat.write
    record = (folder / f"{rank}-{faults.STEPS}").open("a", buffering=1)
    taken = partial(faults.take, folder, rank)

    def punished_step(engine: Any, batches: Iterator[Any], **options: Any) -> Any:
        began, digest = time.monotonic(), hashlib.sha256()
        step = engine.scheduler.num_steps + 1
        # In a step with a comparison: in others the next gather of the distributed optimizer overwrites a flip.
        if fault := taken(IN_STEP | IN_COMPARED_STEP if step % faults.COMPARED == 0 else IN_STEP):
            _have(fault, engine)
        result = train_step(engine, _digested(batches, digest), **options)
        values = {"step": step, "began": began, "ended": time.monotonic(), "batch": digest.hexdigest()}
        record.write(json.dumps(values) + "\n")
        return result

    def punished_evaluation(engine: Any, *arguments: Any) -> Any:
        if taken(IN_EVALUATION):
            raise OnPurpose("an exception in evaluation")
        return evaluate(engine, *arguments)

    def punished_write(files: Any, *arguments: Any) -> Any:
        written = write(files, *arguments)
        if taken(IN_SAVE):
            time.sleep(1.0)  # the save is stalled: others have written, and wait
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    MegatronEngine.train_step = punished_step  # type: ignore[method-assign, assignment]
    MegatronEngine.evaluate = punished_evaluation  # type: ignore[method-assign, assignment]
    ShardedFormat.write = punished_write  # type: ignore[method-assign, assignment]


def _digested(batches: Iterator[Any], digest: hashlib._Hash) -> Iterator[Any]:
    for batch in batches:
        digest.update(batch["tokens"].numpy().tobytes())
        yield batch


def _have(fault: str, engine: Any) -> None:
    import torch
    import torch.distributed as dist

    if fault == "exception":
        raise OnPurpose("an exception in a step")
    if fault == "GIL held":
        ctypes.PyDLL(None).sleep(3600)  # PyDLL does not release it
    weight = next(weight for weight in engine.modules[-1].parameters() if weight.requires_grad)
    if fault == "flipped weight bit":
        # In a backward pass: with `overlap_param_gather` weights are gathered in the forward pass before it.
        flips = iter(range(1))

        def flip(_gradient: torch.Tensor) -> None:
            if next(flips, None) is not None:
                weight.data.view(-1).view(torch.int32)[0] ^= 1

        weight.register_hook(flip)
    elif fault == "collective left out":
        ordinary = dist.all_reduce

        def left_out(*_arguments: Any, **_options: Any) -> None:
            dist.all_reduce = ordinary

        dist.all_reduce = left_out
    elif fault in ("NaN", "NaN that stays"):
        times = iter(range(1)) if fault == "NaN" else iter(range(1 << 60))
        weight.register_hook(lambda gradient: gradient + (math.nan if next(times, None) is not None else 0.0))


if __name__ == "__main__":
    rank_main(RunSpec, run_punished, import_all)
