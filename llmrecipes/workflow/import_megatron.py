"""`llmrecipes import --from megatron`: a checkpoint of Megatron-LM becomes a run before its first step."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.document import error_of
from llmrecipes.recipe.load import load
from llmrecipes.recipe.megatron_lm import check, notes
from llmrecipes.workflow.importing import finish_run, require_disk, write_checkpoint
from llmrecipes.workflow.run import on_one_rank


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
    from llmrecipes.engine.megatron.megatron_lm.folder import open_saved
    from llmrecipes.engine.megatron.megatron_lm.weights import SavedWeights
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
