"""`llmrecipes import`: a Hugging Face model or a Megatron-LM checkpoint becomes a run before its first step."""

from __future__ import annotations

import json
import re
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.io import write_atomic
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.document import error_of
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import DEFAULTS_NOTE, RESOLVED_NAME, load, load_values, recipe_hash, short
from llmrecipes.recipe.megatron_lm import check, notes
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import Note
from llmrecipes.tracking.status import StatusSink
from llmrecipes.workflow.run import on_one_rank

if TYPE_CHECKING:
    import torch

    from llmrecipes.engine.base import WeightSource
    from llmrecipes.hf.source import Found
    from llmrecipes.tracking.progress import Counted


ORIGIN = "imported.json"
SEQ_LENGTH = 2048
"""Of the recipe, where the model allows it."""
TRAIN: Mapping[str, object] = {"train_iters": 1000, "micro_batch_size": 1, "global_batch_size": 8}
OPTIMIZER: Mapping[str, object] = {"lr": 1e-5, "min_lr": 1e-6}
"""A small learning rate: the weights are good already."""
WARMUP, WARMUP_SHARE = 50, 20
"""Steps of warm-up, and the largest share of `train_iters` that they are: one in 20."""
COMMENTS = {
    "train.train_iters": "steps",
    "train.global_batch_size": "sequences of a step",
    "optimizer.lr": "small: the weights are trained already",
}
"""Of the recipe of an imported model, by key."""
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Imported:
    """A run before its first step.

    Attributes:
        run_dir: its directory, with recipe.yaml and the checkpoint of step 0.
        source: folder or name of the model.
        commit: of the Hub's repository; None for a folder.
        model_type: family of the model.
        parameters: of the model, with padding of the vocabulary.
        vocab_size: of the recipe.
        new_rows: rows of the embedding that the folder does not have, for new tokens and padding: their mean.
        padding_rows: those of `new_rows` that only pad the vocabulary.
        ignored_keys: keys of config.json that have no effect.
        checkpoint_bytes: size of the checkpoint.
        peak_memory_bytes: of this process.
        seconds: that it took.
    """

    run_dir: str
    source: str
    commit: str | None
    model_type: str
    parameters: int
    vocab_size: int
    new_rows: int
    padding_rows: int
    ignored_keys: tuple[str, ...]
    checkpoint_bytes: int
    peak_memory_bytes: int
    seconds: float


def import_model(
    source: str,
    overrides: Sequence[str],
    runs_dir: Path,
    run_id: str,
    *,
    revision: str | None = None,
    name: str | None = None,
    ignored: Sequence[str] = (),
    progress: Counted | None = None,
) -> Imported:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    One process reads and writes the weights box by box: its memory does not depend on the size of the model. Any
    layout, engine and ZeRO stage loads the checkpoint.

    Args:
        source: a folder with config.json and safetensors, or a name on the Hub.
        overrides: `key.path=value` of the recipe.
        runs_dir: where runs are kept.
        run_id: of the new run.
        revision: branch, tag or commit on the Hub.
        name: of the recipe; None: made from `source`.
        ignored: keys of config.json that recipes do not have, and that the user says have no effect.
        progress: shows how much is written.

    Raises:
        UserError: the model cannot be found, read or described by a recipe; a run id in use; or a full disk. Nothing
            that looks like a run is left behind.
    """
    from llmrecipes.hf.folder import published
    from llmrecipes.hf.match import require_ignorable, section_of, validated, without_effect
    from llmrecipes.hf.reading import CONFIG, read_config
    from llmrecipes.hf.source import resolve
    from llmrecipes.hf.weights import open_weights

    started = time.monotonic()
    resolved = resolve(source, revision)
    config = read_config(resolved.path)
    require_ignorable(config, ignored, str(resolved.path / CONFIG))
    family, section = section_of(config, resolved.path, ignored)
    validated(section, 1, str(resolved.path / CONFIG))
    values = recipe_values(resolved, section, name or recipe_name(resolved.name))
    recipe = _recipe(values, resolved.path / CONFIG, overrides)
    run_dir = runs_dir / recipe.name / run_id
    require_tokenizer(resolved, recipe, overrides)
    weights = open_weights(resolved.path, recipe.model, ignored)
    plan = derive(on_one_rank(recipe), 1, detect())
    require_disk(runs_dir, plan.num_parameters.total * (4 if recipe.train.precision == "fp32" else 2))
    with published(run_dir, "--runs-dir DIR") as hidden:
        shown = weights if progress is None else _Shown(weights, progress, plan.num_parameters.total)
        write_checkpoint(recipe, shown, hidden)
        weights.close()
        result = Imported(
            run_dir=str(run_dir),
            source=resolved.name,
            commit=resolved.commit,
            model_type=family.name,
            parameters=plan.num_parameters.total,
            vocab_size=recipe.model.vocab_size,
            new_rows=plan.shape.vocab_size - section["vocab_size"],
            padding_rows=plan.shape.vocab_size - recipe.model.vocab_size,
            ignored_keys=(*without_effect(config, resolved.path), *ignored),
            checkpoint_bytes=sum(path.stat().st_size for path in hidden.rglob("*") if path.is_file()),
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            seconds=round(time.monotonic() - started, 3),
        )
        finish_run(hidden, recipe, asdict(result), COMMENTS)
    return result


class _Shown:
    """Weights whose reading is shown."""

    def __init__(self, weights: WeightSource, progress: Counted, parameters: int) -> None:
        self._weights, self._progress = weights, progress
        progress.begin("parameters", parameters)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        value = self._weights.read(name, offset, shape)
        self._progress.add(value.numel())
        return value


def recipe_values(found: Found, section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The recipe of a model, as plain data.

    Args:
        found: the model.
        section: `model`, but for `seq_length`.
        name: of the recipe.
    """
    most = section.get("max_position_embeddings")
    tokenizer: dict[str, Any] = {}
    if (found.path / TOKENIZER_FILE).exists():
        path = found.name if found.commit else str(found.path.absolute())
        tokenizer = {"type": "huggingface", "path": path, "revision": found.commit}
    return {
        "name": name,
        "description": f"from {found.name}"[:200],
        "model": {"seq_length": min(SEQ_LENGTH, most) if isinstance(most, int) else SEQ_LENGTH, **section},
        "train": dict(TRAIN),
        "optimizer": dict(OPTIMIZER),
        "data": {"tokenizer": tokenizer} if tokenizer else {},
    }


