"""A training in this process, without checkpoints: what benchmarks use that compare many short ones."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

from llmrecipes.recipe.schema import Recipe


def curve(job: Recipe, data_dir: Path) -> list[float]:
    """Validation losses after each `train.eval_interval` steps and after the last; it ends early if the loss diverges.

    The losses are those of `llmrecipes train` with the same recipe.

    Args:
        job: of one rank.
        data_dir: where prepared data is, or will be.
    """
    from llmrecipes.data.prepare import prepare
    from llmrecipes.engine.backends import backend
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.train.loaders import open_loaders

    prepared = prepare(job, data_dir)
    engines = backend(job)
    platform = engines.platform()
    steps, interval = job.train.train_iters, job.train.eval_interval
    losses: list[float] = []
    with engines.join(job, platform) as world:
        loaders = open_loaders(job, prepared, world, pin_memory=False)
        engine = engines.build(derive(job, world.size, detect()), platform)
        try:
            with closing(loaders.train(0)) as batches:
                for step in range(1, steps + 1):
                    if not math.isfinite(engine.train_step(batches).loss):
                        return losses
                    if step % interval and step < steps:
                        continue
                    assert loaders.valid is not None
                    loss = engine.evaluate(loaders.valid(), job.train.eval_iters)
                    if loss is None or not math.isfinite(loss):
                        return losses
                    losses.append(loss)
        finally:
            engine.close()
    return losses


def last_loss(job: Recipe, data_dir: Path) -> float:
    """The validation loss after the last step; NaN if the training diverges."""
    evaluations = -(-job.train.train_iters // job.train.eval_interval)
    losses = curve(job, data_dir)
    return losses[-1] if len(losses) == evaluations else math.nan
