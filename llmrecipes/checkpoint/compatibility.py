"""Which recipe keys a run may change when it is resumed, its engine among them.

Keys that determine the loss curve must not change. Keys that only determine where, how fast, how long and how observed
it runs may. The learning rate and its decay must not change either, because that would be a different experiment;
except for `train.train_iters` and `scheduler.lr_decay_iters`, so that a run can be extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrecipes.checkpoint.store import Entry
from llmrecipes.errors import UserError
from llmrecipes.nested import leaves
from llmrecipes.recipe.engines import can_read

FREE = (
    "description",
    "engine",
    "zero",
    "speed",
    "parallelism",
    "checkpoint",
    "tracking",
    "search",
    "train.train_iters",
    "train.micro_batch_size",
    "train.eval_interval",
    "train.eval_iters",
    "train.eval_at_start",
    "train.eval_tasks",
    "train.early_stop",
    "train.target_loss",
    "train.log_interval",
    "train.recompute_granularity",
    "train.recompute_method",
    "train.recompute_num_layers",
    "train.recompute_modules",
    "train.torch_compile",
    "train.loss_chunk_tokens",
    "train.initial_loss_scale",
    "train.min_loss_scale",
    "train.loss_scale_window",
    "train.hysteresis",
    "train.elastic",
    "train.exit_grace_seconds",
    "optimizer.ema_decay",
    "optimizer.use_precision_aware_optimizer",
    "optimizer.exp_avg_dtype",
    "optimizer.exp_avg_sq_dtype",
    "scheduler.lr_decay_iters",
    "distill.logits",
    "dpo.reference_log_probs",
    "data.num_workers",
    "data.prefetch_factor",
    "data.pin_memory",
    "data.multiple_validation_sets",
    "faults",
)
"""Keys, and sections with all their keys, that may differ from the recipe that wrote a checkpoint."""


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
    changes = differences(now, then)
    return [
        change for change in changes if not (_is_free(change.key) or _is_a_label(change) or _is_free_in_stages(change))
    ]


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
            fix=f"engine={written_by}, or a new run id",
        )


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _is_a_label(difference: Difference) -> bool:
    """Whether only names of sources in metrics differ."""
    if difference.key != "data.sources" or not isinstance(difference.then, list):
        return False
    then, now = ([{**source, "label": None} for source in sources] for sources in (difference.then, difference.now))
    return then == now


def _is_free_in_stages(difference: Difference) -> bool:
    """Whether stages differ only in keys that a run may change."""
    if difference.key != "stages" or not isinstance(difference.then, list) or not isinstance(difference.now, list):
        return False
    then, now = (
        [dict(leaf for leaf in leaves(stage) if not _is_free(leaf[0]) and leaf[1] != {}) for stage in stages]
        for stages in (difference.then, difference.now)
    )
    return then == now


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in leaves(recipe)}
