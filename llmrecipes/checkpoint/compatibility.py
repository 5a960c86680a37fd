"""Which recipe keys a run may change when it is resumed, its engine among them.

How a run is executed may change, what it learns must not (`recipe.halves`): that would be a different experiment. The
few learned keys that may change all the same are in `FREE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrecipes.checkpoint.store import Entry
from llmrecipes.errors import UserError
from llmrecipes.nested import leaves
from llmrecipes.recipe.engines import can_read
from llmrecipes.recipe.halves import learned

FREE = frozenset(
    {
        # A run can be extended, or ended earlier.
        "train.train_iters", "scheduler.lr_decay_iters", "train.early_stop", "train.target_loss",
        # How often, and on how much, it is measured.
        "train.eval_interval", "train.eval_iters",
        # The loss scale is in the checkpoint; these only say how it moves on.
        "train.initial_loss_scale", "train.min_loss_scale", "train.loss_scale_window", "train.hysteresis",
        # Computed beside the weights.
        "optimizer.ema_decay",
        # What a run that no longer fits its machine may give up: bytes of moments and gradients.
        "optimizer.use_precision_aware_optimizer", "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype",
        "train.grad_reduce_in_fp32", "train.reduce_scatter_with_fp32_accumulation",
        # What to do about a spike is decided when there is one.
        "faults.loss_spike_action", "faults.loss_spike_window", "faults.loss_spike_sigmas",
        "faults.loss_spike_rewind_steps", "faults.loss_spike_max_rewinds",
    }
)  # fmt: skip
"""Learned keys that may differ from the recipe that wrote a checkpoint."""


@dataclass(frozen=True)
class Difference:
    """A key whose value has changed."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.then!r} when it was started, {self.now!r} now"


def compatibility(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Difference]:
    """Keys that differ and must not.

    Args:
        now: the resolved recipe of this command, as nested dicts.
        then: the recipe the run was started with.
    """
    return differences(learned(now, FREE), learned(then, FREE))


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Difference]:
    """All keys that differ, in alphabetical order."""
    flat_now, flat_then = _flat(now), _flat(then)
    keys = sorted(flat_now.keys() | flat_then.keys())
    pairs = ((key, flat_then.get(key), flat_now.get(key)) for key in keys)
    return [Difference(key, old, new) for key, old, new in pairs if old != new]


def require_compatible(now: Mapping[str, Any], then: Mapping[str, Any], *, where: str) -> None:
    """Refuse to resume a run of a different recipe.

    Args:
        now, then: see `compatibility`.
        where: the run directory.

    Raises:
        UserError: with every key that differs and must not.
    """
    if differences := compatibility(now, then):
        raise UserError(
            "this run was started with a different recipe:\n    " + "\n    ".join(map(str, differences)),
            where=where,
            rule="a resumed run keeps its model, data, batch, seed, precision and learning rate",
            fix="set these keys back, or start a new run with another run id",
        )


def require_readable(entry: Entry, engine: str) -> None:
    """Refuse a checkpoint of an engine whose state this one cannot load.

    Args:
        entry: the checkpoint.
        engine: name of the engine that is to load it.

    Raises:
        UserError: it cannot.
    """
    written_by = entry.manifest.engine
    if not can_read(engine, written_by):
        raise UserError(
            f"this checkpoint was written by engine {written_by}, but the recipe uses {engine}",
            where=str(entry.path),
            rule=f"{engine} cannot load the state of {written_by}",
            fix=f"layout.engine={written_by}, or a new run id",
        )


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in leaves(recipe)}
