"""The order of a run's samples: megatron-core's indices, built once by `prepare` and only loaded by training.

They depend on sequence length, seed, number of samples and weights, and lie in `<prepared folder>/index/<key>/`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from llmrecipes.data.prepared import Prepared
from llmrecipes.data.split import SPLITS, Split
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe

_MARK = "index.json"


def samples(recipe: Recipe, split: Split) -> int:
    """Samples a run draws from a split; every evaluation sees the same ones."""
    train = recipe.train
    return (train.train_iters if split == "train" else train.eval_iters) * train.global_batch_size


def folder(recipe: Recipe, prepared: Prepared) -> Path:
    """Where the indices of this recipe lie."""
    identity = {
        "seq_length": recipe.model.seq_length,
        "seed": recipe.train.seed,
        "samples": {split: samples(recipe, split) for split in SPLITS},
        "weights": prepared.weights,
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return prepared.path / "index" / name


def exists(recipe: Recipe, prepared: Prepared) -> bool:
    """Whether `build` is done."""
    return (folder(recipe, prepared) / _MARK).is_file()


def build(recipe: Recipe, prepared: Prepared, say: Callable[[str], None]) -> None:
    """Build the indices of all splits, and publish them by one rename.

    Raises:
        UserError: a source is too short for one sequence of training.
    """
    target = folder(recipe, prepared)
    if exists(recipe, prepared):
        return
    for split in SPLITS:
        _say_what_is_short(recipe, prepared, split, say)
    from llmrecipes.data import dataset

    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for split in SPLITS:
            dataset.load(recipe, prepared, split, part, fresh=True)
        files = {file.name: file.stat().st_size for file in part.iterdir()}
        (part / _MARK).write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # without its mark: damaged
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check(recipe: Recipe, prepared: Prepared) -> Path:
    """The folder of the indices, complete and without pickled objects.

    Raises:
        UserError: not built for this recipe, or a file is missing or cut off.
    """
    import numpy as np

    path = folder(recipe, prepared)
    try:
        files = json.loads((path / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the sample order of recipe {recipe.name!r} is not prepared for this length, seed and batch",
            where=str(path),
            fix=f"llmrecipes prepare {recipe.name} with the same overrides",
        ) from error
    again = f"delete {path} and prepare again"
    for name, size in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise UserError(
                f"has {found} bytes, expected {size}" if found is not None else f"is missing, expected {size} bytes",
                where=str(file),
                fix=again,
            )
        if file.suffix == ".npy":
            try:  # megatron-core loads these with allow_pickle
                np.load(file, mmap_mode="r", allow_pickle=False)
            except (ValueError, OSError, EOFError) as error:
                raise UserError(
                    f"no index: {error}", where=str(file), fix=f"delete {path} and prepare again"
                ) from error
    return path


def _say_what_is_short(recipe: Recipe, prepared: Prepared, split: Split, say: Callable[[str], None]) -> None:
    length, usable = recipe.model.seq_length, prepared.usable(split, recipe.model.seq_length)
    short = [n for n in range(len(prepared.manifest.sources)) if n not in usable]
    if split == "train":
        require_training(recipe, prepared)
    elif not usable:
        say(f"the {split} split has fewer than {length + 1:,} tokens in every source: nothing is evaluated on it")
    else:
        for n in short:
            source = prepared.manifest.sources[n]
            tokens = source.splits[split].tokens
            say(f"{source.label}: {tokens:,} {split} tokens are less than one sequence; left out of {split}")


def require_training(recipe: Recipe, prepared: Prepared) -> None:
    """Every source must hold one training sequence: its weight is to be kept.

    Raises:
        UserError: the first one that does not.
    """
    usable = prepared.usable("train", recipe.model.seq_length)
    for n, source in enumerate(prepared.manifest.sources):
        if n not in usable:
            raise UserError(
                f"source {source.label!r} has {source.splits['train'].tokens:,} training tokens",
                where=f"data.sources[{n}]",
                rule=f"one sequence takes {recipe.model.seq_length + 1:,} (model.seq_length + 1)",
                fix="add text to the source, take it out, or lower model.seq_length",
            )
