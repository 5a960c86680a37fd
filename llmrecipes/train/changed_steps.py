"""What another number of steps changes in the rest of a run that is resumed."""

from __future__ import annotations

import logging

from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.stages import decay_iters
from llmrecipes.recipe.schema import Recipe

logger = logging.getLogger(__name__)


def require_accepted(now: Recipe, then: Recipe, step: int, *, where: str, accept: bool) -> None:
    """Refuse a number of steps that changes the rest of a run, unless the user accepts it.

    A learning rate that `scheduler.lr_decay_iters` defines is intended.

    Args:
        now, then: the recipe of this command, and that of the run.
        step: steps done.
        where: the run.
        accept: whether the user has accepted what changes.

    Raises:
        UserError: what changes, and both ways to resume.
    """
    if not step or now.train.train_iters == then.train.train_iters:
        return
    rate = _rate_change(now, then, step)
    order = _order_change(now, then)
    changes = [what for what, _ in (rate, order) if what]
    if not changes:
        return
    steps = f"train.train_iters is {now.train.train_iters} and was {then.train.train_iters}"
    if accept:
        logger.warning("%s: %s; %s", where, steps, "; ".join(changes))
        return
    fixes = [fix for _, fix in (rate, order) if fix]
    raise UserError(
        f"{steps}, which changes the rest of this run:\n    " + "\n    ".join(changes),
        where=where,
        rule="a resumed run keeps its learning rate and the order of its data, unless its changes are accepted",
        fix=f"{' and '.join(fixes)}; or --accept-changes",
    )


def _rate_change(now: Recipe, then: Recipe, step: int) -> tuple[str, str]:
    before, after = decay_iters(then), decay_iters(now)
    same = now.scheduler.lr_decay_style in ("constant", "inverse-square-root")  # whatever the number of steps
    if same or before == after or now.scheduler.lr_decay_iters is not None:
        return "", ""
    from llmrecipes.engine.backends import backend

    old, new = (backend(recipe).learning_rate(recipe, step + 1) for recipe in (then, now))
    what = f"learning rate: decays until step {after}, not {before}; in step {step + 1} it is {new:.1e}, not {old:.1e}"
    return what, f"scheduler.lr_decay_iters={before} keeps the learning rate"


def _order_change(now: Recipe, then: Recipe) -> tuple[str, str]:
    if then.data.curriculum is None:
        return "", ""  # each pass is shuffled by itself, whatever their number
    what = f"data: a curriculum of {now.train.train_iters:,} steps sorts other documents together than one of "
    return f"{what}{then.train.train_iters:,}", f"train.train_iters={then.train.train_iters} keeps it"
