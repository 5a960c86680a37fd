"""Runs with adapters: their base model, and that with the adapters added."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.errors import UserError
from llmrecipes.workflow.pretrained import base_folder

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry
    from llmrecipes.hf.adapter import Merged
    from llmrecipes.recipe.lora import Lora
    from llmrecipes.recipe.schema import Recipe


def merged(run: Path, entry: Entry, recipe: Recipe, *, averaged: bool = False) -> Merged:
    """Weights of a run's model with its adapters added, by the names of megatron-core.

    With `averaged`, the adapters are their moving average (`optimizer.ema_decay`).

    Raises:
        UserError: the run has no base model, or that has changed.
    """
    from llmrecipes.engine.registry import backend
    from llmrecipes.hf.adapter import Merged
    from llmrecipes.hf.weights import open_weights

    base = open_weights(base_of(run, recipe), recipe.model)
    return Merged(base, backend(recipe).tensors(entry, averaged=averaged), recipe.model, lora_of(recipe, run))


def require_merge(recipe: Recipe, run: Path, *, asked: bool) -> None:
    """A whole model of a run with adapters is written when it is asked for, and of no other run.

    Raises:
        UserError: it is not so.
    """
    if recipe.lora is None and asked:
        raise _without(run, "--merge-adapter", "without it: the checkpoint has all weights")
    if recipe.lora is not None and not asked:
        raise UserError(
            "this run has trained adapters alone",
            where=str(run),
            rule="a whole model has them added to the weights of their base model",
            fix="--merge-adapter; or --to peft, which writes the adapters for their base model",
        )


def lora_of(recipe: Recipe, run: Path) -> Lora:
    """The section `lora` of a run, for an export.

    Raises:
        UserError: it has none, or a key that is not exported.
    """
    from llmrecipes.hf.adapter import KEYS
    from llmrecipes.hf.table import defaults

    if recipe.lora is None:
        raise _without(run, "--to", "--to hf, which writes all weights")
    for key, default in defaults(type(recipe.lora)).items():
        if key not in KEYS and getattr(recipe.lora, key) != default:
            raise UserError(
                f"{getattr(recipe.lora, key)} has no form in PEFT",
                where=f"lora.{key}",
                rule=f"exported adapters have the default, {default}",
            )
    return recipe.lora


def base_of(run: Path, recipe: Recipe) -> Path:
    """Folder of the model that a run's adapters belong to.

    Raises:
        UserError: they belong to initial values, or the model has changed.
    """
    if recipe.train.pretrained is None:
        raise UserError(
            "not set: the adapters belong to initial values",
            where="train.pretrained",
            rule="adapters are exported for a model that others have too",
            fix="train them with train.pretrained, a folder or a name on the Hub",
        )
    return base_folder(run, recipe)


def _without(run: Path, option: str, fix: str) -> UserError:
    return UserError(
        f"{run} has no adapters", where=option, rule="adapters are those of a run whose recipe has lora", fix=fix
    )
