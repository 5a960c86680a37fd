"""Seconds that the first rank of a recipe takes to draw its initial weights, without the copies to its device.

    python -m benchmarks.initial_values [RECIPE ...] [--threads N] [--json FILE]

The rank is built without data, on the nodes of `benchmarks.dryrun`, so it needs no memory for its weights. Beside it,
what drawing every global tensor in full takes, as each rank did before it kept its part: torch's generator on one
thread, timed on at most 64 million values of each tensor.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import cast

import torch

from benchmarks.common import machine, parser
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import MetaBackend
from llmrecipes.engine.core.model import init
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.recipe.load import load
from llmrecipes.workflow.plan import plan_on

TIMED = 1 << 26
NODES = {"llama3-70b": 32, "llama3-405b": 2048}
"""Nodes of 8 GPUs; of other recipes the fewest that fit."""


def measure(name: str, threads: int) -> dict[str, float]:
    """Values and seconds of one recipe, in a process of its own."""
    torch.set_num_threads(threads)
    recipe = load(name, []).recipe
    run, _ = plan_on(recipe, nproc=None, cluster="h100-ib", nodes=NODES.get(name))
    plan = run.largest
    engines = cast(MetaBackend, backend(recipe))
    platform = engines.meta_platform(0, plan.layout.world_size, plan.device, 1.0)
    with engines.join(recipe, platform):
        engine = engines.construct_meta(plan, platform)
        modules = cast("list[RecipeModel]", engine.modules)
        pieces = [piece for module in modules for piece in init.parameter_slices(module.sharded_state())]
        engine.close()
    started = time.perf_counter()
    init.draw(pieces, recipe.model, recipe.train.seed)
    seconds = time.perf_counter() - started
    shapes = {piece.name: tuple(piece.shape) for piece in pieces if len(piece.shape) > 1}
    times = {shape: _whole(shape) for shape in set(shapes.values())}
    return {
        "ranks": plan.layout.world_size,
        "values": sum(piece.tensor.numel() for piece in pieces),
        "seconds": seconds,
        "whole_values": sum(map(math.prod, shapes.values())),
        "whole_seconds": sum(times[shape] for shape in shapes.values()),
    }


def _whole(shape: tuple[int, ...]) -> float:
    values = torch.empty(min(math.prod(shape), TIMED))
    started = time.perf_counter()
    values.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(1))
    return (time.perf_counter() - started) * math.prod(shape) / values.numel()


def main() -> None:
    """Measure, and print the table as Markdown."""
    options = parser(__doc__)
    options.add_argument("recipes", nargs="*", metavar="RECIPE", default=list(NODES))
    options.add_argument("--threads", type=int, default=1, metavar="N")
    asked = options.parse_args()
    rows = {}
    print("| recipe | ranks | values | drawn in | whole tensors | drawn in |\n|---|---|---|---|---|---|")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in asked.recipes:
            row = rows[name] = processes.submit(measure, name, asked.threads).result()
            print(
                f"| {name} | {row['ranks']:,} | {row['values'] / 1e6:,.0f} M | {row['seconds']:.1f} s "
                f"| {row['whole_values'] / 1e6:,.0f} M | {row['whole_seconds']:.0f} s |",
                flush=True,
            )
    if asked.json is not None:
        found = {"machine": machine(), "threads": asked.threads, "rows": rows}
        asked.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
