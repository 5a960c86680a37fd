"""What was computed with a frozen model before a run: what it belongs to, and its check before the first step."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmrecipes.checkpoint.manifest import MANIFEST_NAME
from llmrecipes.errors import UserError
from llmrecipes.io import write_atomic
from llmrecipes.recipe.derived.batch_schedule import samples_of, without_ramp
from llmrecipes.recipe.derived.degrees import model_parallel_size
from llmrecipes.recipe.rules.distill_rules import teacher_recipe
from llmrecipes.recipe.rules.preference_rules import (
    frozen_model,
    named,
    precomputed_place,
    reference_recipe,
    with_frozen_model,
)
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.spec import RunSpec
from llmrecipes.untrusted import RECORD as MOST
from llmrecipes.untrusted import read, read_json
from llmrecipes.workflow.run import Log
from llmrecipes.workflow.teacher import located, named_model, plain, require_fit

if TYPE_CHECKING:
    from llmrecipes.data.folder.prepared import Prepared

RECORD = "precomputed.json"


def place(recipe: Recipe) -> tuple[str, Path]:
    """Key and folder.

    Raises:
        UserError: the recipe names none.
    """
    known = precomputed_place(recipe)
    if known is None:
        raise UserError(
            "no key sets the folder to write",
            where=f"recipe {recipe.name}",
            rule="precompute writes log-probabilities of the reference of dpo, or logits of the teacher of distill",
            fix="llmrecipes precompute RECIPE dpo.reference_log_probs=DIR, or distill.logits=DIR distill.top_k=32",
        )
    return known[0], Path(known[1])


def passes_recipe(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe of the frozen model's passes on a number of ranks: a micro-batch on each pipeline stage."""
    parallel = recipe.layout
    replicas = ranks // model_parallel_size(parallel) or 1
    size = recipe.layout.micro_batch_size * replicas * parallel.pipeline_model_parallel_size
    live = with_frozen_model(recipe)
    frozen = reference_recipe(live) if live.distill is None else teacher_recipe(live)
    # Initial values are those that the passes beside training have: of a teacher, for rehearsals, others than its own.
    seed = frozen.train.seed + (live.distill is not None)
    train = without_ramp(frozen.train, global_batch_size=size, seed=seed)
    return frozen.model_copy(update={"lora": None, "train": train})


def frozen_path(recipe: Recipe, runs_dir: Path) -> Path | None:
    """Where the weights of the frozen model are; None: they are initial ones.

    Raises:
        UserError: they are not here, or are those of another model.
    """
    live = with_frozen_model(recipe)
    key = named(live)
    reference = named_model(live)
    if key is not None and reference is not None:
        path = located(reference, runs_dir, key)
        require_fit(path, live)
        return path
    if live.train.pretrained is None:
        return None
    from llmrecipes.hf.reading import resolve

    return resolve(live.train.pretrained).path.absolute()


def identity(path: Path | None, recipe: Recipe, log: Log) -> str:
    """What tells the weights of a frozen model from others."""
    if path is None:
        return f"initial ones of seed {recipe.train.seed}, init_method_std {recipe.model.init_method_std}"
    if (path / "config.json").is_file():
        from llmrecipes.hf.reading import fingerprint, open_folder

        return fingerprint(open_folder(path), log)
    return hashlib.sha256(read(path / MANIFEST_NAME, root=path)).hexdigest()


def facts(recipe: Recipe, prepared: Prepared, weights: str) -> dict[str, Any]:
    """What the values belong to, as JSON values."""
    from llmrecipes.data.folder.prepared import ORDER, index_folder, most_passes
    from llmrecipes.data.read.curriculum import ordering

    tokens = {
        name: file.sha256
        for name, file in prepared.manifest.files.items()
        if name.endswith((".bin", ".idx", ".answers"))
    }
    content = hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()
    values: dict[str, Any] = {
        "data": {"folder": prepared.path.name, "content": content},
        "model": plain(frozen_model(with_frozen_model(recipe))),
        "model.weights": weights,
        "train.precision": recipe.train.precision,
    }
    if recipe.distill is not None:
        curriculum = recipe.data.curriculum
        values["order"] = {
            "train.seed": recipe.train.seed,
            "samples": samples_of(recipe),
            "data.sources.weight": prepared.weights,
            "megatron-core": version("megatron-core"),
            "data.chat.packing": None if recipe.data.chat is None else recipe.data.chat.packing,
            "data.curriculum": None if curriculum is None else ordering(curriculum, index_folder(recipe, prepared)),
        }
        if recipe.data.chat is None and most_passes(recipe, prepared) > 1:
            values["order"]["passes"] = ORDER
        values["distill.top_k"] = recipe.distill.top_k
    return cast(dict[str, Any], json.loads(json.dumps(values)))


def require_precomputed(spec: RunSpec, log: Log) -> None:
    """Refuse to start a run whose precomputed values are not there, not intact, or belong to something else.

    The weights of the frozen model are compared where they are; a run that has begun continues with the same values
    without them.

    Args:
        spec: spec of a run whose data is prepared.

    Raises:
        UserError: what is wrong.
    """
    named_folder = precomputed_place(spec.recipe)
    if named_folder is None:
        return
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.data.read import precomputed

    key = named_folder[0]
    folder = Path(named_folder[1])
    where = f"{key}: {folder}"
    try:
        record, digest = precomputed.read_record(folder, where)
        now = facts(spec.recipe, open_prepared(spec.recipe, spec.data_dir), record.facts.get("model.weights", ""))
        precomputed.require_same(record.facts, now, where)
        if spec.from_scratch or _recorded(spec.run_dir) != digest:
            _require_same_weights(spec, record.facts, where, log)
        precomputed.require_intact(folder, record, log)
    except UserError:
        spec.run.remove_if_empty()
        raise
    write_atomic(spec.run_dir / RECORD, json.dumps({"path": str(folder.absolute()), "sha256": digest}, indent=2) + "\n")
    log(where)


def _require_same_weights(spec: RunSpec, then: dict[str, Any], where: str, log: Log) -> None:
    from llmrecipes.data.read.precomputed import require_same

    live = with_frozen_model(spec.recipe)
    try:
        path = spec.pretrained if named(live) is None and spec.pretrained else frozen_path(spec.recipe, spec.runs_dir)
        weights = identity(path, live, log)
    except (UserError, OSError) as error:
        log(f"{where}: the weights that it was computed with are not here to be compared ({error})")
        return
    require_same({"model.weights": then.get("model.weights")}, {"model.weights": weights}, where)


def _recorded(run_dir: Path) -> str | None:
    try:
        sha256 = read_json(run_dir / RECORD, root=run_dir, most=MOST).get("sha256")
    except (OSError, ValueError, AttributeError):
        return None
    return sha256 if isinstance(sha256, str) else None
