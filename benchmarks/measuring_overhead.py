"""What all measuring of a run adds to a step: blocks of steps with and without it, in turn, in one world of ranks.

    torchrun --nproc-per-node 4 -m benchmarks.measuring_overhead [--seconds 220]

The steps are those of the training loop on random tokens. A block without has no telemetry, counts nothing and reports
nothing. One with has what a run has: rows of all ranks, readings of the node, token accuracy, checks, metrics.jsonl,
TensorBoard, MLflow and Prometheus, with `train.log_interval=10`. Steps that measure layers (`tracking.layers_interval`)
have blocks of their own, and count as one in a hundred.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import psutil
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.common import close, machine, parser, show
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Progress, World
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.faults.signals import StopRequest
from llmrecipes.hardware.builds import import_megatron
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import NoTracker, Tracker
from llmrecipes.tracking.run_tracker import RunTracker
from llmrecipes.train.loaders import DataLoaders, ReadAhead
from llmrecipes.train.loop import Loop
from llmrecipes.train.observers.base import Observers
from llmrecipes.train.observers.telemetry import Telemetry
from llmrecipes.train.spec import RunSpec
from tests.helpers import random_batches

BLOCK = 10
"""Steps; one of them is measured."""
LEAST = 18
"""Blocks, however slow the machine is; the first six are not counted."""
NEVER = 10**9
LAYERS_EVERY = 100
KINDS = ("without", "with", "layers")
ORDER = ("without", "with", "with", "without", "without", "layers", "with", "with", "without", "layers")
"""So that no kind has a better time of a machine that becomes slower or faster."""


class Block(NamedTuple):
    """Of all steps of a block: seconds by the clock, and processor seconds of all ranks."""

    wall: float
    processor: float


def main() -> None:
    """Measure, and print the table on the first rank."""
    made = parser(__doc__)
    made.add_argument("--recipe", default="gpt-tiny")
    made.add_argument("--seconds", type=float, default=220.0, help="of blocks; the start comes before")
    options = made.parse_args()
    before = machine() if os.environ.get("RANK", "0") == "0" else {}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    recipe = measured_recipe(options.recipe, ranks)
    import_megatron()
    engines = backend(recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    with engines.join(recipe, platform) as world, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plan = derive(recipe, world.size, detect())
        engine = engines.build(plan, platform)
        assert isinstance(engine, MegatronEngine)
        stack.callback(engine.close)
        tracker = stack.enter_context(tracked(recipe, plan, Path(folder))) if world.is_first else NoTracker()
        spec = RunSpec(recipe=recipe, data_dir=Path(folder), run_dir=Path(folder), runs_dir=Path(folder))
        telemetry = Telemetry(spec)
        joined: Any = SimpleNamespace(spec=spec)
        Observers((telemetry,)).begin(joined, made_loop(plan, engine, world, telemetry, tracker), stack)
        blocks = run(engine, world, telemetry, tracker, options.seconds)
        beside = {} if not world.is_first else processes_beside()
    if world.is_first:
        report(recipe, world.size, blocks, beside, before, options.json)


def measured_recipe(name: str, ranks: int) -> Recipe:
    """The recipe with everything measured; its batch divides by the ranks."""
    recipe = load(name).recipe
    size = math.gcd(recipe.layout.micro_batch_size, max(1, recipe.train.global_batch_size // ranks))
    return load(
        name,
        [
            f"layout.micro_batch_size={size}", f"train.log_interval={BLOCK}", f"train.train_iters={NEVER}",
            f"scheduler.lr_decay_iters={NEVER}", f"tracking.layers_interval={LAYERS_EVERY}",
            "tracking.mlflow=true", "tracking.tensorboard=true", "tracking.prometheus=true",
        ],
    ).recipe  # fmt: skip


def tracked(recipe: Recipe, plan: Plan, folder: Path) -> RunTracker:
    """The tracker of a run, with all sinks."""
    return RunTracker.open(
        recipe, plan=plan.as_dict(), environment={}, run_dir=folder / "runs" / recipe.name / "one",
        runs_dir=folder / "runs", resumed_step=0, total_steps=NEVER, console=Console(file=Path(os.devnull).open("w")),
    )  # fmt: skip


def run(
    engine: MegatronEngine, world: World, telemetry: Telemetry, tracker: Tracker, seconds: float
) -> dict[str, list[Block]]:
    """Blocks by kind, until the time is over; the same ones on all ranks."""
    plan = engine.plan
    quiet = replace(plan, recipe=quiet_recipe(plan.recipe, NEVER))
    usual = replace(plan, recipe=quiet_recipe(plan.recipe, BLOCK))
    dense = replace(plan, recipe=plan.recipe.model_copy(update={"tracking": layers_every(plan.recipe, BLOCK)}))
    batches = ReadAhead(
        random_batches(plan.recipe, rank=world.data_parallel_rank, ranks=world.data_parallel_size),
        itertools.repeat(plan.num_microbatches),
    )
    progress = Progress()
    blocks: dict[str, list[Block]] = {kind: [] for kind in KINDS}
    plans = {"without": quiet, "with": usual, "layers": dense}
    loops = {
        kind: made_loop(each, engine, world, *((None, NoTracker()) if kind == "without" else (telemetry, tracker)))
        for kind, each in plans.items()
    }
    ended = time.monotonic() + seconds
    for number, kind in enumerate(itertools.chain(ORDER[:6], itertools.cycle(ORDER))):
        engine.recipe = plans[kind].recipe
        loop = telemetry.loop = loops[kind]
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(BLOCK):
            progress, _ = loop._step(progress, batches, steady=False)
        wall, processor = time.perf_counter() - began, time.process_time() - used
        loop.losses.clear()
        sums = torch.tensor([processor, float(time.monotonic() < ended)], dtype=torch.float64)
        dist.all_reduce(sums)
        if number >= len(ORDER[:6]):  # those before compile, connect and allocate
            blocks[kind].append(Block(wall, float(sums[0])))
        if number % len(ORDER) == 0 and world.is_first:
            print(f"{number} blocks, the last of {wall:.1f} s", flush=True)
        if number >= LEAST and sums[1] < world.size:
            return blocks
    raise AssertionError


def quiet_recipe(recipe: Recipe, log_interval: int) -> Recipe:
    """Without measured layers, and with this interval."""
    return recipe.model_copy(
        update={
            "tracking": layers_every(recipe, None),
            "train": recipe.train.model_copy(update={"log_interval": log_interval}),
        }
    )


def layers_every(recipe: Recipe, steps: int | None) -> Any:
    return recipe.tracking.model_copy(update={"layers_interval": steps})


def made_loop(plan: Plan, engine: MegatronEngine, world: World, telemetry: Telemetry | None, tracker: Tracker) -> Loop:
    """The training loop of a rank, of which only steps are used: nothing is read, evaluated or saved."""
    return Loop(
        plan, engine, world, cast(DataLoaders, None), tracker, cast(Any, None), StopRequest(), "", None,
        Observers(() if telemetry is None else (telemetry,)),
    )  # fmt: skip


def processes_beside() -> dict[str, float]:
    """Processor seconds of the processes that the first rank has started, by module."""
    used: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            words, times = process.cmdline(), process.cpu_times()
        except psutil.Error:
            continue
        name = words[words.index("-m") + 1] if "-m" in words[:-1] else " ".join(words[:2])
        used[name] = used.get(name, 0.0) + times.user + times.system
    return used


def pairs(blocks: dict[str, list[Block]], kind: str, measure: str) -> list[float]:
    """Differences of blocks of a kind and the blocks without that are next to them in time, seconds a step."""
    mine, others = ([getattr(block, measure) for block in blocks[name]] for name in (kind, "without"))
    places = [at * len(others) // len(mine) for at in range(len(mine))]
    return [(one - others[at]) / BLOCK for one, at in zip(mine, places, strict=True)]


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Median, and its standard error by the spread of the middle half."""
    low, _, high = statistics.quantiles(values, n=4)
    return statistics.median(values), 1.253 * (high - low) / 1.349 / math.sqrt(len(values))


