"""A prepared folder, opened: found by the recipe's fingerprint, checked, and read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrecipes.commandline import command_line
from llmrecipes.data import checked, listing
from llmrecipes.data import manifest as manifests
from llmrecipes.data.manifest import Manifest
from llmrecipes.data.split import SPLITS, Split, check_disjoint
from llmrecipes.data.steps import selected
from llmrecipes.data.tokenizer import TextTokenizer, read
from llmrecipes.errors import UserError
from llmrecipes.recipe.plugins import DataStep, declared
from llmrecipes.recipe.schema import Recipe

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
# Tokens depend on every key of the section data, including new ones, except these.
NOT_IN_TOKENS: dict[str, Any] = {
    # How batches reach the model.
    "num_workers": True,
    "prefetch_factor": True,
    "pin_memory": True,
    # How often a source is drawn from: part of the sample order (`index.folder`).
    "sources": {"__all__": {"weight"}},
    # How they are put into sequences: too.
    "chat": {"packing"},
}


@dataclass(frozen=True)
class Prepared:
    """A prepared folder and the weights with which a recipe blends its sources."""

    path: Path
    manifest: Manifest
    weights: tuple[float, ...]

    @property
    def ids(self) -> checked.Ids:
        """Its valid token ids."""
        return checked.Ids(self.manifest.dtype, self.manifest.tokenizer.vocab_size)

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens.

        Raises:
            UserError: it is damaged or has changed.
        """
        record = self.manifest.tokenizer
        return read(self.path / TOKENIZER, record.eod, record.sha256)

    def check(self, names: Collection[str], log: Callable[[str], None], *, again: bool = False) -> None:
        """Check files against the manifest, and ids against the vocabulary, unless that was done on this machine.

        Args:
            names: of the files.
            log: receives a line when files are read.
            again: read them even if they were checked before.

        Raises:
            UserError: a file is not in the manifest, differs from it, or has ids outside the vocabulary.
        """
        files = self.manifest.files
        if unknown := sorted(set(names) - set(files)):
            raise UserError(
                f"does not list {unknown[0]}",
                where=str(self.path / manifests.NAME),
                rule="a manifest lists every file that is read",
                fix="delete the folder and prepare again",
            )
        checked.require(self.path, {name: files[name] for name in names}, self.ids, log, again=again)

    def tokens(self, split: Split) -> list[str]:
        """Files of a split's tokens."""
        every = enumerate(self.manifest.sources)
        stems = [manifests.stem(number, split) for number, source in every if source.splits[split].documents]
        suffixes = (".idx", ".bin") if self.manifest.chat is None else (".idx", ".bin", ".answers")
        return [f"{stem}{suffix}" for stem in stems for suffix in suffixes]

    def verify(self) -> int:
        """Check the hash of every file, including all sample orders, and that no document is in two splits.

        Returns:
            The number of documents.

        Raises:
            UserError: the first difference.
        """
        self.check(self.manifest.files, logger.info, again=True)
        for folder, files in listing.every(self.path):
            within = {f"{folder.relative_to(self.path)}/{name}": file for name, file in files.items()}
            checked.require(self.path, within, self.ids, logger.info, again=True)
        return check_disjoint(
            (split, self.path / f"{manifests.stem(number, split)}.sha256")
            for number, source in enumerate(self.manifest.sources)
            for split in SPLITS
            if source.splits[split].documents
        )

    def usable(self, split: Split, seq_length: int) -> list[int]:
        """Sources whose split is long enough for one sequence and its last label; of conversations, one is enough."""
        every = enumerate(self.manifest.sources)
        if self.manifest.chat is not None:
            return [n for n, source in every if source.splits[split].documents]
        return [n for n, source in every if source.splits[split].tokens > seq_length]


def content(recipe: Recipe) -> dict[str, object]:
    """The part of a recipe that tokens depend on: the section data without `NOT_IN_TOKENS`, and the vocabulary."""
    data = recipe.data.model_dump(mode="json", exclude=NOT_IN_TOKENS)
    for source in data["sources"]:
        if source["max_tokens"] is None:
            del source["max_tokens"]  # what was prepared before there was this key is found
    chosen = selected(recipe.data)
    for name in declared(type(recipe.data), DataStep):
        if name not in chosen:
            del data[name]  # what was prepared before there was this step is found
    if recipe.data.chat is None:
        del data["chat"]  # what was prepared before there were conversations is found
    else:
        data["chat"]["max_length"] = max_length(recipe)
        if recipe.data.chat.template is None:
            del data["chat"]["template"]  # likewise what was prepared before there were names of templates
    return {**data, "vocab_size": recipe.model.vocab_size}


def max_length(recipe: Recipe) -> int:
    """Most tokens of a conversation: those of a sequence and the label of its last one."""
    return (recipe.data.chat and recipe.data.chat.max_length) or recipe.model.seq_length + 1


def fingerprint(recipe: Recipe) -> str:
    """Name of the recipe's prepared folder: 16 hex digits of a hash of `content`."""
    text = json.dumps({"format": manifests.FORMAT, **content(recipe)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_prepared(recipe: Recipe, data_dir: Path) -> Prepared:
    """Open the recipe's prepared folder after the quick check: sizes and index headers; `Prepared.check` does the rest.

    Raises:
        UserError: not prepared, or a file is missing, truncated or different (its name, expected and actual size).
    """
    path = data_dir / fingerprint(recipe)
    if not path.is_dir():
        raise UserError(
            f"the data of recipe {recipe.name!r} is not prepared",
            where=str(path),
            fix=command_line("prepare", recipe.name, data_dir=data_dir),
        )
    manifest = manifests.load(path)
    if manifest.fingerprint != path.name:
        raise UserError(
            f"belongs to {manifest.fingerprint}, not to {path.name}",
            where=str(path / manifests.NAME),
            rule="a prepared folder is named by its fingerprint",
            fix="delete the folder and prepare again",
        )
    if max(manifest.tokenizer.vocab_size, manifest.tokenizer.eod + 1) > recipe.model.vocab_size:
        raise UserError(
            f"its tokenizer has {manifest.tokenizer.vocab_size:,} ids, the model {recipe.model.vocab_size:,}",
            where=str(path / manifests.NAME),
            rule="model.vocab_size is at least the tokenizer's",
            fix="delete the folder and prepare again",
        )
    manifests.check_sizes(path, manifest)
    return Prepared(path, manifest, tuple(source.weight for source in recipe.data.sources))
