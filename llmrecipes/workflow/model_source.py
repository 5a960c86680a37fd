"""Models by reference (a run, one of its checkpoints, or a Hugging Face folder), with adapters merged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.rundir import Run
from llmrecipes.workflow.pretrained import base_folder, entered_as

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry
    from llmrecipes.hf.adapter import Merged
    from llmrecipes.hf.safetensors import TensorSource
    from llmrecipes.hf.table import Family
    from llmrecipes.recipe.schema import Lora, Model, Recipe


@dataclass(frozen=True)
class Opened:
    """A model whose weights are read one at a time.

    Attributes:
        source: its weights, by the names of transformers.
        config: its config.json; of a run, without what the tokenizer says.
        folder: the folder, or the directory of the run.
    """

    source: TensorSource
    config: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class OpenedRun(Opened):
    """A checkpoint of a run.

    Attributes:
        family: whose names and form the weights have.
        recipe: recipe of the run.
        entry: the checkpoint.
        notes: how the family was chosen, if others fit and nobody named one.
    """

    family: Family
    recipe: Recipe
    entry: Entry
    notes: tuple[str, ...] = ()


def open_tensors(reference: str, runs_dir: Path, family: str | None = None) -> Opened:
    """Open a model.

    Args:
        reference: `RUN`, `RUN@STEP`, or a folder with config.json and safetensors.
        runs_dir: where runs are kept.
        family: `model_type` for a run; None: that of the model that it started from, or the first that has its form.

    Raises:
        UserError: no such run, checkpoint or folder; it is corrupt; or a run's model has no form in
            transformers.
    """
    folder = Path(reference)
    if (folder / "config.json").is_file():
        from llmrecipes.hf.safetensors import SafetensorsFolder

        source = SafetensorsFolder(folder)
        return Opened(source, dict(source.config), folder)
    run, entry = find_checkpoint(reference, runs_dir)
    return open_run(run, entry, family)


def open_run(
    run: Path,
    entry: Entry,
    family: str | None = None,
    *,
    averaged: bool = False,
    supported: Collection[str] | None = None,
) -> OpenedRun:
    """Open a checkpoint of a run; arguments and errors as `open_tensors`.

    Args:
        averaged: read the moving average of the weights.
        supported: families of which that of the model that the run started from has to be one; None: any.
    """
    from llmrecipes.engine.backends import stored_weights
    from llmrecipes.hf.family import config_of
    from llmrecipes.hf.weights import AsHuggingFace

    recipe = Run(run).recipe_of(entry.step)
    chosen, notes = _family(run, recipe.model, family, supported)
    if recipe.lora is not None:
        weights: TensorSource = merged(run, entry, recipe, averaged=averaged)
    else:
        weights = stored_weights(recipe, entry, averaged=averaged)
    source = AsHuggingFace(weights, chosen, recipe.model)
    return OpenedRun(source, config_of(chosen, recipe.model), run, chosen, recipe, entry, notes)


def _family(
    run: Path, model: Model, named: str | None, supported: Collection[str] | None
) -> tuple[Family, tuple[str, ...]]:
    """The family of a run's model, and what to say about it."""
    from llmrecipes.hf.family import families_of, family_of

    entered = entered_as(run)
    fitting = {family.name: family for family in families_of(model)}
    if named is None and entered in fitting and (supported is None or entered in supported):
        return fitting[entered], ()
    chosen = family_of(model, named)
    others = [name for name in fitting if name != chosen.name]
    if named is not None or (not others and entered in (None, chosen.name)):
        return chosen, ()
    why = "the first family that fits" if entered is None else f"not {entered}, as which the model entered"
    fit = f"; --family {' or '.join(others)} fits too" if others else ""
    return chosen, (f"written as {chosen.name}, {why}{fit}",)


