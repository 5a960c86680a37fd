"""`llmrecipes upcycle`: a dense run's newest checkpoint becomes the start of a mixture-of-experts run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.io import write_atomic
from llmrecipes.plan.check import gib
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.load import recipe_hash, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.upcycling import load_upcycled
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import Note
from llmrecipes.tracking.status import StatusSink
from llmrecipes.workflow.run import on_one_rank

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import CheckpointStore, Entry
    from llmrecipes.engine.base import Engine

ORIGIN = "upcycled.json"


@dataclass(frozen=True)
class Upcycled:
    """A mixture-of-experts run before its first step.

    Attributes:
        run_dir: its directory, with recipe.yaml and the checkpoint of step 0.
        dense_run: directory of the run it was made from.
        dense_step: step of the checkpoint it was made from.
        dense_parameters: parameters of that model.
        parameters: parameters of the new one.
        active_parameters: those of them that one token uses.
    """

    run_dir: str
    dense_run: str
    dense_step: int
    dense_parameters: int
    parameters: int
    active_parameters: int


def upcycle(dense_run: Path, overrides: Sequence[str], runs_dir: Path, run_id: str) -> Upcycled:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    One process holds both models. The optimizer state is new, and data starts from the beginning.

    Args:
        dense_run: directory of the dense run.
        overrides: keys that turn its recipe into a mixture of experts.
        runs_dir: where runs are kept.
        run_id: of the new run.

    Raises:
        UserError: see `load_upcycled`; no valid checkpoint, a run id in use, too little memory, or a full disk. Nothing
            that looks like a run is left behind.
    """
    dense, moe = load_upcycled(Run(dense_run).recipe_file, overrides)
    run_dir = Run.of(runs_dir, moe.name, run_id).path
    if Run(run_dir).recipe_file.exists():
        raise UserError(f"run {run_id} already exists", where=str(run_dir), fix="another --run-id, or none")
    cluster = detect()
    whole_dense, whole_moe = _plainly(dense), _plainly(moe)
    plans = derive(whole_dense, 1, cluster), derive(whole_moe, 1, cluster)
    _require_memory(*plans, cluster)

    entry = Run(dense_run).require_checkpoint()
    result = Upcycled(
        run_dir=str(run_dir),
        dense_run=str(dense_run),
        dense_step=entry.step,
        dense_parameters=plans[0].num_parameters.total,
        parameters=plans[1].num_parameters.total,
        active_parameters=plans[1].num_parameters.active,
    )
    _convert(entry, *plans, Run(run_dir).store(), moe)
    # The recipe makes a directory a run, so it comes last.
    status = StatusSink(run_dir, resumed_step=0, total_steps=moe.train.train_iters)
    status.note(Note(step=0, event="checkpoint_saved"))  # without it the run must not start from fresh weights
    status.close("KILLED")
    write_atomic(run_dir / ORIGIN, json.dumps(asdict(result), indent=2) + "\n")
    write_atomic(Run(run_dir).recipe_file, to_yaml(moe))
    return result


def _plainly(recipe: Recipe) -> Recipe:
    """The recipe for one process, with layers that every machine has; they do not show in a checkpoint."""
    single = on_one_rank(recipe)
    return single.model_copy(
        update={
            "model": single.model.model_copy(update={"transformer_impl": "local"}),
            "train": single.train.model_copy(update={"torch_compile": False}),
        }
    )


def _require_memory(dense: Plan, moe: Plan, cluster: Cluster) -> None:
    memory = moe.memory
    needed = dense.memory.weights + memory.total - memory.activations - memory.logits
    if needed > moe.memory_capacity_bytes:
        raise UserError(
            f"needs {gib(needed)}, and there are {gib(moe.memory_capacity_bytes)} here",
            where=f"recipe {moe.recipe}",
            rule="one process holds the dense model, the mixture of experts and its optimizer state",
            fix="upcycle on a machine with more memory"
            + (", or without its GPU: CUDA_VISIBLE_DEVICES=" if cluster.gpus else ""),
        )


def _convert(entry: Entry, dense: Plan, moe: Plan, store: CheckpointStore, result: Recipe) -> None:
    from llmrecipes.engine.registry import backend

    engines = backend(moe.recipe)
    platform = engines.platform()
    with engines.join(moe.recipe, platform):
        _save(engines.upcycle(dense, moe, platform, entry), store, result)


def _save(engine: Engine, store: CheckpointStore, result: Recipe) -> None:
    from llmrecipes.checkpoint.manifest import CheckpointInfo
    from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
    from llmrecipes.engine.base import Progress

    info = CheckpointInfo(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        layout=engine.plan.layout.as_dict(),
        recipe_hash=recipe_hash(result),
        engine=engine.name,
        recipe=result.model_dump(mode="json"),
    )
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
