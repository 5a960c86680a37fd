"""`llmrecipes import`: a Hugging Face model or a Megatron-LM checkpoint becomes a run before its first step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.hardware.process import peak_memory
from llmrecipes.hf import completion
from llmrecipes.models.create import CreatedRun, create_run, write_checkpoint
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.document import error_of
from llmrecipes.recipe.load import DEFAULTS_NOTE, load, load_values, short
from llmrecipes.recipe.rules.megatron_lm import check, notes
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.workflow.pretrained import recipe_name, recipe_values, require_tokenizer
from llmrecipes.workflow.run import on_one_rank

if TYPE_CHECKING:
    from llmrecipes.tracking.progress import Counted


WARMUP, WARMUP_SHARE = 50, 20
"""Steps of warm-up, and the largest share of `train_iters` that they are: one in 20."""
COMMENTS = {
    "train.train_iters": "steps",
    "train.global_batch_size": "sequences per step",
    "optimizer.lr": "small: the weights are trained already",
}
"""Of the recipe of an imported model, by key."""


@completion.beside()
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
) -> CreatedRun:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    One process reads and writes the weights box by box: its memory does not depend on the size of the model. Any
    layout, engine and ZeRO stage loads the checkpoint.

    Args:
        source: a folder with config.json and safetensors, or a name on the Hub.
        overrides: `key.path=value` of the recipe.
        runs_dir: where runs are kept.
        run_id: run id of the new run.
        revision: branch, tag or commit on the Hub.
        name: name of the recipe; None: made from `source`.
        ignored: keys of config.json that recipes do not have, and that the user says have no effect.
        progress: shows how much is written.

    Returns:
        With the origin: `source` (folder or name), `commit` of the Hub's repository (None for a folder), `model_type`,
        `parameters` with padding of the vocabulary, `precision` of the checkpoint and `stored_precision` that the
        folder asks for, `vocab_size` of the recipe, `new_rows` of the embedding that the folder does not have (for new
        tokens and padding: their mean), `padding_rows` of these that only pad, `left_out` tensors (of multi-token
        prediction, if the overrides say so), `ignored_keys` of config.json that have no effect, and the cost:
        `checkpoint_bytes`, `peak_memory_bytes` of this process, `seconds`.

    Raises:
        UserError: the model cannot be found, read or described by a recipe; a run id in use; or a full disk. Nothing
            remains.
    """
    from llmrecipes.hf.generation_config import keep
    from llmrecipes.hf.match import require_ignorable, section_of, validated, without_effect
    from llmrecipes.hf.reading import CONFIG, open_folder, precision_of, read_config, resolve
    from llmrecipes.hf.weights import open_weights, predictions

    started = time.monotonic()
    model = resolve(source, revision)
    config = read_config(model.path)
    require_ignorable(config, ignored, str(model.path / CONFIG))
    family, section = section_of(config, model.path, ignored, predicting=True)
    opened = open_folder(model.path)
    section["mtp_num_layers"] = predictions(section, opened)
    validated(section, 1, str(model.path / CONFIG))
    values = recipe_values(model, section, name or recipe_name(model.name))
    values["train"]["precision"] = precision_of(opened)
    recipe = _recipe(values, model.path / CONFIG, overrides)
    run_dir = Run.of(runs_dir, recipe.name, run_id).path
    require_tokenizer(model, recipe, overrides)
    weights = open_weights(model.path, recipe.model, ignored)
    plan = _planned(recipe, runs_dir)

    def write(folder: Path) -> dict[str, Any]:
        write_checkpoint(recipe, weights, folder, progress)
        weights.close()
        keep(model.path, config, folder)
        return {
            "source": model.name,
            "commit": model.commit,
            "model_type": family.name,
            "parameters": plan.num_parameters.total,
            "precision": recipe.train.precision,
            "stored_precision": values["train"]["precision"],
            "vocab_size": recipe.model.vocab_size,
            "new_rows": plan.shape.vocab_size - section["vocab_size"],
            "padding_rows": plan.shape.vocab_size - recipe.model.vocab_size,
            "left_out": len(weights.left_out),
            "ignored_keys": (*without_effect(config, model.path), *ignored),
            **_cost(folder, started),
        }

    return create_run(run_dir, recipe, write, text=short(recipe, COMMENTS, DEFAULTS_NOTE))


