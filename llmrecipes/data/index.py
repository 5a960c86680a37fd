"""The order of a run's samples: megatron-core's indices, built once (`build_index`) and only loaded by training.

They depend on sequence length, seed, number of samples and weights, and are in `<prepared folder>/index/<key>/`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

from llmrecipes.commandline import command_line
from llmrecipes.data import checked, listing
from llmrecipes.data.prepared import Prepared
from llmrecipes.data.split import SPLITS, Split
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe


def samples(recipe: Recipe, split: Split) -> int:
    """Samples a run draws from a split; every evaluation uses the same ones."""
    train = recipe.train
    return (train.train_iters if split == "train" else train.eval_iters) * train.global_batch_size


def folder(recipe: Recipe, prepared: Prepared) -> Path:
    """Folder of this recipe's indices."""
    identity = {
        "seq_length": recipe.model.seq_length,
        "seed": recipe.train.seed,
        "samples": {split: samples(recipe, split) for split in SPLITS},
        "weights": prepared.weights,
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    if recipe.data.chat is not None:
        identity["packing"] = recipe.data.chat.packing
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return prepared.path / "index" / name


def usable(recipe: Recipe, prepared: Prepared) -> bool:
    """Whether there is nothing to build: the indices exist, with hashes or on a read-only file system.

    Raises:
        UserError: the list of their files is damaged.
    """
    path = folder(recipe, prepared)
    if not (path / listing.NAME).is_file():
        return False
    return listing.read(path)[1] is not None or not os.access(path.parent, os.W_OK)


def check(recipe: Recipe, prepared: Prepared, log: Callable[[str], None]) -> Path:
    """The folder of the indices, after checking that every file in it is as `prepare` wrote it.

    Args:
        recipe: whose indices.
        prepared: the opened folder.
        log: called when files are read.

    Raises:
        UserError: not built for this recipe, or a file is missing, changed, not a plain array or not listed.
    """
    path = folder(recipe, prepared)
    try:
        sizes, files = listing.read(path)
    except OSError as error:
        raise UserError(
            f"the sample order of recipe {recipe.name!r} is not prepared for this length, seed and batch",
            where=str(path),
            fix=command_line("prepare", recipe.name, data_dir=prepared.path.parent) + ", with the same overrides",
        ) from error
    listing.require_listed(path, sizes)
    if files is None:
        log(f"note: {path / listing.NAME} has no hashes; only sizes and headers of the sample order are checked")
    else:
        within = {f"{path.relative_to(prepared.path)}/{name}": file for name, file in files.items()}
        checked.require(prepared.path, within, prepared.ids, log)
    return path


def require_training(recipe: Recipe, prepared: Prepared) -> None:
    """Every source must hold one training sequence, or its weight could not be kept.

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
