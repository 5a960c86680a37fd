"""Builds the order of a run's samples, once, in `prepare`."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from llmrecipes.data import checked, conversations, dataset, index, listing
from llmrecipes.data.manifest import File
from llmrecipes.data.prepared import Prepared
from llmrecipes.data.split import SPLITS, Split
from llmrecipes.recipe.schema import Recipe


def build(recipe: Recipe, prepared: Prepared, log: Callable[[str], None]) -> None:
    """Build the indices of all splits, and publish them with one rename.

    Raises:
        UserError: a source is too short for one sequence of training.
    """
    target = index.folder(recipe, prepared)
    if index.usable(recipe, prepared):
        return
    if (target / listing.NAME).is_file():
        log(f"note: the sample order in {target} was written without hashes; it is built again, and is the same")
    for split in SPLITS:
        _say_what_is_short(recipe, prepared, split, log)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for split in SPLITS:
            if recipe.data.chat is None:
                dataset.load(recipe, prepared, split, part, fresh=True)
            else:
                conversations.write_order(recipe, prepared, split, part, log)
        contents = checked.describe(part, prepared.ids)
        files = {name: File(bytes=content.bytes, sha256=content.sha256) for name, content in contents.items()}
        (part / listing.NAME).write_text(listing.text(files), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # it has no listing or no hashes
        part.rename(target)
        checked.remember(prepared.path, {f"{target.relative_to(prepared.path)}/{n}": c for n, c in contents.items()})
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _say_what_is_short(recipe: Recipe, prepared: Prepared, split: Split, log: Callable[[str], None]) -> None:
    length, usable = recipe.model.seq_length, prepared.usable(split, recipe.model.seq_length)
    short = [n for n in range(len(prepared.manifest.sources)) if n not in usable]
    if split == "train":
        index.require_training(recipe, prepared)
    elif not usable and prepared.manifest.chat is not None:
        log(f"the {split} split has no conversation: nothing is evaluated on it")
    elif not usable:
        log(f"the {split} split has fewer than {length + 1:,} tokens in every source: nothing is evaluated on it")
    elif prepared.manifest.chat is None:
        for n in short:
            source = prepared.manifest.sources[n]
            tokens = source.splits[split].tokens
            log(f"{source.label}: {tokens:,} {split} tokens are less than one sequence; left out of {split}")