def _recipe(values: Mapping[str, Any], where: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe with the overrides; its warm-up, unless they set it, is at most a share of its steps."""
    recipe = load_values(values, where, overrides).recipe
    if any(override.partition("=")[0].startswith("scheduler") for override in overrides):
        return recipe
    warmup = min(WARMUP, recipe.train.train_iters // WARMUP_SHARE)
    return load_values({**values, "scheduler": {"lr_warmup_iters": warmup}}, where, overrides).recipe


def _planned(recipe: Recipe, runs_dir: Path) -> Plan:
    """The plan of a model on one rank, whose checkpoint fits the disk.

    Raises:
        UserError: it does not.
    """
    plan = derive(on_one_rank(recipe), 1, detect())
    needed = plan.num_parameters.total * (4 if recipe.train.precision == "fp32" else 2)
    existing = next(folder for folder in (runs_dir.absolute(), *runs_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"the checkpoint needs {gib(needed)}, {gib(free)} free",
            where=str(runs_dir),
            fix="free some disk space, or --runs-dir on another disk",
        )
    return plan


def _cost(folder: Path, started: float) -> dict[str, Any]:
    return {
        "checkpoint_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "peak_memory_bytes": peak_memory(),
        "seconds": round(time.monotonic() - started, 3),
    }


def import_megatron(
    source: Path,
    recipe: str,
    overrides: Sequence[str],
    runs_dir: Path,
    run_id: str,
    progress: Counted | None = None,
) -> CreatedRun:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    Only weights are taken: the optimizer, the schedule and the data start from the beginning. One process reads and
    writes them box by box, with the parts of one weight in memory. Any layout, engine and ZeRO stage loads the result.

    Args:
        source: folder of the checkpoint, or the one with `latest_checkpointed_iteration.txt`.
        recipe: name or path of the recipe that describes the model.
        overrides: `key.path=value` of the recipe.
        runs_dir: where runs are kept.
        run_id: run id of the new run.
        progress: shows how much is written.

    Returns:
        With the origin: `source` (folder of the checkpoint), `iteration` (None if it does not say), `parameters` with
        padding of the vocabulary, `notes` on what differs from the training that was saved, and the cost as for
        `import_model`.

    Raises:
        UserError: an invalid recipe; a checkpoint that is incomplete, not plain data, or of another model than the
            recipe's (with the keys and both values, or the weights); a run id in use; or a full disk. Nothing remains.
    """
    from llmrecipes.engine.core.megatron_lm_checkpoint import SavedWeights, open_saved

    started = time.monotonic()
    loaded = load(recipe, overrides)
    saved = open_saved(source)
    if problems := list(check(saved.arguments, loaded.recipe)):
        raise error_of(problems, [], loaded.path, loaded.lines, loaded.overridden)
    weights = SavedWeights(saved)
    run_dir = Run.of(runs_dir, loaded.recipe.name, run_id).path
    plan = _planned(loaded.recipe, runs_dir)

    def write(folder: Path) -> dict[str, Any]:
        write_checkpoint(loaded.recipe, weights, folder, progress, weights.require_fit)
        return {
            "source": str(saved.path),
            "iteration": saved.iteration,
            "parameters": plan.num_parameters.total,
            "notes": tuple(notes(saved.arguments, loaded.recipe)),
            **_cost(folder, started),
        }

    return create_run(run_dir, loaded.recipe, write, text=short(loaded.recipe, None, DEFAULTS_NOTE))
