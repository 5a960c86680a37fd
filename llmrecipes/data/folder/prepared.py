"""A prepared folder: its fingerprint, its checks, the order of a run's samples, and held-out text for bits per byte.

The order of samples is `dataset`'s indices in `<prepared folder>/index/<key>/`. It depends on sequence length,
seed, number of samples and weights; `prepare` builds it once, and training only loads it.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import logging
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmrecipes.commandline import command_line
from llmrecipes.data.folder import checked
from llmrecipes.data.folder import data_manifest as manifests
from llmrecipes.data.folder.data_manifest import (
    LISTING,
    DataManifest,
    SourceRecord,
    listings,
    read_listing,
    require_listed,
)
from llmrecipes.data.steps.split import SPLITS, Split, check_disjoint
from llmrecipes.data.steps.steps import selected
from llmrecipes.data.tokens.infilling import infills
from llmrecipes.data.tokens.tokenizer import TextTokenizer, read
from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.batch_schedule import samples_of
from llmrecipes.recipe.derived.stages import span_of
from llmrecipes.recipe.schema import Recipe, Source
from llmrecipes.recipe.sections.data_steps import DuplicatesStep, StepSection
from llmrecipes.recipe.sections.plugins import DataStep, declared, resolve

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
ORDER = 2
"""Of the samples of text. 1: megatron-core shuffles all passes over a source as one; 2: each is shuffled by itself."""
# Tokens depend on every key of the section data, including new ones, except these.
NOT_IN_TOKENS: dict[str, Any] = {
    # How batches reach the model.
    "num_workers": True,
    "prefetch_factor": True,
    "pin_memory": True,
    # How often a source is drawn from: part of the sample order (`index_folder`). And its name in metrics.
    "sources": {"__all__": {"weight", "label"}},
    "multiple_validation_sets": True,
    # How they are put into sequences: too.
    "chat": {"packing"},
    # How samples are ordered: too.
    "curriculum": True,
}


@dataclass(frozen=True)
class Prepared:
    """A prepared folder and the weights with which a recipe blends its sources."""

    path: Path
    manifest: DataManifest
    weights: tuple[float, ...]

    @property
    def ids(self) -> checked.Ids:
        """Its valid token ids."""
        return checked.Ids(self.manifest.dtype, self.manifest.tokenizer.vocab_size)

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens.

        Raises:
            UserError: it is corrupt or has changed.
        """
        record = self.manifest.tokenizer
        return read(self.path / TOKENIZER, record.eod, record.sha256, tuple(record.prefix or ()))

    def check(self, names: Collection[str], log: Callable[[str], None], *, again: bool = False) -> None:
        """Check files against the manifest, and ids against the vocabulary, unless that was done on this machine.

        Args:
            names: names of the files.
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
                rule="a manifest must list every file that is read",
                fix="delete the folder and prepare again",
            )
        checked.require(self.path, {name: files[name] for name in names}, self.ids, log, again=again)

    def tokens(self, split: Split) -> list[str]:
        """Files of a split's tokens."""
        numbered = enumerate(self.manifest.sources)
        stems = [manifests.stem(number, split) for number, source in numbered if source.splits[split].documents]
        suffixes = (".idx", ".bin") if self.manifest.chat is None else (".idx", ".bin", ".answers")
        return [f"{stem}{suffix}" for stem in stems for suffix in suffixes]

    def tokens_of_set(self, label: str) -> list[str]:
        """Files of the tokens of a set of `data.valid_sources`."""
        return [f"{manifests.valid_stem(label)}{suffix}" for suffix in (".idx", ".bin")]

    def verify(self) -> int:
        """Check the hash of every file, including all sample orders, and that no document is in two splits.

        Returns:
            The number of documents.

        Raises:
            UserError: the first difference.
        """
        self.check(self.manifest.files, logger.info, again=True)
        for folder, files in listings(self.path):
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
        numbered = enumerate(self.manifest.sources)
        if self.manifest.chat is not None:
            return [n for n, source in numbered if source.splits[split].documents]
        return [n for n, source in numbered if source.splits[split].tokens > seq_length]


