"""`llmrecipes merge --to run`: checkpoints of runs become the checkpoint of step 0 of a new run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hf.merge_options import MergeOptions, resolve
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.importing import finish_run, write_checkpoint
from llmrecipes.workflow.merge import require_different
from llmrecipes.workflow.recorded import run_recipe
from llmrecipes.workflow.tensors import find_checkpoint

if TYPE_CHECKING:
    import torch

    from llmrecipes.hf.tensors import TensorSource


@dataclass(frozen=True)
class MergedRun:
    """A run before its first step.

    Attributes:
        run_dir: its directory, with recipe.yaml and the checkpoint of step 0.
        models: as they were given, without the base.
        base: likewise; None: the method has none.
        merge: method and numbers.
        seconds: that it took.
    """

    run_dir: str
    models: tuple[str, ...]
    base: str | None
    merge: dict[str, Any]
    seconds: float


def merge_runs(
    models: Sequence[str], options: MergeOptions, runs_dir: Path, run_id: str, base: str | None = None
) -> MergedRun:
    """Merge checkpoints of runs into a run that `llmrecipes train`, `generate` and `eval` take like any other.

    Its recipe is that of the first run, and its optimizer is new. Any model can be merged so, also one without a form
    in transformers. One process without a GPU reads one tensor of every model at a time.

    Args:
        models: each `RUN` (its newest checkpoint) or `RUN@STEP`.
        options: method and numbers.
        runs_dir: where runs are kept.
        run_id: of the new run.
        base: the run that the others were fine-tuned from, likewise.

    Raises:
        UserError: as `workflow.merge.merge`, or recipes of different models. Nothing that looks like a run is left.
    """
    numbers = resolve(options, len(models), base=base is not None)
    from llmrecipes.engine.registry import backend
    from llmrecipes.hf.folder import published
    from llmrecipes.hf.merged import Input, MergedTensors

    started = time.monotonic()
    names = [*models, *([] if base is None else [base])]
    require_different(names, names)
    found = {name: find_checkpoint(name, runs_dir) for name in names}
    require_different(names, [str(entry.path.resolve()) for _, entry in found.values()])
    recipes = {name: run_recipe(run) for name, (run, _) in found.items()}
    _require_same_models(recipes)
    inputs = {name: Input(name, backend(recipes[name]).tensors(entry)) for name, (_, entry) in found.items()}
    merged = MergedTensors(numbers, [inputs[name] for name in models], None if base is None else inputs[base])
    recipe = recipes[models[0]]
    run_dir = runs_dir / recipe.name / run_id
    with published(run_dir, "--runs-dir DIR") as hidden:
        write_checkpoint(recipe, Boxes(merged), hidden)
        seconds = round(time.monotonic() - started, 3)
        made = MergedRun(str(run_dir), tuple(models), base, numbers.as_dict(), seconds)
        finish_run(hidden, recipe, asdict(made))
    return made


class Boxes:
    """Whole tensors, given away in boxes (`engine.base.WeightSource`); the last one is kept in memory."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightSource`."""
        if self._last is None or self._last[0] != name:
            self._last = None  # frees the one before
            self._last = name, self._source.read(name)
        box = self._last[1][tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        if tuple(box.shape) != shape:
            raise RuntimeError(f"{name} has no box of {shape} at {offset}")
        return box


def _require_same_models(recipes: Mapping[str, Recipe]) -> None:
    from llmrecipes.data.prepared import fingerprint

    (first, expected), *others = recipes.items()
    for name, recipe in recipes.items():
        if recipe.lora is not None:
            raise UserError(
                "it trained an adapter", where=f"{name}: lora", rule="runs that trained all weights", fix="--to hf"
            )
    for name, recipe in others:
        model, other = expected.model.model_dump(mode="json"), recipe.model.model_dump(mode="json")
        for key in model:
            if model[key] != other[key]:
                raise UserError(
                    f"{other[key]!r}, and {model[key]!r} in {first}",
                    where=f"{name}: model.{key}",
                    rule="only runs of one model can be merged",
                )
        same = expected.data.tokenizer == recipe.data.tokenizer
        if same and recipe.data.tokenizer.type == "bpe":  # trained on the data
            same = fingerprint(expected) == fingerprint(recipe)
        if not same:
            raise UserError(
                f"not the tokenizer of {first}",
                where=f"{name}: data.tokenizer",
                rule="only runs with one tokenizer can be merged",
            )
