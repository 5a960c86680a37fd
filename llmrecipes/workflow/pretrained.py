"""`train.pretrained`: the weights that a run starts from are found and checked before anything is started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.io import write_atomic
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.run import Log, remove_empty_run_dir

RECORD = "pretrained.json"


@dataclass(frozen=True)
class Record:
    """What a run has started from.

    Attributes:
        pretrained: value of `train.pretrained`.
        pinned: the same with the commit, or as an absolute path.
    """

    pretrained: str
    pinned: str


def with_pretrained(spec: RunSpec, log: Log) -> RunSpec:
    """The spec of a run with the folder of its weights; unchanged if it has a checkpoint, or names no weights.

    The commit is recorded: if the run is started again before its first checkpoint, it takes the same weights.

    Args:
        spec: of a run whose directory exists.
        log: receives one line.

    Raises:
        UserError: the weights cannot be found or fetched, or are not those of the recipe's model.
    """
    recipe = spec.recipe
    if recipe.train.pretrained is None or (not spec.from_scratch and _has_checkpoint(spec.run_dir)):
        return spec
    from llmrecipes.hf.source import resolve

    try:
        found = resolve(_pinned(spec.run_dir, recipe.train.pretrained))
        _require_fit(found.path, recipe)
        record = Record(recipe.train.pretrained, found.pinned)
        write_atomic(spec.run_dir / RECORD, json.dumps(asdict(record), indent=2) + "\n")
    except UserError:
        remove_empty_run_dir(spec)
        raise
    log(f"starting from the weights of {found.pinned}")
    return spec.model_copy(update={"pretrained": found.path.absolute()})


def _require_fit(path: Path, recipe: Recipe) -> None:
    from llmrecipes.hf.weights import open_weights

    open_weights(path, recipe.model).close()


def _pinned(run_dir: Path, pretrained: str) -> str:
    try:
        record = json.loads((run_dir / RECORD).read_text("utf-8"))
        if record["pretrained"] == pretrained:
            return str(record["pinned"])
    except (OSError, ValueError, LookupError, TypeError):
        pass  # a new run, or a file that was edited: what the recipe says counts
    return pretrained


def _has_checkpoint(run_dir: Path) -> bool:
    from llmrecipes.checkpoint.store import CheckpointStore

    return bool(CheckpointStore(run_dir / "checkpoints").entries())