def find_checkpoint(reference: str, runs_dir: Path) -> tuple[Path, Entry]:
    """The run and the checkpoint of `RUN` (its newest), `RUN@STEP` or `RUN@best` (of the lowest held-out loss).

    Names, sizes and the manifest are checked; hashing all files would read the optimizer's state too, most of a
    checkpoint.

    Raises:
        UserError: there is none, or it is incomplete.
    """
    from llmrecipes.checkpoint.manifest import InvalidCheckpoint, inspect
    from llmrecipes.checkpoint.store import require_best

    name, _, step = reference.rpartition("@")
    if not name or Path(reference).exists():
        name, step = reference, ""
    run = Run.find(name, runs_dir).path
    store = Run(run).store()
    entries = store.entries()
    if not step:
        if entries:
            return run, entries[-1]
        corrupt = "; ".join(map(str, store.incomplete()))
        raise UserError(f"no valid checkpoint{': ' + corrupt if corrupt else ''}", where=str(store.directory))
    if step == "best":
        return run, require_best(store)
    if not step.isdecimal():
        rule = "name a checkpoint as RUN@STEP, with its step, or as RUN@best"
        raise UserError(f"{step!r} is not a step", where=reference, rule=rule)
    steps = ", ".join(str(entry.step) for entry in entries)
    fix = f"one of the steps {steps}" if steps else ""
    path = store.path(int(step))
    if not path.is_dir():
        raise UserError(f"no checkpoint of step {step}", where=str(store.directory), fix=fix)
    try:
        return run, inspect(path, full=False)
    except InvalidCheckpoint as problem:
        raise UserError(f"this checkpoint is corrupt: {problem}", where=str(path), fix=fix) from problem


def merged(run: Path, entry: Entry, recipe: Recipe, *, averaged: bool = False) -> Merged:
    """Weights of a run's model with its adapters added, by the names of megatron-core.

    With `averaged`, the adapters are their moving average (`optimizer.ema_decay`).

    Raises:
        UserError: the run has no base model, or that has changed.
    """
    from llmrecipes.engine.backends import stored_weights
    from llmrecipes.hf.adapter import Merged
    from llmrecipes.hf.weights import open_weights

    base = open_weights(base_of(run, recipe), recipe.model)
    return Merged(base, stored_weights(recipe, entry, averaged=averaged), recipe.model, lora_of(recipe, run))


def require_merge(recipe: Recipe, run: Path, *, requested: bool) -> None:
    """Check that `--merge-adapter` is set for a run with adapters, and for no other.

    Raises:
        UserError: it is not.
    """
    if recipe.lora is None and requested:
        raise _without(run, "--merge-adapter", "without it: the checkpoint has all weights")
    if recipe.lora is not None and not requested:
        raise UserError(
            "this run trained only adapters",
            where=str(run),
            rule="a complete model is the base model with the adapters merged",
            fix="--merge-adapter, or --to peft for the adapters only",
        )


def lora_of(recipe: Recipe, run: Path) -> Lora:
    """The section `lora` of a run, for an export.

    Raises:
        UserError: it has none, or a key without a counterpart in PEFT.
    """
    from llmrecipes.hf.adapter import KEYS
    from llmrecipes.hf.table import defaults

    if recipe.lora is None:
        raise _without(run, "--to", "--to hf, which writes all weights")
    for key, default in defaults(type(recipe.lora)).items():
        if key not in KEYS and getattr(recipe.lora, key) != default:
            raise UserError(
                f"{getattr(recipe.lora, key)} is not supported by PEFT",
                where=f"lora.{key}",
                rule=f"exported adapters must have the default, {default}",
            )
    return recipe.lora


def base_of(run: Path, recipe: Recipe) -> Path:
    """Folder of the model that a run's adapters belong to.

    Raises:
        UserError: they belong to initial values, or the model has changed.
    """
    if recipe.train.pretrained is None:
        raise UserError(
            "not set: the adapters were trained on random initial weights",
            where="train.pretrained",
            rule="PEFT export needs a published base model (train.pretrained)",
            fix="train them with train.pretrained, a folder or a name on the Hub",
        )
    return base_folder(run, recipe)


def _without(run: Path, option: str, fix: str) -> UserError:
    return UserError(
        f"{run} has no adapters", where=option, rule="only runs with a lora section have adapters", fix=fix
    )
