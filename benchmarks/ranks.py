"""A small world of ranks on this machine that trains a recipe on random tokens and reports on its steps."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmrecipes.launch.local import run_ranks
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe

QUIET = ["tracking.mlflow=false", "tracking.tensorboard=false"]


def small(name: str, *changes: str) -> Recipe:
    """A recipe with changes, without tracking."""
    return load(name, [*QUIET, *changes]).recipe


def run(recipe: Recipe, ranks: int, *, warmup: int, steps: int, count: bool = False, record: int = 0) -> list[Any]:
    """Train on `ranks` new processes of one thread each; gives each rank's report.

    Args:
        recipe: what to train.
        ranks: world size.
        warmup: steps before the clock starts.
        steps: measured steps.
        count: take one more step and report its collectives.
        record: take so many more steps and report their pipeline's forward and backward passes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "spec.json"
        job = {"recipe": recipe.model_dump_json(), "warmup": warmup, "steps": steps, "count": count, "record": record}
        spec.write_text(json.dumps(job), "utf-8")
        code = run_ranks("benchmarks.ranks", [str(spec)], world_size=ranks, threads=1, logs=folder)
        if code:
            logs = "\n".join(path.read_text("utf-8")[-3000:] for path in sorted(folder.glob("rank-*.log")))
            raise RuntimeError(f"the ranks ended with {code}\n{logs}")
        return [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(ranks)]


def _main() -> None:
    """One rank: `python -m benchmarks.ranks <spec.json>`."""
    import logging

    import torch.distributed as dist

    from llmrecipes.bench.measure import random_tokens
    from llmrecipes.console import setup_logging
    from llmrecipes.engine.core.model.gpt import build
    from llmrecipes.engine.core.platform import select
    from llmrecipes.engine.core.world import join
    from llmrecipes.engine.megatron.engine import MegatronEngine
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive

    setup_logging(logging.ERROR)
    spec = Path(sys.argv[1])
    job = json.loads(spec.read_text("utf-8"))
    recipe = Recipe.model_validate_json(job["recipe"])
    platform = select()
    platform.install()
    with join(platform, recipe.train.seed, recipe.layout) as world:
        plan = derive(recipe, world.size, detect())
        engine = MegatronEngine(plan, build(plan, platform), platform)
        batches = random_tokens(recipe, world.data_parallel_rank)
        report: dict[str, Any] = {"wall": [], "core_seconds": [], "losses": []}
        for number in range(job["warmup"] + job["steps"]):
            dist.barrier()
            wall, used = time.perf_counter(), time.process_time()
            result = engine.train_step(batches)
            if number >= job["warmup"]:
                report["wall"].append(time.perf_counter() - wall)
                report["core_seconds"].append(time.process_time() - used)
                report["losses"].append(result.loss)
        dist.barrier()
        if job["count"]:
            report["calls"] = counted(lambda: engine.train_step(batches))
        report["passes"] = [_recorded(engine, batches) for _ in range(job["record"])]
        dist.barrier()
        (spec.parent / f"rank-{world.rank}.json").write_text(json.dumps(report), "utf-8")


def counted(step: Callable[[], object]) -> list[Any]:
    import torch

    from benchmarks.traffic import Recorder
    from llmrecipes.engine.core.model import attention

    def mask(_real: Any, queries: int, keys: int) -> torch.Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    # torch's own mask, a subclass of Tensor, cannot be made under a dispatch mode.
    with _around(attention, "causal_lower_right", mask), Recorder() as recorder:
        step()
    return recorder.calls


def _recorded(engine: Any, batches: Iterator[Any]) -> list[dict[str, Any]]:
    """Every forward and backward pass of a step, in the order they were made.

    `seconds` are of processor time; `started` and `ended` are read from a clock that all processes share.
    """
    from megatron.core.pipeline_parallel import schedules

    passes: list[dict[str, Any]] = []
    seen: dict[int, tuple[int, int]] = {}  # output tensor -> the forward pass it came from
    made = [0] * len(engine.chunks)

    def timed(kind: str, chunk: int, micro_batch: int, work: Callable[[], Any]) -> Any:
        started, used = time.monotonic(), time.thread_time()
        result = work()
        seconds = time.thread_time() - used
        found = {"kind": kind, "chunk": chunk, "micro_batch": micro_batch, "seconds": seconds}
        passes.append({**found, "started": started, "ended": time.monotonic()})
        return result

    def forward(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chunk = next(number for number, each in enumerate(engine.chunks) if each is args[2])
        result = timed("forward", chunk, made[chunk], lambda: real(*args, **kwargs))
        seen[id(_tensor(result[0]))] = (chunk, made[chunk])
        made[chunk] += 1
        return result

    def backward(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chunk, micro_batch = seen.pop(id(_tensor(args[1])))
        return timed("backward", chunk, micro_batch, lambda: real(*args, **kwargs))

    with _around(schedules, "forward_step", forward), _around(schedules, "backward_step", backward):
        engine.train_step(batches)
    return passes


def _tensor(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


@contextmanager
def _around(module: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    real = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: wrapper(real, *args, **kwargs))
    try:
        yield
    finally:
        setattr(module, name, real)


if __name__ == "__main__":
    _main()