def report(
    recipe: Recipe, ranks: int, blocks: dict[str, list[Block]], beside: dict[str, float], before: dict[str, Any],
    file: Path | None,
) -> None:  # fmt: skip
    figures: dict[str, Any] = {"recipe": recipe.name, "ranks": ranks, "blocks": {k: len(v) for k, v in blocks.items()}}
    rows = []
    for measure in ("wall", "processor"):
        step = statistics.median(getattr(block, measure) for block in blocks["without"]) / BLOCK
        usual, error = middle(pairs(blocks, "with", measure))
        whole, error_of_layers = middle(pairs(blocks, "layers", measure))
        layers = (whole - usual) * BLOCK  # of the one step of the block that measures them
        total = usual + layers / LAYERS_EVERY
        off = math.hypot(error, error_of_layers * BLOCK / LAYERS_EVERY)
        figures[measure] = {"step": step, "usual": usual, "layers": layers, "total": total, "error": off}
        name = {"wall": "by the clock", "processor": "processor time of all ranks"}[measure]
        rows.append(
            (name, f"{1e3 * step:.1f}", f"{1e3 * usual:+.2f}", f"{1e3 * layers:+.1f}", f"{total / step:+.2%}",
             f"{off / step:.2%}")
        )  # fmt: skip
    show(
        f"{recipe.name}, {ranks} ranks: {sum(map(len, blocks.values()))} blocks of {BLOCK} steps",
        ("ms", "step without", "all, a step", "layers, of a step that measures them", "all together", "±"),
        rows,
    )
    for name, seconds in sorted(beside.items()):
        print(f"beside the first rank, from its start: {name} {seconds:.1f} s of a processor")
    close(figures | {"beside": beside}, before, file)


if __name__ == "__main__":
    main()
