"""What an asynchronous save costs the training loop on gpt-tiny.

    python -m benchmarks.checkpoint_wait --json checkpoint.json

The loop waits while the state is described (`sharded_state`) and copied (`AsyncSaver.save`); the rest is written in the
background, and the steps meanwhile are slower. Both are compared with the median step in front of the save.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import close, machine, parser, show
from lab.gpu_report.rivals import micro_batches
from llmrecipes.recipe.load import load, recipe_hash

QUIET_STEPS = 8
"""Steps in front of each save that tell how long a step takes."""


def measure(recipe_name: str, saves: int) -> list[dict[str, Any]]:
    """Train a recipe and save now and then; seconds of each part of each save."""
    import torch

    from llmrecipes.checkpoint.manifest import CheckpointInfo
    from llmrecipes.checkpoint.saver import AsyncSaver, SaveReport, saver_group
    from llmrecipes.checkpoint.store import CheckpointStore
    from llmrecipes.engine.core.checkpoint.format import ShardedFormat
    from llmrecipes.engine.core.model.gpt import build
    from llmrecipes.engine.core.platform import select
    from llmrecipes.engine.core.world import join
    from llmrecipes.engine.megatron.engine import MegatronEngine
    from llmrecipes.engine.megatron.state import Progress, sharded_state
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive

    recipe = load(recipe_name).recipe
    micro, length = recipe.layout.micro_batch_size, recipe.model.seq_length
    rest = {"loss_mask": torch.ones(micro, length), "position_ids": torch.arange(length).repeat(micro, 1)}
    batches = ({"tokens": tokens, "labels": labels, **rest} for tokens, labels in micro_batches(recipe))
    platform = select()
    platform.install()
    with join(platform, recipe.train.seed, recipe.layout) as world, tempfile.TemporaryDirectory() as folder:
        plan = derive(recipe, world.size, detect())
        engine = MegatronEngine(plan, build(plan, platform), platform)
        store = CheckpointStore(Path(folder) / "checkpoints")
        found = []

        def step() -> float:
            started = time.perf_counter()
            engine.train_step(batches)
            return time.perf_counter() - started

        with AsyncSaver(store, saver_group(), ShardedFormat(), most_recent_k=2) as saver:
            gc.collect()
            gc.freeze()
            for number in range(1, saves + 1):
                quiet = [step() for _ in range(QUIET_STEPS)]
                info = CheckpointInfo(
                    step=number, consumed_samples=0, consumed_tokens=0, layout={}, recipe_hash=recipe_hash(recipe)
                )
                started = time.perf_counter()
                state = sharded_state(engine, Progress(step=number))
                described = time.perf_counter()
                saver.save(state, info)
                waited = time.perf_counter()
                during: list[float] = []
                reports: list[SaveReport] = []
                while not reports:
                    during.append(step())
                    reports = saver.poll()
                assert reports[0].path is not None, reports[0].error
                found.append(
                    {
                        "step": statistics.median(quiet),
                        "describe": described - started,
                        "copy": waited - described,
                        "write": reports[0].seconds,
                        "step_meanwhile": statistics.mean(during),
                        "steps_meanwhile": len(during),
                    }
                )
    return found


def main() -> None:
    """Print one line a save."""
    options = parser(__doc__)
    options.add_argument("--recipe", default="gpt-tiny")
    options.add_argument("--saves", type=int, default=6)
    chosen = options.parse_args()
    started_on = machine()
    saves = measure(chosen.recipe, chosen.saves)
    for save in saves:
        save["wait_over_step"] = (save["describe"] + save["copy"]) / save["step"]
        save["slowdown_meanwhile"] = save["step_meanwhile"] / save["step"] - 1
    rows = [
        [
            f"save {number}",
            *(f"{1000 * save[name]:.1f}" for name in ("step", "describe", "copy")),
            f"{100 * save['wait_over_step']:.1f} %",
            f"{1000 * save['write']:.0f}",
            f"{1000 * save['step_meanwhile']:.1f}",
            f"{100 * save['slowdown_meanwhile']:+.0f} %",
        ]
        for number, save in enumerate(saves, 1)
    ]
    columns = ("ms", "step", "describe", "copy", "wait / step", "written after", "step meanwhile", "slower")
    show(f"{chosen.recipe}: what a save costs the loop", columns, rows)
    later = saves[1:] or saves
    figures = {
        "saves": saves,
        "wait_over_step_first": saves[0]["wait_over_step"],
        "wait_over_step_later": statistics.median(save["wait_over_step"] for save in later),
        "slowdown_meanwhile_later": statistics.median(save["slowdown_meanwhile"] for save in later),
    }
    print(f"median of the later saves: the loop waits {100 * figures['wait_over_step_later']:.1f} % of a step")
    close(figures, started_on, chosen.json)


if __name__ == "__main__":
    main()
