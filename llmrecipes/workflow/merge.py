"""`llmrecipes merge`: models of one shape become one, tensor by tensor, as a folder or as step 0 of a new run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hf.merge_options import METHODS, Merge, MergeOptions, resolve
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.workflow.importing import finish_run, write_checkpoint
from llmrecipes.workflow.tensors import Opened, OpenedRun, find_checkpoint, open_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from llmrecipes.hf.tensors import TensorSource
    from llmrecipes.tracking.progress import Counted


COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json",
)  # fmt: skip
"""Files beside the weights that a merged model takes from the first one, where it has them."""
ELEMENT_TYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Output:
    """How the merged model is written.

    Attributes:
        folder: its name; nothing has it yet.
        dtype: fp32, bf16 or fp16; None: that of the first model, which is the precision of the recipe if it is a run.
        shard_bytes: largest file of weights.
        tokenizer: compare and write tokenizers.
    """

    folder: Path
    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    tokenizer: bool = True


@dataclass(frozen=True)
class MergeResult:
    """What was merged and written.

    Attributes:
        path: the folder.
        models: as they were given, without the base.
        base: likewise; None: the method has none.
        merge: `Merge.as_dict`: method and numbers.
        tensors: how many.
        parameters: their elements.
        bytes: of the weights.
        shards: files of weights.
        seconds: that it took.
    """

    path: str
    models: tuple[str, ...]
    base: str | None
    merge: dict[str, Any]
    tensors: int
    parameters: int
    bytes: int
    shards: int
    seconds: float


def merge(
    models: Sequence[str],
    options: MergeOptions,
    output: Output,
    runs_dir: Path,
    data_dir: Path,
    base: str | None = None,
    progress: Counted | None = None,
) -> MergeResult:
    """Merge models into a folder that transformers can load.

    Everything is checked before the first byte is written: options, and whether configuration, tensors and tokenizers
    of all models agree. One process without a GPU reads one tensor of every model at a time; memory peaks at a few fp32
    copies of the largest one: about four for a mean, six with a base, eight where two models vote on signs.

    Args:
        models: each `RUN` (its newest checkpoint), `RUN@STEP`, or a folder with config.json and safetensors.
        options: method and numbers.
        output: where and how.
        runs_dir: where runs are kept.
        data_dir: where prepared data is kept, with the tokenizers of runs.
        base: the model that the others were fine-tuned from, likewise.
        progress: shows how much is written.

    Raises:
        UserError: an option that the method does not have, a model that is missing, corrupt, named twice or of another
            kind, a value that is not finite, a folder that exists, or a full disk. Nothing is left behind.
    """
    numbers = resolve(options, len(models), base=base is not None)
    if output.dtype is not None and output.dtype not in ELEMENT_TYPES:
        raise UserError(f"{output.dtype!r}", where="--dtype", rule=f"one of {', '.join(ELEMENT_TYPES)}")
    from llmrecipes.hf.agreement import require_same_configs, require_same_tokenizers
    from llmrecipes.hf.export import write
    from llmrecipes.hf.folder import published, require_absent
    from llmrecipes.hf.merged import Input, MergedTensors

    started = time.monotonic()
    require_absent(output.folder)
    names = [*models, *([] if base is None else [base])]
    require_different(names, names)
    opened = {name: open_tensors(name, runs_dir) for name in names}
    require_different(names, [_identity(each) for each in opened.values()])
    require_same_configs({name: each.config for name, each in opened.items()})
    if output.tokenizer:
        require_same_tokenizers({name: _tokenizer_folder(each, data_dir) for name, each in opened.items()})
    inputs = {name: Input(name, each.source) for name, each in opened.items()}
    merged = MergedTensors(numbers, [inputs[name] for name in models], None if base is None else inputs[base])
    first = opened[models[0]]
    dtype = output.dtype or (first.recipe.train.precision if isinstance(first, OpenedRun) else None)
    with published(output.folder) as folder:
        special = _write_companions(first, data_dir, folder, tokenizer=output.tokenizer)
        written = write(merged, {**_config(first.config), **special}, folder, dtype, output.shard_bytes, progress)
        (folder / "README.md").write_text(_card(models, base, numbers), "utf-8")
    return MergeResult(
        path=str(output.folder),
        models=tuple(models),
        base=base,
        merge=numbers.as_dict(),
        tensors=written.tensors,
        parameters=written.parameters,
        bytes=written.bytes,
        shards=len(written.shards),
        seconds=round(time.monotonic() - started, 3),
    )


def _identity(opened: Opened) -> str:
    return str((opened.entry.path if isinstance(opened, OpenedRun) else opened.folder).resolve())


def require_different(names: Sequence[str], identities: Sequence[str]) -> None:
    """Check that no model is given twice.

    Args:
        names: as the user gave them.
        identities: what is the same for two names of one model.

    Raises:
        UserError: with the second name.
    """
    seen: dict[str, str] = {}
    for name, identity in zip(names, identities, strict=True):
        if identity in seen:
            other = seen[identity]
            raise UserError(
                "the model is named twice" if name == other else f"the same model as {other}",
                where=name,
                rule="every model, the base among them, is named once",
                fix="--weights gives a model more weight",
            )
        seen[identity] = name


def _tokenizer_folder(opened: Opened, data_dir: Path) -> Path:
    if not isinstance(opened, OpenedRun):
        return opened.folder
    from llmrecipes.data.prepared import open_prepared

    return open_prepared(opened.recipe, data_dir).path


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The first model's, but for what names its own weights or code."""
    return {key: value for key, value in config.items() if key not in {"_name_or_path", "auto_map", "dtype"}}


