"""Published models that runs start from: their recipe, and `train.pretrained`, checked before anything is started."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.io import write_atomic
from llmrecipes.recipe.rules.preference_rules import needs_start_weights
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.train.spec import RunSpec
from llmrecipes.untrusted import RECORD as MOST
from llmrecipes.untrusted import read_json
from llmrecipes.workflow.run import Log

if TYPE_CHECKING:
    from llmrecipes.hf.reading import Located
    from llmrecipes.hf.weights import FolderWeights

logger = logging.getLogger(__name__)

RECORD = "pretrained.json"
IMPORTED = "imported.json"
TOKENIZER_FILE = "tokenizer.json"
SEQ_LENGTH = 2048
"""Of the recipe of a published model, where the model allows it."""
TRAIN: Mapping[str, object] = {"train_iters": 1000, "global_batch_size": 8}
OPTIMIZER: Mapping[str, object] = {"lr": 1e-5, "min_lr": 1e-6}
"""A small learning rate: the weights are good already."""


@dataclass(frozen=True)
class PretrainedRecord:
    """Weights that a run starts from.

    Attributes:
        pretrained: value of `train.pretrained`.
        pinned: the same with the commit, or as an absolute path.
        fingerprint: of its files (`hf.reading.fingerprint`); empty in a run without adapters, which needs them once.
        model_type: of its config.json; empty in older records.
    """

    pretrained: str
    pinned: str
    fingerprint: str
    model_type: str = ""


def with_pretrained(spec: RunSpec, log: Log) -> RunSpec:
    """The spec of a run with the folder of its weights; unchanged if it has a checkpoint, or names no weights.

    The commit is recorded: if the run is started again before its first checkpoint, it takes the same weights. A run
    with adapters needs them whenever it is started, because its checkpoints have only adapters.

    Args:
        spec: spec of a run whose directory exists.
        log: receives one line.

    Raises:
        UserError: the weights cannot be found or fetched, are not those of the recipe's model, or not those that
            the adapters were trained on.
    """
    recipe = spec.recipe
    if recipe.train.pretrained is None:
        return spec
    if not spec.from_scratch and _has_checkpoint(spec.run_dir):
        if not needs_start_weights(recipe):
            return spec
        return spec.model_copy(update={"pretrained": base_folder(spec.run_dir, recipe, log).absolute()})
    from llmrecipes.hf.generation_config import keep
    from llmrecipes.hf.reading import read_config, resolve

    try:
        source = resolve(_pinned(spec.run_dir, recipe.train.pretrained))
        config = read_config(source.path)
        fingerprint = _require_fit(source.path, recipe, log)
        record = PretrainedRecord(recipe.train.pretrained, source.pinned, fingerprint, config["model_type"])
        write_atomic(spec.run_dir / RECORD, json.dumps(asdict(record), indent=2) + "\n")
        keep(source.path, config, spec.run_dir)
    except UserError:
        spec.run.remove_if_empty()
        raise
    log(f"starting from the weights of {source.pinned}")
    return spec.model_copy(update={"pretrained": source.path.absolute()})


def base_folder(run_dir: Path, recipe: Recipe, log: Log = logger.info) -> Path:
    """Folder of the model that the adapters of a run belong to, or that its answers are compared with (`dpo`).

    Args:
        run_dir: the run.
        recipe: recipe of the run.
        log: receives a line when the model is read to compare it.

    Raises:
        UserError: the run has no record of it, it is missing, or has changed.
    """
    from llmrecipes.hf.reading import fingerprint, open_folder, resolve

    record = _recorded(run_dir)
    if record is None:
        raise UserError(
            f"{RECORD} is missing or corrupt",
            where=str(run_dir),
            rule="it records the model whose weights every start of this run reads",
            fix="restore it, or start a new run",
        )
    path = resolve(record["pinned"]).path
    if fingerprint(open_folder(path), log) != record["fingerprint"]:
        raise UserError(
            f"{recipe.train.pretrained} has changed since this run was started",
            where=str(path),
            rule="the adapters and the reference of a run belong to the weights that it started from",
            fix="restore that model, or start a new run with another run id",
        )
    return path


@contextmanager
def base_weights(run_dir: Path, recipe: Recipe) -> Iterator[FolderWeights | None]:
    """Weights of the model that the adapters of a run belong to; None: the run has none, or they are initial ones.

    Raises:
        UserError: as `base_folder`.
    """
    if recipe.lora is None or recipe.train.pretrained is None:
        yield None
        return
    from llmrecipes.hf.weights import open_weights

    weights = open_weights(base_folder(run_dir, recipe), recipe.model)
    try:
        yield weights
    finally:
        weights.close()


def _require_fit(path: Path, recipe: Recipe, log: Log) -> str:
    """Fingerprint of weights that fit the recipe's model, if they are needed again."""
    from llmrecipes.hf.reading import fingerprint, open_folder
    from llmrecipes.hf.weights import open_weights

    weights = open_weights(path, recipe.model)
    weights.close()
    if weights.left_out:
        log(f"left out: {len(weights.left_out)} tensors of multi-token prediction (model.mtp_num_layers is not set)")
    return "" if not needs_start_weights(recipe) else fingerprint(open_folder(path), log)