def content(recipe: Recipe) -> dict[str, object]:
    """The part of a recipe that tokens depend on: the section data without `NOT_IN_TOKENS`, and the vocabulary.

    Data prepared before a key existed keeps its fingerprint: keys are left out where they change nothing.
    """
    data = recipe.data.model_dump(mode="json", exclude=NOT_IN_TOKENS)
    data["sources"] = [_without(each, max_tokens=None, **_PLAIN_SOURCE) for each in data["sources"]]
    data["valid_sources"] = [_without(each, weight=1.0, **_PLAIN_SOURCE) for each in data["valid_sources"]]
    data["tokenizer"] = _without(data["tokenizer"], pattern="words", add_bos_token=None)
    data["steps"] = [_step_content(step) for step in recipe.data.steps if not step.does.weighs]
    if recipe.data.chat is not None:
        data["chat"] = _without(data["chat"], template=None, preference=None) | {"max_length": max_length(recipe)}
    if not infills(recipe.data):
        del data["fim"]
    for name in declared(type(recipe.data), DataStep).keys() - selected(recipe.data).keys():
        del data[name]
    data = _without(data, max_unreadable=0.0, chat=None, valid_sources=[], steps=[])
    if recipe.data.valid_sources:
        data |= _revision(DuplicatesStep.does)
    if has_scores(recipe):
        data["scores"] = "compression_ratio"
    return {**data, "vocab_size": recipe.model.vocab_size}


_PLAIN_SOURCE = {"fim_rate": 0.0, "label_key": None, "label_value": None}


def _without(values: Mapping[str, Any], **plain: object) -> dict[str, Any]:
    """Values without those that are equal to the plain ones."""
    return {key: value for key, value in values.items() if key not in plain or value != plain[key]}


def _step_content(step: StepSection) -> dict[str, object]:
    settings = _without(step.settings, cut_spans=False, tasks=None)
    if isinstance(step, DuplicatesStep) and not step.cut_spans:
        del settings["min_words"]
    return {"type": step.type, **settings, **_revision(step.does)}


def _revision(step: DataStep) -> dict[str, int]:
    return {} if step.revision == 1 else {"revision": step.revision}


def has_scores(recipe: Recipe) -> bool:
    """Whether a curriculum needs a score of each training document that its tokens do not tell."""
    return recipe.data.curriculum is not None and recipe.data.curriculum.score == "compression_ratio"


def max_length(recipe: Recipe) -> int:
    """Most tokens of a conversation: those of a sequence and the label of its last one; of a prompt with one of its two
    answers, half of them if both are in one sequence."""
    chat = recipe.data.chat
    holds = recipe.model.seq_length + 1
    if chat is not None and chat.preference is not None and chat.packing:
        holds = recipe.model.seq_length // 2 + 1
    return (chat and chat.max_length) or holds


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
            f"has the fingerprint {manifest.fingerprint}, not {path.name}",
            where=str(path / manifests.NAME),
            rule="a prepared folder is named after its fingerprint",
            fix="delete the folder and prepare again",
        )
    if max(manifest.tokenizer.vocab_size, manifest.tokenizer.eod + 1) > recipe.model.vocab_size:
        raise UserError(
            f"the tokenizer has {manifest.tokenizer.vocab_size:,} ids, the model {recipe.model.vocab_size:,}",
            where=str(path / manifests.NAME),
            rule="model.vocab_size must be at least the tokenizer's",
            fix="delete the folder and prepare again",
        )
    manifests.check_sizes(path, manifest)
    return Prepared(path, manifest, _weights(recipe, manifest))


def _weights(recipe: Recipe, manifest: DataManifest) -> tuple[float, ...]:
    weights = tuple(source.weight for source in recipe.data.sources)
    for step in recipe.data.steps:
        if step.does.weighs:
            tokens = [source.splits["train"].tokens for source in manifest.sources]
            drawn = drawn_samples(recipe, "train") * recipe.model.seq_length
            weights = tuple(resolve(step.does.target)(tokens, weights, drawn, **step.settings))
    return weights