def _write_companions(first: Opened, data_dir: Path, folder: Path, *, tokenizer: bool) -> dict[str, Any]:
    """Write generation_config.json and the tokenizer of the first model.

    Returns:
        What they add to config.json.
    """
    if not isinstance(first, OpenedRun):
        from llmrecipes.hf.reading import copy

        for name in COMPANIONS if tokenizer else COMPANIONS[:1]:
            if os.path.lexists(first.folder / name):
                copy(first.folder, name, folder / name)
        return {}
    from llmrecipes.data.prepared import open_prepared
    from llmrecipes.hf.export import write_json
    from llmrecipes.hf.tokenizer import write_tokenizer

    special = write_tokenizer(folder, first.recipe, open_prepared(first.recipe, data_dir)) if tokenizer else {}
    write_json(folder / COMPANIONS[0], {**special, "_from_model_config": True})
    return special


def _card(models: Sequence[str], base: str | None, numbers: Merge) -> str:
    """The model card. A folder is named by its last part: where it lies on this machine is nobody's business."""
    values = numbers.as_dict()
    of_each = {"weight": values.pop("weights", ()), "density": values.pop("densities", ())}
    columns = ["model", *(name for name, each in of_each.items() if each)]
    rows = [
        [_named(model), *(f"{each[number]:g}" for each in of_each.values() if each)]
        for number, model in enumerate(models)
    ]
    if base is not None:
        rows.append([f"{_named(base)} (base)", *("" for _ in columns[1:])])
    lines = [
        "---", "library_name: transformers", "tags:", "- merge", "- llmrecipes", "---", "",
        "# A merged model", "",
        f"Made by `llmrecipes merge --method {numbers.method}`: {METHODS[numbers.method].reference}. Its configuration",
        "and its tokenizer are those of the first model; all of them have the same.", "",
        *(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)), "",
        *(f"- {key}: {value}" for key, value in values.items() if key != "method"),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _named(model: str) -> str:
    return f"`{Path(model).resolve().name if Path(model).is_dir() else model}`"


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
    checkpoints = {name: find_checkpoint(name, runs_dir) for name in names}
    require_different(names, [str(entry.path.resolve()) for _, entry in checkpoints.values()])
    recipes = {name: Run(run).recipe() for name, (run, _) in checkpoints.items()}
    _require_same_models(recipes)
    inputs = {name: Input(name, backend(recipes[name]).tensors(entry)) for name, (_, entry) in checkpoints.items()}
    merged = MergedTensors(numbers, [inputs[name] for name in models], None if base is None else inputs[base])
    recipe = recipes[models[0]]
    run_dir = Run.of(runs_dir, recipe.name, run_id).path
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
                "this run trained adapters",
                where=f"{name}: lora",
                rule="only runs that trained all weights can be merged",
                fix="--to hf",
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
