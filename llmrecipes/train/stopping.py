"""When a run ends by its held-out loss: patience, a target, and the best loss so far.

The state is in the manifest of every checkpoint, and the decision depends on it and on the recipe only: a run that was
killed decides as one that was not. The loss is the same on every rank, so all decide alike without a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmrecipes.checkpoint.manifest import Entry, Monitored
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.derived.stage_runs import stage_of
from llmrecipes.recipe.schema import Recipe, Train
from llmrecipes.tracking.events import ENDED_EARLY, Note

SPLIT = ""
"""Name of the valid split among the losses of held-out sets."""


def monitors(recipe: Recipe) -> bool:
    """Whether anything depends on the held-out loss, so that every checkpoint needs the evaluation of its step."""
    train = recipe.train
    return train.early_stop is not None or train.target_loss is not None or recipe.checkpoint.keep_best


def monitored(entry: Entry | None) -> Monitored:
    """The state that a start from this checkpoint has."""
    return (None if entry is None else entry.manifest.monitored) or Monitored()


def at_start(entry: Entry | None, plan: Plan) -> Monitored:
    """`monitored` for what is trained next.

    A stage whose held-out sequences are others than those of the stage before begins without a loss, unless the run has
    ended by it.
    """
    state = monitored(entry)
    recipe = plan.recipe
    span = plan.span
    if span is None or entry is None or entry.step != span.first_step or stop_reason(state, recipe.train) is not None:
        return state
    before = stage_of(plan.run_recipe, span.first_step, ending=True)
    if (before.model.seq_length, before.train.global_batch_size) == (
        recipe.model.seq_length,
        recipe.train.global_batch_size,
    ):
        return state
    return Monitored(step=state.step, since=span.first_step)


def after_evaluation(before: Monitored, step: int, losses: Mapping[str, float], train: Train) -> Monitored:
    """The state after an evaluation.

    Args:
        before: the state so far; it is returned if it has this step already.
        step: step of the evaluation.
        losses: in nats per token by set, of the valid split as `SPLIT`.
        train: names the set.
    """
    if before.step == step:
        return before
    first = SPLIT if SPLIT in losses else next(iter(losses))
    loss = losses[first if train.monitor is None else train.monitor]
    if not math.isfinite(loss):
        return before.model_copy(update={"step": step, "loss": None, "waited": before.waited + 1})
    least = train.early_stop.min_delta if train.early_stop is not None else 0.0
    update: dict[str, float | int | None] = {"step": step, "loss": loss, "waited": before.waited + 1}
    if before.best is None or loss < before.best:
        update |= {"best": loss, "best_step": step}
    if before.reference is None or loss < before.reference - least:
        update |= {"reference": loss, "waited": 0}
    return before.model_copy(update=update)


def stop_reason(now: Monitored, train: Train) -> str | None:
    """The key by which a run ends: `target_loss`, `early_stop`, or None."""
    if train.target_loss is not None and now.loss is not None and now.loss <= train.target_loss:
        return "target_loss"
    if train.early_stop is not None and now.waited >= train.early_stop.patience:
        return "early_stop"
    return None


def explained(reason: str, now: Monitored, train: Train) -> str:
    """A reason of `stop_reason` in words."""
    loss = "not finite" if now.loss is None else f"{now.loss:.4f}"
    if reason == "target_loss":
        return f"the held-out loss, {loss}, reached train.target_loss {train.target_loss:g}"
    best = "none" if now.best is None else f"{now.best:.4f} at step {now.best_step:,}"
    return f"the held-out loss, {loss}, did not improve in {now.waited} evaluations (train.early_stop); best: {best}"


def ended_early(now: Monitored, train: Train) -> tuple[Note, ...]:
    """The note of a run that ends before its last step; nothing for one that goes on."""
    reason = stop_reason(now, train)
    if reason is None or now.step >= train.train_iters:
        return ()
    details = {
        "reason": reason,
        "text": explained(reason, now, train),
        "loss": now.loss,
        "best": now.best,
        "best_step": now.best_step,
        "waited": now.waited,
        "rules": train.stop_rules,
    }
    return (Note(step=now.step, event=ENDED_EARLY, details=details),)
