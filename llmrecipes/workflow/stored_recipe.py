"""The recipe that a run was started with, and what resuming with a different one would change: architecture, learning
rate, order of the data."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from pathlib import Path

from llmrecipes.checkpoint.compatibility import require_compatible, require_readable
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import decay_iters
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run


def require_same_recipe(recipe: Recipe, run: Run, data_dir: Path, *, accept: bool) -> None:
    """Refuse to resume an existing run with a recipe that would change its training.

    Args:
        recipe: the recipe of this command.
        run: the run.
        data_dir: where prepared data is kept.
        accept: whether the user has accepted what a different number of steps changes.

    Raises:
        UserError: what differs; its engine cannot load the run's checkpoint; or the recipe of the run is corrupt.
    """
    newest = run.newest()
    if newest is not None:
        require_readable(newest, engine_name(recipe))
    then = run.started_recipe()
    if then is None:
        return
    require_compatible(recipe.model_dump(mode="json"), then.model_dump(mode="json"), where=str(run.path))
    step = 0 if newest is None else newest.step
    require_accepted(recipe, then, step, run_dir=run.path, data_dir=data_dir, accept=accept)


logger = logging.getLogger(__name__)

Order = tuple[tuple[int, bool], ...]
"""For each source: epochs, and whether the last one is shuffled separately."""


def require_accepted(now: Recipe, then: Recipe, step: int, *, run_dir: Path, data_dir: Path, accept: bool) -> None:
    """Refuse a number of steps that changes the rest of a run, unless the user accepts it.

    A learning rate that `scheduler.lr_decay_iters` defines is intended.

    Args:
        now, then: the recipe of this command, and that of the run.
        step: steps done.
        run_dir: the run.
        data_dir: where its data is, if it is prepared here.
        accept: whether the user has accepted what changes.

    Raises:
        UserError: what changes, and both ways to resume.
    """
    if not step or now.train.train_iters == then.train.train_iters:
        return
    rate, order = _rate_change(now, then, step), _order_change(now, then, data_dir)
    changes = [what for what, _ in (rate, order) if what]
    if not changes:
        return
    steps = f"train.train_iters is {now.train.train_iters} and was {then.train.train_iters}"
    if accept:
        logger.warning("%s: %s; %s", run_dir, steps, "; ".join(changes))
        return
    fixes = [fix for _, fix in (rate, order) if fix]
    raise UserError(
        f"{steps}, which changes the rest of this run:\n    " + "\n    ".join(changes),
        where=str(run_dir),
        rule="a resumed run keeps its learning rate and the order of its data, unless its changes are accepted",
        fix=f"{' and '.join(fixes)}; or --accept-changes",
    )


def _rate_change(now: Recipe, then: Recipe, step: int) -> tuple[str, str]:
    before, after = decay_iters(then), decay_iters(now)
    if before == after or now.scheduler.lr_decay_iters is not None or now.scheduler.lr_decay_style == "constant":
        return "", ""
    from llmrecipes.engine.backends import backend

    old, new = (backend(recipe).learning_rate(recipe, step + 1) for recipe in (then, now))
    what = f"learning rate: decays until step {after}, not {before}; in step {step + 1} it is {new:.1e}, not {old:.1e}"
    return what, f"scheduler.lr_decay_iters={before} keeps the learning rate"


def _order_change(now: Recipe, then: Recipe, data_dir: Path) -> tuple[str, str]:
    from llmrecipes.data.prepared import open_prepared

    if then.data.chat is not None:
        return "", ""  # each pass over conversations is shuffled by itself
    try:
        prepared = open_prepared(then, data_dir)
    except UserError:
        return "", ""  # prepared on another machine, where the same check runs
    length = then.model.seq_length
    usable = prepared.usable("train", length)
    tokens = [prepared.manifest.sources[n].splits["train"].tokens for n in usable]
    weights = [prepared.weights[n] for n in usable]

    def order(iters: int) -> Order:
        return sample_order(tokens, weights, length, iters * then.train.global_batch_size)

    first, last = then.train.train_iters, now.train.train_iters
    if order(first) == order(last):
        return "", ""
    passes = [max(count for count, _ in order(iters)) for iters in (last, first)]
    what = f"data: {passes[0]} passes over it are shuffled together instead of {passes[1]}, so the order changes"
    if last < first:
        return what, f"train.train_iters={first} keeps the order of the data"
    longest = first - 1 + bisect_left(range(first, last), True, key=lambda iters: order(iters) != order(first))
    return what, f"train.train_iters={longest} or less keeps the order of the data"


def sample_order(tokens: list[int], weights: list[float], seq_length: int, samples: int) -> Order:
    """What megatron-core's order of a run's samples depends on, besides its seed.

    Args:
        tokens, weights: of each source.
        seq_length: tokens per sample.
        samples: number that the run draws.
    """
    parts = [samples if len(tokens) == 1 else math.ceil(samples * w / sum(weights)) + 1 for w in weights]
    return tuple(_passes(count, seq_length, part) for count, part in zip(tokens, parts, strict=True))


def _passes(tokens: int, seq_length: int, samples: int) -> tuple[int, bool]:
    # As in GPTDataset: the last epoch is shuffled separately if less than 80 % of it is drawn.
    passes = max(1, math.ceil((samples * seq_length + 1) / tokens))
    if passes == 1:
        return 1, False
    before = ((passes - 1) * tokens - 1) // seq_length
    return passes, samples - before < int(0.8 * ((tokens - 1) // seq_length))