HeldOutSplit = Literal["valid", "test"]


def held_out_name(split: HeldOutSplit) -> str:
    """File name of a held-out split's text."""
    return f"{split}.txt.gz"


def held_out_text(prepared: Prepared, split: HeldOutSplit = "valid", max_bytes: int | None = None) -> bytes:
    """The split's documents, concatenated in order, as UTF-8; at most `max_bytes`."""
    path: Path = prepared.path / held_out_name(split)
    if split not in prepared.manifest.held_out:
        return b""
    with gzip.open(path) as stream:
        return stream.read(-1 if max_bytes is None else max_bytes)


def bytes_per_token(prepared: Prepared, split: HeldOutSplit = "valid", seq_length: int = 1) -> float:
    """Bytes of text per token of the split, including end tokens, weighted by source like the samples.

    Args:
        prepared: the opened folder.
        split: valid or test.
        seq_length: sources shorter than one such sequence are excluded, as in training.

    Returns:
        Bytes per token; NaN if the split is empty.
    """
    counts = [prepared.manifest.sources[n].splits[split] for n in prepared.usable(split, seq_length)]
    weights = [prepared.weights[n] for n in prepared.usable(split, seq_length)]
    if not counts:
        return math.nan
    return sum(w * c.bytes / c.tokens for w, c in zip(weights, counts, strict=True)) / sum(weights)


def bits_per_byte(loss: float, prepared: Prepared, split: HeldOutSplit = "valid", seq_length: int = 1) -> float:
    """A mean loss in nats per token as bits per byte of text."""
    return loss / math.log(2) / bytes_per_token(prepared, split, seq_length)


def gzip_bits_per_byte(prepared: Prepared, split: HeldOutSplit = "valid") -> float:
    """Bits per byte that `gzip -9` needs for the same text; NaN where the split is empty."""
    held = prepared.manifest.held_out.get(split)
    return 8 * held.gzip_bytes / held.bytes if held and held.bytes else math.nan


def deflate_bits_per_byte(text: bytes, window: int) -> float:
    """Bits per byte where each piece of the text is compressed by itself, as `gzip -9` does but without its header.

    Args:
        text: compressed in pieces, the last one of which may be shorter.
        window: bytes of a piece.
    """
    pieces = (text[start : start + window] for start in range(0, len(text), window))
    return 8 * sum(len(zlib.compress(piece, 9, wbits=-zlib.MAX_WBITS)) for piece in pieces) / len(text)


def drawn_samples(recipe: Recipe, split: Split) -> int:
    """Samples a run draws from a split; every evaluation uses the same ones."""
    train = recipe.train
    if split == "train":
        return samples_of(recipe)
    return train.eval_iters * train.global_batch_size


def train_weights(recipe: Recipe, prepared: Prepared) -> tuple[float, ...]:
    """Weights of the sources in training: those of the stage, if it has some."""
    span = span_of(recipe)
    return prepared.weights if span is None or span.weights is None else span.weights


def drawn_sources(recipe: Recipe, prepared: Prepared, split: Split) -> list[int]:
    """Numbers of the sources that a split draws from, in the order of its blend."""
    usable = prepared.usable(split, recipe.model.seq_length)
    if recipe.data.chat is not None:
        return usable
    shares = train_weights(recipe, prepared) if split == "train" else prepared.weights
    return [number for number in usable if shares[number]]


def samples_of_sources(size: int, weights: Sequence[float]) -> list[int]:
    """Samples that a blend draws from each source: its share, rounded up, and one more; all, if there is only one."""
    total = sum(weights)
    return [size] if len(weights) == 1 else [math.ceil(size * weight / total) + 1 for weight in weights]


def rare_sources(recipe: Recipe, prepared: Prepared) -> list[str]:
    """Sources that training may never draw, with the samples that their weight is."""
    shares = train_weights(recipe, prepared)
    size = drawn_samples(recipe, "train")
    drawn = {n: size * shares[n] / sum(shares) for n in drawn_sources(recipe, prepared, "train")}
    return [f"{prepared.manifest.sources[n].label} ({count:.2g})" for n, count in drawn.items() if count < 1]


