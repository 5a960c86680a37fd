"""`llmrecipes upcycle`: a dense run's newest checkpoint becomes the start of a mixture-of-experts run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.models.create import CreatedRun, create_run, first_checkpoint, require_unused
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.upcycling import load_upcycled
from llmrecipes.rundir import Run
from llmrecipes.workflow.run import on_one_rank

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry
    from llmrecipes.engine.base import Engine


RECORD = "upcycled.json"


def upcycle(dense_run: Path, overrides: Sequence[str], runs_dir: Path, run_id: str) -> CreatedRun:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    One process holds both models. The optimizer state is new, and data starts from the beginning.

    Args:
        dense_run: directory of the dense run.
        overrides: keys that turn its recipe into a mixture of experts.
        runs_dir: where runs are kept.
        run_id: run id of the new run.

    Returns:
        With the origin: `dense_run`, `dense_step` of the checkpoint, `dense_parameters` of that model, `parameters` of
        the new one, and `active_parameters`, which one token uses.

    Raises:
        UserError: as `load_upcycled`; no valid checkpoint, a run id in use, too little memory, or a full disk. Nothing
            remains.
    """
    dense, moe = load_upcycled(Run(dense_run).recipe_file, overrides)
    run_dir = Run.of(runs_dir, moe.name, run_id).path
    require_unused(run_dir)
    cluster = detect()
    plans = derive(_plainly(dense), 1, cluster), derive(_plainly(moe), 1, cluster)
    _require_memory(*plans, cluster)
    entry = Run(dense_run).require_checkpoint()

    def write(folder: Path) -> dict[str, Any]:
        _convert(entry, *plans, folder, moe)
        return {
            "dense_run": str(dense_run),
            "dense_step": entry.step,
            "dense_parameters": plans[0].num_parameters.total,
            "parameters": plans[1].num_parameters.total,
            "active_parameters": plans[1].num_parameters.active,
        }

    return create_run(run_dir, moe, write, text=to_yaml(moe), record=RECORD)


def _plainly(recipe: Recipe) -> Recipe:
    """The recipe for one process, with layers that every machine has; they do not show in a checkpoint."""
    single = on_one_rank(recipe)
    model = single.model.model_copy(update={"transformer_impl": "local"})
    return single.model_copy(update={"model": model}).with_layout(torch_compile=False)


def _require_memory(dense: Plan, moe: Plan, cluster: Cluster) -> None:
    memory = moe.memory
    needed = dense.memory.weights + memory.total - memory.activations - memory.logits
    if needed > moe.memory_capacity_bytes:
        raise UserError(
            f"upcycling needs {gib(needed)}, {gib(moe.memory_capacity_bytes)} available",
            where=f"recipe {moe.recipe.name}",
            rule="one process holds the dense model, the mixture of experts and its optimizer state",
            fix="upcycle on a machine with more memory"
            + (", or without its GPU: CUDA_VISIBLE_DEVICES=" if cluster.gpus else ""),
        )


def _convert(entry: Entry, dense: Plan, moe: Plan, run_dir: Path, result: Recipe) -> None:
    from llmrecipes.engine.backends import backend

    engines = backend(moe.recipe)
    platform = engines.platform()
    with engines.join(moe.recipe, platform):
        _save(engines.upcycle(dense, moe, platform, entry), run_dir, result)


def _save(engine: Engine, run_dir: Path, result: Recipe) -> None:
    from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
    from llmrecipes.engine.base import Progress

    store = Run(run_dir).store()
    info = first_checkpoint(result, engine.plan, engine.name)
    with AsyncSaver(store, saver_group(), engine.checkpoint_format()) as saver:
        saver.save(engine.state(Progress()), info)
        (report,) = saver.wait()
    if report.path is None:
        raise UserError(
            f"the checkpoint could not be written: {report.error}",
            where=str(store.directory),
            fix="free some disk space, and upcycle again",
            code=ExitCode.STOP,
        )