def _pinned(run_dir: Path, pretrained: str) -> str:
    record = _recorded(run_dir)
    # A new run, or a file that was edited: what the recipe says counts.
    return record["pinned"] if record is not None and record["pretrained"] == pretrained else pretrained


def _recorded(run_dir: Path) -> dict[str, str] | None:
    try:
        record = {"model_type": "", **read_json(run_dir / RECORD, root=run_dir, most=MOST)}
        return {field.name: str(record[field.name]) for field in fields(PretrainedRecord)}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def entered_as(run_dir: Path) -> str | None:
    """`model_type` of the model that a run was imported or started from; None: of none, or it is not known."""
    for name in (IMPORTED, RECORD):
        try:
            record = read_json(run_dir / name, root=run_dir, most=MOST)
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and isinstance(kind := record.get("model_type"), str) and kind:
            return kind
    return None


def _has_checkpoint(run_dir: Path) -> bool:

    return Run(run_dir).newest() is not None


def recipe_values(model: Located, section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The recipe of a model, as plain data.

    Args:
        section: `model`, but for `seq_length`.
        name: name of the recipe.
    """
    most = section.get("max_position_embeddings")
    tokenizer: dict[str, Any] = {}
    if (model.path / TOKENIZER_FILE).exists():
        path = model.name if model.commit else str(model.path.absolute())
        tokenizer = {"type": "huggingface", "path": path, "revision": model.commit}
    return {
        "name": name,
        "description": f"from {model.name}"[:200],
        "model": {"seq_length": min(SEQ_LENGTH, most) if isinstance(most, int) else SEQ_LENGTH, **section},
        "train": dict(TRAIN),
        "optimizer": dict(OPTIMIZER),
        "layout": {"micro_batch_size": 1},
        "data": {"tokenizer": tokenizer} if tokenizer else {},
    }


def recipe_name(source: str) -> str:
    """The name of a recipe, made from a path or a name on the Hub: `llama-3.2-1b` from `meta-llama/Llama-3.2-1B`."""
    last = Path(source).resolve().name if Path(source).exists() else source.rpartition("/")[2]
    return re.sub(r"^[^a-z0-9]+", "", re.sub(r"[^a-z0-9._-]+", "-", last.lower()))[:63] or "imported"


def require_tokenizer(model: Located, recipe: Recipe, overrides: Sequence[str]) -> None:
    """Check that training keeps the model's tokenizer, unless another is requested: it changes the meaning of every id.

    Raises:
        UserError: the folder has none, or it has ids that the model does not have.
    """
    tokenizer = recipe.data.tokenizer
    if tokenizer.type == "bpe" and not any(override.startswith("data.tokenizer") for override in overrides):
        raise UserError(
            f"no {TOKENIZER_FILE}",
            where=str(model.path),
            rule="a pretrained model must be trained with its own tokenizer",
            fix="data.tokenizer.type=huggingface data.tokenizer.path=FOLDER; or data.tokenizer.type=bpe for a new one",
        )
    if tokenizer.type == "huggingface":
        from llmrecipes.data.tokens.tokenizer import load_huggingface

        load_huggingface(tokenizer, recipe.model.vocab_size)