def most_passes(recipe: Recipe, prepared: Prepared) -> int:
    """Passes that training begins over the source that it draws from most often."""
    shares = train_weights(recipe, prepared)
    usable = drawn_sources(recipe, prepared, "train")
    drawn = samples_of_sources(drawn_samples(recipe, "train"), [shares[number] for number in usable])
    tokens = [prepared.manifest.sources[number].splits["train"].tokens for number in usable]
    length = recipe.model.seq_length
    return max(math.ceil((count * length + 1) / each) for count, each in zip(drawn, tokens, strict=True))


def index_folder(recipe: Recipe, prepared: Prepared) -> Path:
    """Folder of this recipe's indices."""
    identity = {
        "seq_length": recipe.model.seq_length,
        "seed": recipe.train.seed,
        "samples": {split: drawn_samples(recipe, split) for split in SPLITS},
        "weights": prepared.weights,
        "megatron-core": importlib.metadata.version("megatron-core"),
        "order": ORDER,
    }
    if (weights := train_weights(recipe, prepared)) != prepared.weights:
        identity["train_weights"] = weights
    if recipe.data.chat is not None:
        identity["packing"] = recipe.data.chat.packing
    if recipe.data.curriculum is not None:
        identity["curriculum"] = recipe.data.curriculum.model_dump(exclude_none=True)
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return prepared.path / "index" / name


def index_usable(recipe: Recipe, prepared: Prepared) -> bool:
    """Whether there is nothing to build: the indices exist. They are checked when they are opened."""
    return (index_folder(recipe, prepared) / LISTING).is_file()


def check_index(recipe: Recipe, prepared: Prepared, log: Callable[[str], None]) -> Path:
    """The folder of the indices, after checking that every file in it is as `prepare` wrote it.

    Args:
        recipe: whose indices.
        prepared: the opened folder.
        log: called when files are read.

    Raises:
        UserError: not built for this recipe, or a file is missing, changed, not a plain array or not listed.
    """
    path = index_folder(recipe, prepared)
    try:
        files = read_listing(path)
    except OSError as error:
        raise UserError(
            f"the sample order of recipe {recipe.name!r} is not prepared for this length, seed and batch",
            where=str(path),
            fix=command_line("prepare", recipe.name, data_dir=prepared.path.parent) + ", with the same overrides",
        ) from error
    require_listed(path, files)
    within = {f"{path.relative_to(prepared.path)}/{name}": file for name, file in files.items()}
    checked.require(prepared.path, within, prepared.ids, log)
    return path


def _read(source: Source, record: SourceRecord) -> str:
    """What was read of a source and what became of it."""
    from llmrecipes.data.sources.sources import form

    files = 0 if record.files is None else record.files.files
    of = f" of {files:,} file{'' if files == 1 else 's'}" if files else ""
    kind = f" ({kind})" if (kind := form(source)) else ""
    splits = {split: counts.documents for split, counts in record.splits.items()}
    left_out = record.read - sum(splits.values())
    dropped = f", {left_out:,} dropped" if left_out else ""
    here = ", ".join(f"{count:,} in {split}" for split, count in splits.items() if count) or "none left"
    return f"{record.read:,} document{'' if record.read == 1 else 's'}{of}{kind}{dropped}, {here}"


def require_training(recipe: Recipe, prepared: Prepared) -> None:
    """Every source must hold one training sequence, or its weight could not be kept.

    Raises:
        UserError: the first one that does not.
    """
    usable = prepared.usable("train", recipe.model.seq_length)
    weights = train_weights(recipe, prepared)
    for n, source in enumerate(prepared.manifest.sources):
        if n not in usable and weights[n]:
            raise UserError(
                f"source {source.label!r} has {source.splits['train'].tokens:,} training tokens: "
                f"{_read(recipe.data.sources[n], source)}",
                where=f"data.sources[{n}]",
                rule=f"one sequence takes {recipe.model.seq_length + 1:,} (model.seq_length + 1)",
                fix="add text to the source, remove it, or lower model.seq_length",
            )