def _recipe(values: Mapping[str, Any], where: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe with the overrides; its warm-up, unless they set it, is at most a share of its steps."""
    recipe = load_values(values, where, overrides).recipe
    if any(each.partition("=")[0].startswith("scheduler") for each in overrides):
        return recipe
    warmup = min(WARMUP, recipe.train.train_iters // WARMUP_SHARE)
    return load_values({**values, "scheduler": {"lr_warmup_iters": warmup}}, where, overrides).recipe


def recipe_name(source: str) -> str:
    """The name of a recipe, made from a path or a name on the Hub: `llama-3.2-1b` from `meta-llama/Llama-3.2-1B`."""
    last = Path(source).resolve().name if Path(source).exists() else source.rpartition("/")[2]
    return re.sub(r"^[^a-z0-9]+", "", re.sub(r"[^a-z0-9._-]+", "-", last.lower()))[:63] or "imported"


def require_tokenizer(found: Found, recipe: Recipe, overrides: Sequence[str]) -> None:
    """A new tokenizer would give every token id another meaning, so one is only trained where that is asked for.

    Raises:
        UserError: the folder has none, or it has ids that the model does not have.
    """
    tokenizer = recipe.data.tokenizer
    if tokenizer.type == "bpe" and not any(each.startswith("data.tokenizer") for each in overrides):
        raise UserError(
            f"no {TOKENIZER_FILE}",
            where=str(found.path),
            rule="a model is trained with the tokenizer that gave its token ids their meaning",
            fix="data.tokenizer.type=huggingface data.tokenizer.path=FOLDER; or data.tokenizer.type=bpe for a new one",
        )
    if tokenizer.type == "huggingface":
        from llmrecipes.data.tokenizer import load_huggingface

        load_huggingface(tokenizer, recipe.model.vocab_size)


def require_disk(runs_dir: Path, needed: int) -> None:
    """Refuse what does not fit the disk, before anything is written.

    Raises:
        UserError: there are fewer than `needed` bytes.
    """
    existing = next(folder for folder in (runs_dir.absolute(), *runs_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"the checkpoint needs {gib(needed)}, {gib(free)} free",
            where=str(runs_dir),
            fix="free some disk space, or --runs-dir on another disk",
        )


def finish_run(
    run_dir: Path, recipe: Recipe, origin: Mapping[str, Any], comments: Mapping[str, str] | None = None
) -> None:
    """Make a directory with a checkpoint of step 0 a run.

    Args:
        run_dir: the directory.
        recipe: of the run.
        origin: what it was made from.
        comments: on keys of the recipe, which is written without defaults; training replaces it by the resolved one.
    """
    status = StatusSink(run_dir, resumed_step=0, total_steps=recipe.train.train_iters)
    status.note(Note(step=0, event="checkpoint_saved"))  # without it the run must not start from fresh weights
    status.close("KILLED")
    write_atomic(run_dir / ORIGIN, json.dumps(origin, indent=2) + "\n")
    # The recipe makes a directory a run, so it comes last.
    write_atomic(run_dir / RESOLVED_NAME, short(recipe, comments, DEFAULTS_NOTE))


def write_checkpoint(
    recipe: Recipe, weights: WeightSource, run_dir: Path, check: Callable[[Plan], None] | None = None
) -> None:
    """Write a checkpoint of step 0, in one process that does not hold the model.

    Args:
        recipe: of the run.
        weights: of its model.
        run_dir: its directory.
        check: called with the plan for one rank before anything is written, in a world of one that has been joined.
    """
    from llmrecipes.checkpoint.manifest import CheckpointInfo
    from llmrecipes.checkpoint.store import CheckpointStore
    from llmrecipes.engine.registry import backend

    single = on_one_rank(recipe)
    plan = derive(single, 1, detect())
    engines = backend(single)
    info = CheckpointInfo(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        layout=plan.layout.as_dict(),
        recipe_hash=recipe_hash(recipe),
        engine=engine_name(single),
        recipe=recipe.model_dump(mode="json"),
    )
    store = CheckpointStore(run_dir / "checkpoints")
    store.claim()
    try:
        temporary = store.temporary_path(0, "import")
        with engines.join(single, engines.platform()):
            if check is not None:
                check(plan)
            written, versions = engines.write_weights(plan, weights, temporary)
        store.publish(temporary, info, versions=versions, known=written.files)
    finally:
        store.release()


@dataclass(frozen=True)
class ImportedFromMegatron:
    """A run before its first step.

    Attributes:
        run_dir: its directory, with recipe.yaml and the checkpoint of step 0.
        source: folder of the checkpoint that it was made from.
        iteration: of that; None if it does not say.
        parameters: of the model, with padding of the vocabulary.
        notes: what differs from the training that was saved.
        checkpoint_bytes: size of the new checkpoint.
        peak_memory_bytes: of this process.
        seconds: that it took.
    """

    run_dir: str
    source: str
    iteration: int | None
    parameters: int
    notes: tuple[str, ...]
    checkpoint_bytes: int
    peak_memory_bytes: int
    seconds: float


def import_megatron(
    source: Path, recipe: str, overrides: Sequence[str], runs_dir: Path, run_id: str
) -> ImportedFromMegatron:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    Only weights are taken: the optimizer, the schedule and the data start from the beginning. One process reads and
    writes them box by box, with the parts of one weight in memory. Any layout, engine and ZeRO stage loads the result.

    Args:
        source: folder of the checkpoint, or the one with `latest_checkpointed_iteration.txt`.
        recipe: name or path of the recipe that describes the model.
        overrides: `key.path=value` of the recipe.
        runs_dir: where runs are kept.
        run_id: of the new run.

    Raises:
        UserError: an invalid recipe; a checkpoint that is incomplete, not plain data, or of another model than the
            recipe's (with the keys and both values, or the weights); a run id in use; or a full disk. Nothing that
            looks like a run is left behind.
    """
    from llmrecipes.engine.core.megatron_lm.folder import open_saved
    from llmrecipes.engine.core.megatron_lm.weights import SavedWeights
    from llmrecipes.hf.folder import published

    started = time.monotonic()
    loaded = load(recipe, overrides)
    saved = open_saved(source)
    if problems := list(check(saved.arguments, loaded.recipe)):
        raise error_of(problems, [], loaded.path, loaded.lines, loaded.overridden)
    weights = SavedWeights(saved)
    run_dir = runs_dir / loaded.recipe.name / run_id
    plan = derive(on_one_rank(loaded.recipe), 1, detect())
    require_disk(runs_dir, plan.num_parameters.total * (4 if loaded.recipe.train.precision == "fp32" else 2))
    with published(run_dir, "--runs-dir DIR") as hidden:
        write_checkpoint(loaded.recipe, weights, hidden, weights.require_fit)
        result = ImportedFromMegatron(
            run_dir=str(run_dir),
            source=str(saved.path),
            iteration=saved.iteration,
            parameters=plan.num_parameters.total,
            notes=tuple(notes(saved.arguments, loaded.recipe)),
            checkpoint_bytes=sum(path.stat().st_size for path in hidden.rglob("*") if path.is_file()),
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            seconds=round(time.monotonic() - started, 3),
        )
        finish_run(hidden, loaded.recipe, asdict(result))
    return result
